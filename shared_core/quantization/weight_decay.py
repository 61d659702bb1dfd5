"""Keeps weight decay away from learned scales, whatever group of the optimizer they are in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# they subtract lr·decay·p from the parameter; all others add decay·p to its gradient
_DECOUPLED = ("AdamW", "Lion", "Adafactor", "Muon")


def _is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    flag = group.get("decoupled_weight_decay")
    return bool(flag) if flag is not None else any(name in type(optimizer).__name__ for name in _DECOUPLED)


class NoDecay:
    """Takes back, step by step, what weight decay does to some parameters.

    A group of their own would need no such thing, but learning-rate schedulers and saved optimizer states count the
    groups that the user's code made.

    Args:
        parameters: Those that take no decay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._before: list[tuple[nn.Parameter, Tensor, float]] = []

    @torch.no_grad()
    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Subtract a coupled decay from the gradient; remember the values that a decoupled one will shrink."""
        self._before = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                decay = float(group.get("weight_decay") or 0.0)
                if not decay:
                    continue
                for parameter in group["params"]:
                    if id(parameter) not in self._ids or parameter.grad is None:
                        continue
                    if _is_decoupled(optimizer, group):
                        self._before.append((parameter, parameter.detach().clone(), float(group["lr"]) * decay))
                    else:
                        parameter.grad.add_(parameter, alpha=-decay)

    @torch.no_grad()
    def after_step(self) -> None:
        """Give back what a decoupled decay took."""
        for parameter, before, share in self._before:
            parameter.add_(before, alpha=share)
        self._before = []
