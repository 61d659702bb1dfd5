"""`Undo`: the actions that restore the user's model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any


class Undo:
    """Calls to make at the end of a run, last to first.

    Unlike with `ExitStack`, a deep copy of a run restores the copied model, not the original.

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
        """Add a call."""
        self._calls.append(partial(function, *args, **kwargs))

    def close_with(self, function: Callable[[], object]) -> None:
        """Add a call to make after all others."""
        self._calls.insert(0, function)

    def close(self) -> None:
        """Make all calls once. An error in one does not prevent the others."""
        calls, self._calls = self._calls, []
        with contextlib.ExitStack() as stack:
            for call in calls:
                stack.callback(call)
