"""A method of the trainer with something around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Wrapped:
    """A bound method of the trainer with something around it; an instance, so that it can be pickled.

    Args:
        method: The trainer's own method, a subclass's included.
        around: Called as ``around(method, *args, **kwargs)``.
    """

    def __init__(self, method: Callable[..., Any], around: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._method, self._around = method, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is around the method."""
        return self._around(self._method, *args, **kwargs)
