"""Quantised weights in place, and what the quantisation costs them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.claims import Grid, Where
from shared_core.quantization.layers import as_rows, weights_of
from shared_core.quantization.schemes import LayerScheme
from shared_core.sharded import fill_, is_sharded, whole


@torch.no_grad()
def bake_(module: nn.Module, baked: set[int]) -> None:
    """Overwrite a fake-quantising layer's weights with the values that their codes stand for.

    A weight that FSDP2 shards is gathered for it, one at a time; then every process must call it.

    Args:
        module: The layer.
        baked: Identities of weights that another layer shares and has baked; those of this one are added.
    """
    for weight in weights_of(module).values():
        if id(weight) not in baked:
            baked.add(id(weight))
            fill_(weight, module.quantizer.baked_weight(module, whole(weight)))  # type: ignore[operator, union-attr]


@torch.no_grad()
def weight_report(module: nn.Module, *, gather: bool = False) -> dict[str, float | int]:
    """Return a fake-quantising layer's size, its weights' SQNR in dB, and the largest error over the largest weight.

    Of weights that FSDP2 shards the size alone, unless they are to be gathered; then every process must call it.
    """
    weights = list(weights_of(module).values())
    numel = sum(weight.numel() for weight in weights)
    if not gather and any(map(is_sharded, weights)):
        return {"weights": numel}
    signal, noise, peak, largest = 0.0, 0.0, 0.0, 0.0
    for exact in filter(Tensor.numel, map(whole, weights)):
        error = exact.double() - module.quantizer.baked_weight(module, exact).double()  # type: ignore[operator, union-attr]
        signal, noise = signal + exact.double().square().sum().item(), noise + error.square().sum().item()
        peak, largest = max(peak, exact.abs().max().item()), max(largest, error.abs().max().item())
    return {
        "weights": numel,
        "sqnr_db": 10 * math.log10(signal / noise) if noise and signal else math.inf,
        "largest_relative_error": largest / peak if peak else 0.0,
    }


def grid_of(module: nn.Module, scheme: LayerScheme, entry: Mapping[str, Any]) -> Grid:
    """Return what a baked weight must look like.

    Args:
        module: The layer, which says how its channels lie.
        scheme: How its weights are quantised.
        entry: What its deployment needs, learned scales among it.
    """
    kind = scheme.weight
    group = {"group": scheme.group_size, "mxfp4": 32, "nvfp4": 16}.get(kind, 0)
    levels = {"fp8": 255, "mxfp4": 15, "nvfp4": 15, "ternary": 3}.get(kind, 2**scheme.weight_bits)
    largest = {"channel": scheme.weight_qmax, "fp8": 448}.get(kind)
    # of a folded layer the weight is unfolded again: its rows are multiples of other steps than the folded weight's
    is_folded = "batch_norm" in entry
    scale = None if is_folded else entry.get("weight_scale")
    return Grid(
        functools.partial(as_rows, module),
        levels,
        group,
        largest,
        None if scale is None else tuple(scale),
        torch.float8_e4m3fn if kind == "fp8" else None,
        any_step=is_folded,
        holds=Where.SAVED,
    )
