"""The hooks that a run calls again and again, as typed lists of bound methods: who is called, in which order."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from shared_core.engine.technique import Context, Purpose, Technique

P = ParamSpec("P")
R = TypeVar("R")
_Method = TypeVar("_Method", bound=Callable[..., Any])

Calls = list[tuple[str, Callable[P, R]]]
"""The recipe key of a technique, for its time in the receipt, and its bound method."""


def overrides(method: Callable[..., Any], stock: Callable[..., Any]) -> bool:
    """Return True if a technique has its own version of a hook.

    Args:
        method: The bound method of a technique.
        stock: The function of `Technique` that it overrides or not.
    """
    # A hook that is wrapped (a Mock, a partial) counts as its own.
    return not (isinstance(method, MethodType) and method.__func__ is stock)


def _own(calls: list[tuple[str, _Method]], stock: Callable[..., Any]) -> list[tuple[str, _Method]]:
    return [(key, method) for key, method in calls if overrides(method, stock)]


class Hooks:
    """For each hook of every step or so the methods that do something then; a technique without its own is left out.

    Args:
        techniques: Recipe key → technique, in the order of composition.
    """

    def __init__(self, techniques: Mapping[str, Technique]) -> None:
        self.seconds = dict.fromkeys(techniques, 0.0)
        """What each technique has taken, by its key."""
        pairs = list(techniques.items())
        self.forward: Calls[[Context], contextlib.AbstractContextManager[None]] = _own(
            [(key, one.forward) for key, one in pairs], Technique.forward
        )
        self.loss: Calls[[Tensor, Context], Tensor] = _own([(key, one.loss) for key, one in pairs], Technique.loss)
        # Gradients are made private before another technique reads them: what it makes of them then gives nothing away.
        self.before_step: Calls[[Context], None] = _own(
            [
                (key, one.before_step)
                # sorted is stable: False comes first, so private ones are first, the others keep their order.
                for key, one in sorted(pairs, key=lambda pair: not pair[1].makes_gradients_private)
            ],
            Technique.before_step,
        )
        self.after_step: Calls[[Context, bool], None] = _own(
            [(key, one.after_step) for key, one in pairs], Technique.after_step
        )
        self.swapped: Calls[[Context, Purpose], contextlib.AbstractContextManager[None]] = _own(
            [(key, one.swapped) for key, one in pairs], Technique.swapped
        )

    def leave_out(self, method: Callable[..., Any]) -> None:
        """Call a method no more in this run; a round that is under way goes on as it began."""
        for name in ("forward", "loss", "before_step", "after_step", "swapped"):
            # Bound methods compare by object and function.
            setattr(self, name, [call for call in getattr(self, name) if call[1] != method])

    def call(
        self, calls: Calls[Concatenate[Context, P], None], context: Context, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call one of the lists above, and count each technique's time."""
        for key, hook in calls:
            start = time.perf_counter()
            hook(context, *args, **kwargs)
            self.seconds[key] += time.perf_counter() - start

    def around_forward(self, context: Context) -> contextlib.AbstractContextManager[Any]:
        """Return what surrounds the forward and the loss of a micro-batch."""
        # One technique is the usual case: an ExitStack costs more than its hook.
        if len(self.forward) < 2:
            return self.forward[0][1](context) if self.forward else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            for _, forward in self.forward:
                stack.enter_context(forward(context))
            # pop_all hands the contexts over: entered here, left by the caller.
            return stack.pop_all()

    def mixed(self, loss: Tensor, context: Context) -> Tensor:
        """Return a loss with what techniques add, in the order of composition: each sees that of those before it."""
        for key, hook in self.loss:
            start = time.perf_counter()  # not `timed`: a generator costs more than some hooks
            loss = hook(loss, context)
            self.seconds[key] += time.perf_counter() - start
        return loss

    def entered(self, context: Context, purpose: Purpose) -> contextlib.ExitStack:
        """Enter `swapped` of all techniques; return the stack that leaves them, as it does at once where one raises."""
        # pop_all only if all were entered: with an error, those that were are left.
        with contextlib.ExitStack() as stack:
            for key, hook in self.swapped:
                # Made outside of the time that is counted: calling a context manager's function does nothing yet.
                surrounding = hook(context, purpose)
                with self.timed(key):
                    surrounding.__enter__()
                stack.push(functools.partial(self._left, key, surrounding))
            return stack.pop_all()

    def _left(self, key: str, surrounding: contextlib.AbstractContextManager[None], *error: Any) -> bool | None:
        with self.timed(key):
            return surrounding.__exit__(*error)

    @contextlib.contextmanager
    def timed(self, key: str) -> Iterator[None]:
        """Count the time inside for a technique."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[key] += time.perf_counter() - start
