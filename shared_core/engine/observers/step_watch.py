"""Check that only the session's optimizers step the weights, after the techniques have seen the gradients."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.checks.model_guards import with_wrapped
from shared_core.errors import TrainingError

_FIRST_STEPS = 8
"""Number of applied steps after which weights are no longer compared, even if they have not changed yet."""
_PIECE = 1 << 18  # elements at a time, to bound memory
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class StepWatch:
    """Raises an error if another optimizer steps the weights, or one steps them inside backward.

    Every torch optimizer reports its steps through a hook. Updates without such a step, for example by a hook that
    changes weights, are found by comparing the weights before and after backward, until the session's optimizers have
    changed them.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._optimizers: tuple[Any, ...] = ()
        self._known: set[int] = set()  # ids of these and of the optimizers that they wrap
        self._held: set[int] = set()  # ids of the parameters in their groups
        self._parameters: dict[str, Tensor] = {}
        self._ids: set[int] = set()
        self._acting = self._other = ""
        self._is_bare = self._is_step = self._stepped = self._has_stepped = False
        self._first: Any = None  # the first to step since the last `after_step`
        self._steps_left = 0
        self._marked: dict[str, int] = {}
        self.inside_backward = ""
        """Name of an optimizer that steps inside backward, if one was seen."""

    def close(self) -> None:
        """Stop watching."""
        _WATCHES.discard(self)
        self._reset()

    def watch(self, model: nn.Module, optimizers: Iterable[Any], acting: str, *, is_bare: bool) -> None:
        """Watch the weights of this model instead of an earlier one.

        Args:
            model: The model with techniques attached, before they begin.
            optimizers: The optimizers given to `Session.begin`.
            acting: Key of a technique that needs complete gradients before the step, empty if none does.
            is_bare: True for the user's own loop, in which every step must be one of these optimizers.

        Raises:
            TrainingError: If a technique needs complete gradients, and an optimizer steps inside backward.
        """
        self.close()
        reshard_(model)
        self._optimizers, self._acting, self._is_bare = tuple(optimizers), acting, is_bare
        self._known = {id(one) for optimizer in self._optimizers for one in with_wrapped(optimizer)}
        self._held = {id(held) for one in self._optimizers for group in one.param_groups for held in group["params"]}
        self._parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._ids = {*map(id, self._parameters.values())}
        if name := next(filter(None, map(_taken_by, self._parameters.values())), ""):
            self._refuse_inside(name)
        self._steps_left = _FIRST_STEPS if acting else 0
        _look_at_steps()
        _WATCHES.add(self)

    # -- one step

    @property
    def is_comparing(self) -> bool:
        """True until the session's optimizers have changed the weights."""
        return self._steps_left > 0

    def mark(self) -> None:
        """Record the weights after a forward, before backward."""
        if self.is_comparing:
            self._marked = _digests(self._parameters)

    @contextlib.contextmanager
    def marking(self, forward: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Wrap a forward, which may change weights itself, and record the weights after it."""
        self._marked = {}
        with forward:
            yield
        self.mark()

    def check_reported(self) -> None:
        """Check, before a forward, that no optimizer stepped without a call of `after_step`, until the first call.

        Raises:
            TrainingError: If an optimizer that another one wraps did: no front end sees its steps.
        """
        first = self._first
        if first is None or self._has_stepped or any(first is one for one in self._optimizers):
            return
        holders = (type(one).__name__ for one in self._optimizers if any(first is it for it in with_wrapped(one)))
        outer, inner = next(holders, self._names), type(first).__name__
        raise TrainingError(
            "session",
            f"{inner}, which {outer} wraps, stepped outside {outer}.step, so no technique saw the step",
            f"call {outer}.step(closure) instead of its other methods, such as second_step",
        )

    def before_step(self) -> None:
        """Check that backward changed no weight. The session's optimizers step next.

        Raises:
            TrainingError: If a technique needs complete gradients, and weights have changed.
        """
        self._is_step = True
        if self._marked:
            now = _digests(self._parameters)
            if now != self._marked:
                self._refuse_inside(self._names, ", and reload the weights, which have changed")

    def discard(self) -> None:
        """Drop the gradients, so that the trainer's next step changes nothing.

        Raises:
            TrainingError: If an optimizer already stepped inside backward.
        """
        if self.inside_backward:
            raise TrainingError(
                "session",
                "a step with NaN or infinite gradients cannot be skipped, because "
                f"{self.inside_backward} stepped inside backward",
                "use an optimizer that steps after backward, such as AdamW",
            )
        for optimizer in self._optimizers:
            optimizer.zero_grad()  # to None: without gradients, optimizers (also fused) change no weights or state

    def after_step(self, *, skipped: bool = False) -> None:
        """Check that one of the session's optimizers made the step.

        Args:
            skipped: True if the front end reported no step.

        Raises:
            TrainingError: If another optimizer did.
        """
        stepped, other = self._stepped, self._other
        self._stepped, self._other, self._is_step, self._first = False, "", False, None
        if not stepped and (other or (self._is_bare and self._has_stepped and not skipped)):
            raise self._others(other)
        if not skipped:
            self._has_stepped = stepped
        if self._marked and not skipped:
            # The weights changed in the step, not before it.
            moved = _digests(self._parameters) != self._marked
            self._steps_left = 0 if moved else self._steps_left - 1
        self._marked = {}

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        """Check a step of any optimizer in this process before it is made."""
        if torch._C._current_graph_task_id() != -1:  # in a backward
            if not self.inside_backward and _holds(optimizer, self._ids):
                name, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
                label = name if package == "torch" else f"{package}.{name}"  # GaLore's is called AdamW, too
                self._refuse_inside(label if name in self._names else f"{label} of {self._names}")
        elif not self._known:
            return  # `begin` got no optimizers, so no step is wrong
        elif id(optimizer) in self._known:
            self._stepped, self._first = True, self._first or optimizer
        # The user's own loop may also step with another optimizer, if no technique acts on gradients.
        elif _holds(optimizer, self._ids if self._acting else self._held):
            self._other = type(optimizer).__name__
            if not self._is_step and (self._acting or not self._is_bare):
                raise self._others(self._other)

    @property
    def _names(self) -> str:
        return " and ".join(type(one).__name__ for one in self._optimizers)

    def _others(self, name: str) -> TrainingError:
        return TrainingError(
            "session",
            "an optimizer stepped that was not passed to begin" + (f": another {name}" if name else ""),
            "change param_groups instead of replacing the optimizer, or finish this session and start another",
        )

    def _refuse_inside(self, name: str, more: str = "") -> None:
        self.inside_backward = name
        if self._acting:
            raise TrainingError(
                self._acting,
                f"gradients must be complete before the optimizer steps, but {name} steps inside backward",
                f"use an optimizer that steps after backward, not a layerwise one or LOMO{more}",
            )


_WATCHES: weakref.WeakSet[StepWatch] = weakref.WeakSet()
"""All active watches. Weak references, so that an unused session is freed."""


@functools.cache
def _look_at_steps() -> None:
    # Registered once and never removed: torch iterates over its hooks in each step, and they must not change then.
    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for watch in list(_WATCHES):
            watch._before(optimizer)

    register_optimizer_step_pre_hook(before)


def _holds(optimizer: torch.optim.Optimizer, ids: set[int]) -> bool:
    return any(id(held) in ids for group in optimizer.param_groups for held in group["params"])


def _taken_by(parameter: Any) -> str:
    """Return the name of an optimizer that steps a parameter inside backward; empty if none is known."""
    if stepping := getattr(parameter, "_in_backward_optimizers", None):  # torch.distributed.optim marks them
        return type(stepping[0]).__name__
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            owner = getattr(hook, "__self__", None)
            if inspect.isfunction(hook) and "self" in hook.__code__.co_freevars:  # made in a method
                owner = inspect.getclosurevars(hook).nonlocals["self"]
            if isinstance(owner, torch.optim.Optimizer):
                return type(owner).__name__
    return ""


@torch.no_grad()
def _digests(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of the bits of each parameter, or of this process's part."""
    with _disable_current_modes():  # a memory profile must not count this as part of the step
        return _digests_of(parameters)


def _digests_of(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        value = local_part(parameter.detach())
        if value.is_meta or value.layout != torch.strided or type(value) is not Tensor:
            continue
        value = torch.view_as_real(value) if value.is_complex() else value
        bits = value.reshape(-1).view(_BITS.get(value.itemsize, torch.int32))
        # Squares, so that opposite changes by one do not cancel. Overflow wraps around.
        wide = (piece.to(torch.int64) for piece in torch.split(bits, _PIECE))
        found[name] = sum(((piece * piece + piece).sum() for piece in wide), torch.zeros((), dtype=torch.int64))
    together: dict[torch.device, list[str]] = {}
    for name, digest in found.items():
        together.setdefault(digest.device, []).append(name)
    return {
        name: digest
        for names in together.values()
        for name, digest in zip(names, torch.stack([found[name] for name in names]).tolist(), strict=True)
    }
