"""A step of an optimizer on a few parameters at a time, where it updates each by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_TOGETHER = 1 << 18
"""Elements of small parameters that step together."""
_EACH_BY_ITSELF = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor",
    "Muon",
)  # fmt: skip


def updates_each_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter from its own gradient and state alone.

    Example:
        >>> updates_each_by_itself(torch.optim.AdamW([torch.zeros(2)]))
        True
        >>> updates_each_by_itself(torch.optim.LBFGS([torch.zeros(2)]))
        False
    """
    kind = type(optimizer)
    # By name and not by import: transformers need not be installed.
    if (kind.__module__, kind.__name__) == ("transformers.optimization", "Adafactor"):
        return True
    # `is`: a subclass of the same name may couple parameters (a global norm, say).
    return kind.__name__ in _EACH_BY_ITSELF and getattr(torch.optim, kind.__name__, None) is kind


def slices(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters one by one, small ones of the same neighbourhood together.

    Example:
        >>> [len(part) for part in slices([torch.zeros(9), torch.zeros(1 << 18), torch.zeros(2), torch.zeros(3)])]
        [1, 1, 2]
    """
    part: list[Tensor] = []
    for parameter in parameters:
        if part and sum(value.numel() for value in (*part, parameter)) > _TOGETHER:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part


class SlicedStep:
    """Takes the place of an optimizer's step for some of its parameters; `torch.optim` steps the others.

    It is within the step, after the closure, so that whoever calls the step, and in which way, needs to know nothing.

    Args:
        optimizer: One that updates each parameter by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.ready: tuple[Sequence[Tensor], Callable[[], None]] | None = None
        """The parameters of the next step, and what steps them by `step_`; None once it has."""
        self._groups: list[dict[str, Any]] | None = None
        after = optimizer.register_step_post_hook(self._restore)
        self._handles = (optimizer.register_step_pre_hook(self._within), after)
        # those of others are to see the whole optimizer again
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leave the optimizer's step to itself."""
        self._restore()
        self.ready = None
        for handle in self._handles:
            handle.remove()

    def _within(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        # A step that raised has left its groups replaced.
        self._restore()
        # args[0] is the optimizer: torch's hooks get the step's own arguments.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        # The step is made from the closure: torch calls it first thing in `step`, after gradients are there. What is
        # then left of `param_groups` is stepped by torch as ever.
        def run() -> Any:
            loss = None if closure is None else closure()
            if self.ready is not None:
                # Once: a scheduler or a scaler may call step again.
                (parameters, update), self.ready = self.ready, None
                with torch.no_grad():
                    update()
                self._groups = optimizer.param_groups
                optimizer.param_groups = self._groups_of({id(parameter): None for parameter in parameters}, others=True)
            return loss

        return (args[0], run), {}

    def _restore(self, *_: Any) -> None:
        if self._groups is not None:
            self.optimizer.param_groups, self._groups = self._groups, None

    def step_(self, replacement: Mapping[Tensor, Tensor]) -> None:
        """Step on these tensors in the places of parameters, with their options and state."""
        optimizer = self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        # State by the float32 stand-ins, for those that have some; missing entries are made by the optimizer as in
        # its first step.
        optimizer.state = defaultdict(dict, {new: state[old] for old, new in replacement.items() if old in state})
        optimizer.param_groups = self._groups_of({id(old): new for old, new in replacement.items()})
        try:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # past the hooks of whole steps
            for old, new in replacement.items():
                # The first step has made state for the stand-in: it belongs to the parameter.
                if new in optimizer.state:
                    state[old] = optimizer.state[new]
        finally:
            optimizer.param_groups, optimizer.state = groups, state

    def _groups_of(self, new: Mapping[int, Tensor | None], others: bool = False) -> list[dict[str, Any]]:
        found = []
        for group in self.optimizer.param_groups:
            kept = [p if others else new[id(p)] for p in group["params"] if (id(p) in new) is not others]
            # A group without parameters is one that some optimizers stumble over.
            if kept:
                found.append({**group, "params": kept})
        return found
