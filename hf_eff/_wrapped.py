"""A method of the trainer with something around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Wrapped:
    """A bound method of an object with something around it, in its place; an instance, so that it can be pickled.

    Args:
        owner: The trainer, or what belongs to it.
        name: Its own method, a subclass's included; `method` stays there for who wants it alone.
        around: Called as ``around(method, *args, **kwargs)`` until `undo`.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._was_on_instance, self.method = name in vars(owner), getattr(owner, name)
        functools.update_wrapper(self, self.method)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is around the method."""
        return self._around(self.method, *args, **kwargs)

    def undo(self) -> None:
        """Put the method back; under a wrapper that came later, only pass through from now on."""
        self._around = _pass_through
        if vars(self._owner).get(self._name) is not self:
            return
        if self._was_on_instance:
            setattr(self._owner, self._name, self.method)
        else:
            delattr(self._owner, self._name)


def _pass_through(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)
