"""The regulariser of pruning: a penalty on what may be pruned, added to complete gradients until the last update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shared_core.errors import MatchError
from shared_core.module_match import plain_name
from shared_core.pruning.axes import output_axis, weight_of
from shared_core.pruning.regularizers import add_group_lasso_gradient_, add_l1_gradient_

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Penalty:
    """Adds the gradient of a penalty once per optimizer step, whatever the accumulation and number of processes.

    Args:
        kind: ``l1``, ``group_lasso``, ``bn_l1`` or ``weight_decay``.
        strength: Its factor.
        model: Where ``bn_l1`` finds batch norms.
        modules: Weight name to the module that holds it: what may be pruned.

    Raises:
        MatchError: If ``bn_l1`` finds no scale.
    """

    def __init__(self, kind: str, strength: float, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self.kind, self.strength = kind, strength
        self._modules = dict(modules)
        if kind == "bn_l1":
            self._modules = {
                f"{plain_name(name)}.weight".removeprefix("."): module
                for name, module in model.named_modules()
                if isinstance(module, _BATCH_NORMS) and module.weight is not None and module.weight.requires_grad
            }
            if not self._modules:
                raise MatchError("prune: regularizer bn_l1 must find a batch norm with a scale; take l1 or group_lasso")
        self._rates: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """Names of the penalised tensors."""
        return list(self._modules)

    def add_(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """Add to the gradients there are; weight decay waits for `decay_`, after the step."""
        if self.kind == "weight_decay":
            rates = {
                parameter: float(group["lr"])
                for optimizer in optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
            self._rates = {name: rates.get(weight_of(name, module), 0.0) for name, module in self._modules.items()}
            return
        for name, module in self._modules.items():
            weight = weight_of(name, module)
            if weight.grad is None:
                continue
            if self.kind == "group_lasso":
                add_group_lasso_gradient_(weight.grad, weight, self.strength, axis=output_axis(module))
            else:
                add_l1_gradient_(weight.grad, weight, self.strength)

    @torch.no_grad()
    def decay_(self) -> None:
        """Shrink the weights by ``1 - lr·strength``, decoupled from the gradient: the step was applied."""
        for name, rate in self._rates.items():
            weight_of(name, self._modules[name]).detach().mul_(1 - rate * self.strength)
        self._rates = {}

    def forget_step(self) -> None:
        """The step was skipped: no weight decays."""
        self._rates = {}
