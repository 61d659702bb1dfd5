"""What gives a model back as the user made it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Calls for the end of a run, made last to first. A copy of a run undoes its own; `ExitStack` calls the original's.

    Example:
        >>> undo = Undo()
        >>> undo.callback(print, "first in, last out")
        >>> undo.callback(print, "last in, first out")
        >>> undo.close()
        last in, first out
        first in, last out
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Keep a call for the end."""
        self._calls.append(partial(function, *args, **kwargs))

    def close_with(self, function: Callable[[], object]) -> None:
        """Keep a call for after all others."""
        self._calls.insert(0, function)

    def close(self) -> None:
        """Make all calls, once; an error in one does not keep the others from being made."""
        calls, self._calls = self._calls, []
        with contextlib.ExitStack() as stack:
            for call in calls:
                stack.callback(call)
