"""Quantised weights in place, and what the quantisation costs them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.quantization.layers import weights_of
from shared_core.ranks import local_part


def local_weight(weight: Any) -> Tensor:
    """Return the part of a layer's weight that this process holds; whole output channels.

    Raises:
        CompatibilityError: If the weight is sharded along another axis than its channels.
    """
    placements = getattr(weight, "placements", ())
    if any(placement.is_shard() and not placement.is_shard(0) for placement in placements):
        raise CompatibilityError(
            f"qat: weights must be sharded along axis 0, got {placements}; a channel's scale needs all of it"
        )
    return local_part(weight)


@torch.no_grad()
def bake_(module: nn.Module, baked: set[int]) -> None:
    """Overwrite a fake-quantising layer's weights with the values that their codes stand for.

    Args:
        module: The layer.
        baked: Identities of weights that another layer shares and has baked; those of this one are added.
    """
    for weight in weights_of(module).values():
        if id(weight) not in baked:
            baked.add(id(weight))
            local = local_weight(weight)
            local.copy_(module.quantizer.baked_weight(module, local))  # type: ignore[operator, union-attr]


@torch.no_grad()
def weight_report(module: nn.Module) -> dict[str, float | int]:
    """Return a fake-quantising layer's size, its weights' SQNR in dB, and the largest error over the largest weight."""
    numel, signal, noise, peak, largest = 0, 0.0, 0.0, 0.0, 0.0
    for weight in weights_of(module).values():
        local = local_weight(weight).detach()
        if not local.numel():
            continue
        exact = local.double()
        error = exact - module.quantizer.baked_weight(module, local).double()  # type: ignore[operator, union-attr]
        numel += local.numel()
        signal, noise = signal + exact.square().sum().item(), noise + error.square().sum().item()
        peak, largest = max(peak, exact.abs().max().item()), max(largest, error.abs().max().item())
    return {
        "weights": numel,
        "sqnr_db": 10 * math.log10(signal / noise) if noise and signal else math.inf,
        "largest_relative_error": largest / peak if peak else 0.0,
    }
