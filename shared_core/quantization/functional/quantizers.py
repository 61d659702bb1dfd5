"""Inputs quantised by what they hold when they are seen: no range is kept.

A layer's weight as its codes can hold it, whatever the scheme; for training, for baking, and for the report.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.group import fake_quantize_fp8, fake_quantize_groups
from eff_kernels.quantization.low_bit import binarize, ternarize
from torch import Tensor, nn

from shared_core.modules.experts import StackedExperts
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.quantization.functional.low_bit import (
    from_blocks,
    mxfp4_fake_quantize,
    nvfp4_fake_quantize,
    to_blocks,
)
from shared_core.quantization.schemes import LayerScheme


def _token(x: Tensor, scheme: LayerScheme) -> Tensor:
    return fake_quantize_groups(x, x.shape[-1], scheme.activation_bits, not scheme.affine_input)


def _fp8(x: Tensor, scheme: LayerScheme) -> Tensor:
    width = x.shape[-1] if scheme.input == "fp8" else scheme.group_of(x.shape[-1])
    return fake_quantize_fp8(x.reshape(-1, width), torch.float8_e4m3fn, 0).view(x.shape)


# ``LayerScheme.input`` → a function of vectors along the last axis
_QUANTIZE_INPUT: dict[str, Callable[[Tensor, LayerScheme], Tensor]] = {
    "token": _token,
    "fp8": _fp8,
    "fp8_group": _fp8,
    "mxfp4": lambda x, scheme: mxfp4_fake_quantize(x),
    "nvfp4": lambda x, scheme: nvfp4_fake_quantize(x),
}


def quantize_input(module: nn.Module, x: Tensor, scheme: LayerScheme) -> Tensor:
    """Return a layer's input fake-quantised by its own values, with a straight-through gradient.

    A vector of features has a scale of its own: a token's, or for a convolution that of all channels at one place.

    Args:
        module: The layer, which says where its features lie.
        x: Its input.
        scheme: How; unchanged where `LayerScheme.input` is ``none``.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> quantize_input(layer, torch.tensor([[3.0, 1.4]]), LayerScheme(input="token", activation_bits=3))
        tensor([[3., 1.]])
    """
    quantize = _QUANTIZE_INPUT.get(scheme.input)
    if quantize is None or not x.numel():
        return x
    if isinstance(module, nn.modules.conv._ConvNd):
        axis = -1 - len(module.kernel_size)
        # A convolution's vectors are its channels, which lie before the spatial dims.
        return quantize(x.movedim(axis, -1), scheme).movedim(-1, axis)
    return quantize(x, scheme)


def _channel(rows: Tensor, scheme: LayerScheme, noise: Tensor | None) -> Tensor:
    if noise is not None:
        return fake_quantize_groups(rows, rows.shape[1], scheme.weight_bits, True, noise)
    return kernels.fake_quantize_symmetric(rows, 0, scheme.weight_qmax)


def _group(rows: Tensor, scheme: LayerScheme, noise: Tensor | None) -> Tensor:
    return fake_quantize_groups(rows, scheme.group_of(rows.shape[1]), scheme.weight_bits, not scheme.affine, noise)


def _fp8_block(rows: Tensor, scheme: LayerScheme, noise: Tensor | None) -> Tensor:
    width = scheme.group_of(rows.shape[1])
    return from_blocks(fake_quantize_fp8(to_blocks(rows, width), torch.float8_e4m3fn, 0), rows.shape, width)


# kind → a function of a weight with one row for each output channel
_QUANTIZE_WEIGHT: dict[str, Callable[[Tensor, LayerScheme, Tensor | None], Tensor]] = {
    "channel": _channel,
    "group": _group,
    "fp8": lambda rows, scheme, noise: fake_quantize_fp8(rows, torch.float8_e4m3fn, 0),
    "fp8_block": _fp8_block,
    "mxfp4": lambda rows, scheme, noise: mxfp4_fake_quantize(rows),
    "nvfp4": lambda rows, scheme, noise: nvfp4_fake_quantize(rows),
    "ternary": lambda rows, scheme, noise: ternarize(rows, 0),
    "binary": lambda rows, scheme, noise: binarize(rows, 0, True),
}


def quantize_weight(module: nn.Module, weight: Tensor, scheme: LayerScheme, noise: Tensor | None = None) -> Tensor:
    """Return `weight` as its codes can hold it, with a straight-through gradient.

    Args:
        module: The layer, which says how its channels lie.
        weight: One of its weights.
        scheme: How.
        noise: Uniform in [0, 1), of the weight's shape: rounds stochastically; None: to nearest.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> quantize_weight(layer, torch.tensor([[3.0, 1.4]]), LayerScheme(weight_bits=3))
        tensor([[3., 1.]])
    """
    noise = None if noise is None else as_rows(module, noise)
    quantize, rows = _QUANTIZE_WEIGHT[scheme.weight], as_rows(module, weight)
    if scheme.spans_rows and isinstance(module, StackedExperts):  # no scale for two experts
        rows = torch.cat([quantize(one, scheme, None) for one in rows.chunk(len(weight))])
    else:
        rows = quantize(rows, scheme, noise)
    return from_rows(module, rows, weight)


def on_grid(module: nn.Module, weight: Tensor, scale: Tensor) -> Tensor:
    """Return `weight` rounded to multiples of its channels' scales.

    Example:
        >>> on_grid(nn.Linear(2, 1), torch.tensor([[0.9, 2.2]]), torch.tensor([0.5]))
        tensor([[1., 2.]])
    """
    rows = as_rows(module, weight)
    steps = scale.to(rows.device).unsqueeze(1)
    # As many steps as the saved scale says: a baked weight lies on the grid already, and rounding it again moves no
    # value.
    return from_rows(module, (rows.to(steps.dtype) / steps).round_().mul_(steps).to(rows.dtype), weight)
