"""Optimizers whose step cannot use float32 values in place of 16-bit parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shared_core.engine.checks.model_guards import with_wrapped
from shared_core.errors import CompatibilityError

_REMEDY = "use an optimizer of torch.optim, or load the model in float32 and leave primary_weights out"


def refuse_wrappers(optimizers: Iterable[Any]) -> None:
    """Raise an error if an optimizer wraps another: both keep state by parameter, and only one would be exchanged."""
    for optimizer in optimizers:
        names = [type(one).__name__ for one in with_wrapped(optimizer)]
        if len(names) > 1:
            rule = f"{names[0]} wraps {names[1]}, and its state cannot follow float32 copies of the parameters"
            raise CompatibilityError("primary_weights", rule, _REMEDY)


def refuse_second_derivatives(optimizers: Iterable[Any], parameters: Iterable[Tensor]) -> None:
    """Raise an error if gradients have a graph, which leads to the 16-bit parameters."""
    if any(parameter.grad is not None and parameter.grad.requires_grad for parameter in parameters):
        names = " and ".join(type(one).__name__ for one in optimizers)
        rule = f"{names} would differentiate the gradients (create_graph=True) by the float32 copies"
        raise CompatibilityError("primary_weights", rule, _REMEDY)


class ClosureOrder:
    """Checks that an optimizer computes gradients in its closure before it writes its parameters.

    Float32 values are exchanged once the gradients are complete. What such an optimizer wrote or kept by then is of the
    16-bit parameters, as the perturbation of SAM.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._in_step: dict[torch.optim.Optimizer, list[int]] = {}
        self._handles: list[Any] = []
        for one in optimizers:
            if hasattr(one, "register_step_pre_hook"):
                self._handles += [one.register_step_pre_hook(self._begin), one.register_step_post_hook(self._end)]

    def check(self) -> None:
        """Raise an error if an optimizer in its step has already written its parameters."""
        for optimizer, versions in self._in_step.items():
            if versions != _versions(optimizer):
                name = type(optimizer).__name__
                rule = f"{name} writes the weights before its closure computes the gradients, in 16 bits"
                raise CompatibilityError("primary_weights", rule, _REMEDY)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._in_step.clear()

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_step[optimizer] = _versions(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_step.pop(optimizer, None)


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    return [parameter._version for group in optimizer.param_groups for parameter in group["params"]]
