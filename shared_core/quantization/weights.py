"""Quantised weights in place, and what the quantisation costs them."""

from __future__ import annotations

import math
from typing import Any

import torch
from eff_kernels import quantization as kernels
from torch import Tensor, nn

from shared_core.errors import CompatibilityError


def local_weight(module: nn.Module) -> Tensor:
    """Return the part of a layer's weight that this process holds; whole output channels.

    Raises:
        CompatibilityError: If the weight is sharded along another axis than its channels.
    """
    weight: Any = module.weight
    if not hasattr(weight, "to_local"):
        return weight  # type: ignore[no-any-return]
    if any(placement.is_shard() and not placement.is_shard(0) for placement in weight.placements):
        raise CompatibilityError(
            f"qat: weights must be sharded along axis 0, got {weight.placements}; a channel's scale needs all of it"
        )
    return weight.to_local()  # type: ignore[no-any-return]


@torch.no_grad()
def bake_(module: nn.Module, qmax: int) -> None:
    """Overwrite a layer's weight with the values that its codes stand for."""
    weight = local_weight(module)
    weight.copy_(kernels.fake_quantize_symmetric(weight, 0, qmax))


@torch.no_grad()
def weight_report(module: nn.Module, qmax: int) -> dict[str, float | int]:
    """Return size, signal-to-quantisation-noise ratio in dB and largest error over the largest weight."""
    weight = local_weight(module).detach()
    if weight.numel() == 0:
        return {"weights": 0, "sqnr_db": math.inf, "largest_relative_error": 0.0}
    exact = weight.double()
    error = exact - kernels.fake_quantize_symmetric(weight, 0, qmax).double()
    signal, noise = exact.square().sum().item(), error.square().sum().item()
    peak = exact.abs().max().item()
    return {
        "weights": weight.numel(),
        "sqnr_db": 10 * math.log10(signal / noise) if noise and signal else math.inf,
        "largest_relative_error": error.abs().max().item() / peak if peak else 0.0,
    }
