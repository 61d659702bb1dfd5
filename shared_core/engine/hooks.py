"""The hooks of every step as typed lists of bound methods: which are called, and in which order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from shared_core.engine.technique import Context, Purpose, Technique, returned

P = ParamSpec("P")
R = TypeVar("R")
_FREQUENT = ("forward", "loss", "before_step", "after_step", "swapped")

Calls = list[tuple[str, Callable[P, R]]]
"""Recipe keys, to which the receipt adds the time, and bound methods."""


def overrides(method: Callable[..., Any], stock: Callable[..., Any]) -> bool:
    """Return True if a technique overrides a hook.

    Args:
        method: The bound method of a technique.
        stock: The function of `Technique`.
    """
    # A hook that is wrapped (a Mock, a partial) counts as its own.
    return not (isinstance(method, MethodType) and method.__func__ is stock)


class Hooks:
    """The methods to call for each frequent hook. Techniques that don't override a hook are left out.

    Args:
        techniques: Recipe key → technique, in the order of composition.
    """

    def __init__(self, techniques: Mapping[str, Technique]) -> None:
        self.seconds = dict.fromkeys(techniques, 0.0)
        """Time spent in each technique, by its key."""
        self.forward: Calls[[Context], AbstractContextManager[None]] = []
        self.loss: Calls[[Tensor, Context], Tensor] = []
        self.before_step: Calls[[Context], None] = []
        self.after_step: Calls[[Context, bool], None] = []
        self.swapped: Calls[[Context, Purpose], AbstractContextManager[None]] = []
        for hook in _FREQUENT:
            methods = [(key, getattr(one, hook)) for key, one in techniques.items()]
            setattr(self, hook, [call for call in methods if overrides(call[1], getattr(Technique, hook))])
        # Gradients are made private before other techniques read them, so that those reveal nothing. `sort` is stable
        # and False comes first: private ones lead, the others keep their order.
        self.before_step.sort(key=lambda call: not techniques[call[0]].makes_gradients_private)

    @property
    def acts_on_loss(self) -> bool:
        """True if a technique still has work in the forward pass or the loss."""
        return bool(self.forward or self.loss)

    def drop(self, method: Callable[..., Any]) -> None:
        """Stop calling a method in this run. A round in progress continues."""
        for name in _FREQUENT:
            # Bound methods compare by object and function.
            setattr(self, name, [call for call in getattr(self, name) if call[1] != method])

    def call(self, calls: Calls[..., None], *args: Any) -> None:
        """Call the methods of one of the lists above, and measure each technique's time."""
        for key, hook in calls:
            start = time.perf_counter()
            hook(*args)
            self.seconds[key] += time.perf_counter() - start

    def around_forward(self, context: Context) -> AbstractContextManager[Any]:
        """Return a context manager for one micro-batch's forward pass and loss."""
        arounds = [_Timed(self.seconds, key, "forward", hook(context)) for key, hook in self.forward]
        # Usually there is one technique, and an ExitStack would cost more than its hook.
        if len(arounds) < 2:
            return arounds[0] if arounds else contextlib.nullcontext()
        return _all_entered(arounds)

    def mixed(self, loss: Tensor, context: Context) -> Tensor:
        """Return the loss after all techniques, each of which receives the loss of the previous one."""
        for key, hook in self.loss:
            start = time.perf_counter()  # not `timed`: a generator costs more than some hooks
            loss = returned(key, "loss", hook(loss, context), Tensor)
            self.seconds[key] += time.perf_counter() - start
        return loss

    def entered(self, context: Context, purpose: Purpose) -> contextlib.ExitStack:
        """Enter `swapped` of all techniques; return the stack that leaves them, as it does at once where one raises."""
        return _all_entered(_Timed(self.seconds, key, "swapped", hook(context, purpose)) for key, hook in self.swapped)

    @contextlib.contextmanager
    def timed(self, key: str) -> Iterator[None]:
        """Count the time inside for a technique."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[key] += time.perf_counter() - start


class _Timed:
    """A hook's context manager whose entering and leaving count as the technique's time."""

    def __init__(self, seconds: dict[str, float], key: str, hook: str, inner: AbstractContextManager[None]) -> None:
        self._seconds, self._key, self._inner = seconds, key, returned(key, hook, inner, AbstractContextManager)

    def __enter__(self) -> None:
        start = time.perf_counter()
        self._inner.__enter__()
        self._seconds[self._key] += time.perf_counter() - start

    def __exit__(self, *raised: Any) -> bool | None:
        start = time.perf_counter()
        try:
            return self._inner.__exit__(*raised)
        finally:
            self._seconds[self._key] += time.perf_counter() - start


def _all_entered(arounds: Iterable[_Timed]) -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        for around in arounds:
            stack.enter_context(around)
        # pop_all hands the contexts over: entered here, left by the caller. With an error, those entered are left.
        return stack.pop_all()
