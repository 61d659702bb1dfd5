"""Penalties that drive weights towards zero before they are pruned, as gradients: exact under accumulation and DDP."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def add_l1_gradient_(gradient: Tensor, weight: Tensor, strength: float) -> None:
    """Add the gradient of ``strength·Σ|w|`` in place: ``strength·sign(w)``, 0 at 0.

    Example:
        >>> gradient = torch.zeros(3)
        >>> add_l1_gradient_(gradient, torch.tensor([2.0, 0.0, -1.0]), 0.5)
        >>> gradient
        tensor([ 0.5000,  0.0000, -0.5000])
    """
    gradient.add_(weight.detach().sign().to(gradient.dtype), alpha=strength)


@torch.no_grad()
def add_group_lasso_gradient_(gradient: Tensor, weight: Tensor, strength: float, *, axis: int) -> None:
    """Add the gradient of ``strength·Σ_g √p_g·‖w_g‖₂`` in place; a group is what one output of the layer owns.

    ``strength·√p_g·w_g/‖w_g‖₂`` with p_g the weights of a group, 0 for a group that is zero (Yuan and Lin 2006;
    Wen et al. 2016, arXiv:1608.03665).

    Args:
        gradient: Of the weight's shape; changed in place.
        weight: Two or more dimensions.
        strength: Factor of the penalty, at least 0.
        axis: The output axis.

    Example:
        >>> gradient = torch.zeros(2, 2)
        >>> add_group_lasso_gradient_(gradient, torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 1.0, axis=0)
        >>> gradient
        tensor([[0.8485, 1.1314],
                [0.0000, 0.0000]])
    """
    weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    others = [dim for dim in range(weight.ndim) if dim != axis]
    norms = weight.double().square().sum(others, keepdim=True).sqrt()
    # a group of zeros is divided by 1; strength / norm itself would overflow where weights are subnormal
    directions = weight / norms.masked_fill(norms == 0, 1.0).to(weight.dtype)
    per_group = weight.numel() / weight.shape[axis]
    gradient.add_(directions.to(gradient.dtype), alpha=strength * per_group**0.5)
