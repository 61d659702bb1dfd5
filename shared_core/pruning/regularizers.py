"""Penalties that drive weights toward zero before pruning.

They are added to complete gradients until the last update, so they are exact under accumulation and DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import part_of, whole
from shared_core.errors import MatchError
from shared_core.modules.matching import StackedExperts, matrices, plain_name, weight_of
from shared_core.modules.weight_views import output_axis
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.patterns import block_scores, expand_blocks
from shared_core.pruning.scorers import UnitSlices, gather_units
from shared_core.pruning.targets import block_of


@torch.no_grad()
def add_l1_gradient_(gradient: Tensor, weight: Tensor, strength: float) -> None:
    """Add the gradient of ``strength·Σ|w|`` in place: ``strength·sign(w)``, 0 at 0."""
    gradient.add_(weight.detach().sign().to(gradient.dtype), alpha=strength)


@torch.no_grad()
def add_group_lasso_gradient_(
    gradient: Tensor, weight: Tensor, strength: float, *, axis: int | tuple[int, ...]
) -> None:
    """Add the gradient of ``strength·Σ_g √p_g·‖w_g‖₂`` in place. A group is the weights of one output.

    ``strength·√p_g·w_g/‖w_g‖₂`` with p_g weights per group, and 0 for a group of zeros (Yuan and Lin 2006;
    Wen et al. 2016, arXiv:1608.03665).

    Args:
        gradient: Shape of the weight, changed in place.
        weight: Two or more dimensions.
        strength: Factor of the penalty, at least 0.
        axis: The output axis. For stacked experts, the expert axis and the output axis.
    """
    # At least float32: squares of half-precision weights below 2e-4 vanish.
    weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    kept = (axis,) if isinstance(axis, int) else axis
    others = [dim for dim in range(weight.ndim) if dim not in kept]
    # Squares in float64: in float32 those of weights below 1e-19 would be 0, and the direction undefined.
    norms = weight.double().square().sum(others, keepdim=True).sqrt()
    # Groups of zeros are divided by 1. w / ‖w‖ is at most 1, but strength / norm would overflow for subnormal weights.
    directions = weight / norms.masked_fill(norms == 0, 1.0).to(weight.dtype)
    per_group = weight.numel() / norms.numel()
    gradient.add_(directions.to(gradient.dtype), alpha=strength * per_group**0.5)


@torch.no_grad()
def add_block_lasso_gradient_(gradient: Tensor, weight: Tensor, strength: float, block: tuple[int, int]) -> None:
    """Add the gradient of `add_group_lasso_gradient_` in place, with each tile as a group."""
    values = whole(weight.detach()).double()
    # √p·w/‖w‖ equals w divided by the root mean square.
    rms = expand_blocks(block_scores(values.square(), block).sqrt(), values.shape, block)
    directions = (values / rms.masked_fill(rms == 0, 1.0)).to(gradient.dtype)
    local_part(gradient).add_(part_of(directions, weight), alpha=strength)


@torch.no_grad()
def add_unit_lasso_gradient_(
    gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor], strength: float, unit: Sequence[UnitSlices]
) -> None:
    """Add the gradient of `add_group_lasso_gradient_` in place, with each unit, across its tensors, as a group."""
    found = [gather_units(weights[part.name], part.axis, part.positions).double() for part in unit]
    rms = (sum(part.square().sum(1) for part in found) / sum(part.shape[1] for part in found)).sqrt()  # type: ignore[union-attr]
    scales = strength / rms.masked_fill(rms == 0, 1.0)
    for part in unit:
        gradient, weight = gradients[part.name], weights[part.name].detach()
        rows = torch.from_numpy(part.positions.reshape(-1)).to(weight.device)
        factors = scales.repeat_interleave(part.positions.shape[1])
        factors = factors.view([-1 if dim == part.axis else 1 for dim in range(weight.ndim)])
        added = weight.index_select(part.axis, rows).double() * factors
        gradient.index_add_(part.axis, rows, added.to(gradient.dtype))


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Penalty:
    """Adds the gradient of a penalty once per optimizer step, for any accumulation and number of processes."""

    def __init__(
        self,
        kind: str,
        strength: float,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        config: PruneConfig,
        units: Callable[[], Iterable[Sequence[UnitSlices]]] = tuple,
    ) -> None:
        self.kind, self.strength, self._config, self._units = kind, strength, config, units
        self._modules = dict(modules)
        if kind == "bn_l1":
            self._modules = {
                f"{plain_name(name)}.weight".removeprefix("."): module
                for name, module in model.named_modules()
                if isinstance(module, _BATCH_NORMS) and module.weight is not None and module.weight.requires_grad
            }
            if not self._modules:
                rule = "regularizer bn_l1 needs a batch norm with a scale, but there is none"
                raise MatchError("prune", rule, "use l1 or group_lasso")
        self._rates: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """Names of the penalized tensors."""
        return list(self._modules)

    def add_(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """Add to the existing gradients. Weight decay is applied in `decay_`, after the step."""
        # The learning rate may change every step: read it together with the gradients, and use it after the step.
        if self.kind == "weight_decay":
            rates = {
                parameter: float(group["lr"])
                for optimizer in optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
            self._rates = {name: rates.get(weight_of(name, module), 0.0) for name, module in self._modules.items()}
            return
        if self.kind == "group_lasso" and self._config.is_traced:
            self._add_to_units()
            return
        for name, module in self._modules.items():
            weight = weight_of(name, module)
            if weight.grad is None:
                continue
            if self.kind != "group_lasso":
                add_l1_gradient_(weight.grad, weight, self.strength)
            elif self._config.granularity == "block":
                block = block_of(self._config, module)
                for gradient, matrix in zip(matrices(module, weight.grad), matrices(module, weight), strict=True):
                    add_block_lasso_gradient_(gradient, matrix, self.strength, block)
            else:
                axes = (0,) * isinstance(module, StackedExperts) + (output_axis(module),)
                is_layer = self._config.granularity == "layer"
                add_group_lasso_gradient_(weight.grad, weight, self.strength, axis=() if is_layer else axes)

    def _add_to_units(self) -> None:
        weights = {name: weight_of(name, module) for name, module in self._modules.items()}
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        for parts in self._units():
            if unit := [part for part in parts if part.name in gradients]:
                add_unit_lasso_gradient_(gradients, weights, self.strength, unit)

    @torch.no_grad()
    def decay_(self) -> None:
        """Shrink the weights by ``1 - lr·strength``, decoupled from the gradient, after an applied step."""
        for name, rate in self._rates.items():
            weight_of(name, self._modules[name]).detach().mul_(1 - rate * self.strength)
        self._rates = {}

    def forget_step(self) -> None:
        """Call after a skipped step: no weight decays."""
        self._rates = {}
