"""Fake quantization of a layer's weight and input by its scheme."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.group import fake_quantize_fp8, fake_quantize_groups
from eff_kernels.quantization.low_bit import binarize, ternarize
from torch import Tensor, nn

from shared_core.checkpoint_formats.released import Grid
from shared_core.modules.matching import StackedExperts
from shared_core.modules.weight_views import TRANSPOSED, as_rows, from_rows
from shared_core.numerics.block_formats import BEYOND
from shared_core.quantization.low_bit import (
    box_means,
    fake_quantize_by_scale,
    from_blocks,
    half_fake_quantize,
    mean_magnitude,
    mx_fake_quantize,
    nvfp4_fake_quantize,
    to_blocks,
)
from shared_core.quantization.schemes import FP8_GROUP, LayerScheme


def _token(x: Tensor, scheme: LayerScheme) -> Tensor:
    return fake_quantize_groups(x, x.shape[-1], scheme.activation_bits, not scheme.affine_input)


def _fp8(x: Tensor, scheme: LayerScheme) -> Tensor:
    width = x.shape[-1] if scheme.input == "fp8" or x.shape[-1] % FP8_GROUP else FP8_GROUP
    return fake_quantize_fp8(x.reshape(-1, width), torch.float8_e4m3fn, 0).view(x.shape)


def _binary_scaled(x: Tensor, scheme: LayerScheme) -> Tensor:
    return binarize(x, None, False) * mean_magnitude(x, -1)


# ``LayerScheme.input`` → a function of vectors along the last axis
_QUANTIZE_INPUT: dict[str, Callable[[Tensor, LayerScheme], Tensor]] = {
    "token": _token,
    "fp8": _fp8,
    "fp8_group": _fp8,
    "mxfp4": lambda x, scheme: mx_fake_quantize(x, "fp4_e2m1"),
    "mxfp8": lambda x, scheme: mx_fake_quantize(x, "fp8_e4m3"),
    "nvfp4": lambda x, scheme: nvfp4_fake_quantize(x),
    "binary": lambda x, scheme: binarize(x, None, False),
    "binary_scaled": _binary_scaled,
}


def quantize_input(module: nn.Module, x: Tensor, scheme: LayerScheme) -> Tensor:
    """Return a layer's input fake-quantized dynamically, with a straight-through gradient.

    Each token has its own scale. For convolutions, a token is one spatial position.
    """
    quantize = _QUANTIZE_INPUT.get(scheme.input)
    if quantize is None or not x.numel():
        return x
    if isinstance(module, nn.modules.conv._ConvNd):
        if scheme.has_binary_inputs and has_output_scale(module):
            return binarize(x, None, False)  # scales belong to the output
        axis = -1 - len(module.kernel_size)
        # In a convolution's input the channel axis precedes the spatial axes.
        return quantize(x.movedim(axis, -1), scheme).movedim(-1, axis)
    return quantize(x, scheme)


def has_output_scale(module: nn.Module) -> bool:
    """Return True for convolutions: XNOR-Net's scales differ from one input of a sum to the next."""
    return isinstance(module, nn.modules.conv._ConvNd) and not isinstance(module, TRANSPOSED)


def output_scale(module: nn.Module, x: Tensor, scheme: LayerScheme) -> Tensor | None:
    """Return XNOR-Net's K, by which the output of a convolution of signs is multiplied; None for other layers."""
    return box_means(module, x) if scheme.input == "binary_scaled" and has_output_scale(module) else None


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
    "fp16": lambda rows, scheme, noise: half_fake_quantize(rows, "fp16"),
    "bf16": lambda rows, scheme, noise: half_fake_quantize(rows, "bf16"),
    "fp8": lambda rows, scheme, noise: fake_quantize_fp8(rows, torch.float8_e4m3fn, 0),
    "fp8_tensor": lambda rows, scheme, noise: fake_quantize_fp8(rows, torch.float8_e4m3fn),
    "fp8_block": _fp8_block,
    "mxfp4": lambda rows, scheme, noise: mx_fake_quantize(rows, "fp4_e2m1"),
    "mxfp6": lambda rows, scheme, noise: mx_fake_quantize(rows, "fp6_e2m3"),
    "mxfp8": lambda rows, scheme, noise: mx_fake_quantize(rows, "fp8_e4m3"),
    "nvfp4": lambda rows, scheme, noise: nvfp4_fake_quantize(rows),
    "ternary": lambda rows, scheme, noise: ternarize(rows, 0),
    "binary": lambda rows, scheme, noise: binarize(rows, 0, True),
}


def quantize_weight(module: nn.Module, weight: Tensor, scheme: LayerScheme, noise: Tensor | None = None) -> Tensor:
    """Return `weight` fake-quantized, with a straight-through gradient."""
    noise = None if noise is None else as_rows(module, noise)
    quantize, rows = _QUANTIZE_WEIGHT[scheme.weight], as_rows(module, weight)
    if scheme.spans_rows and isinstance(module, StackedExperts):  # no scale spans two experts
        rows = torch.cat([quantize(one, scheme, None) for one in rows.chunk(len(weight))])
    else:
        rows = quantize(rows, scheme, noise)
    return from_rows(module, rows, weight)


def on_grid(rows: Tensor, grid: Grid, scheme: LayerScheme, noise: Tensor | None = None) -> Tensor:
    """Return a matrix rounded to a given grid: ``x̂ = s·(clamp(round(x/s) + z) − z)``.

    The gradient is 1, and 0 where a value was clipped: where its nearest code, were there more of them, lies outside.

    Args:
        rows: One row for each output channel.
        grid: Its scales, and zero points of integers.
        scheme: Gives the codes: e2m1, e4m3, or integers, with one more on the negative side.
        noise: For stochastic rounding of integers, of the shape of `rows`.
    """
    values, steps, zeros = _in_groups(rows, grid)
    if scheme.element is not None:
        found = fake_quantize_by_scale(values, steps, scheme.element)
    else:
        noise = None if noise is None else _in_groups(noise, grid)[0]
        # The gate of unrounded values would close for the largest code, whose quotient may be an ulp outside.
        found = kernels.fake_quantize(values, steps, zeros, *scheme.weight_range, True, noise)
    return found.view(len(rows), -1)[:, : rows.shape[1]]


def beyond_codes(rows: Tensor, grid: Grid, scheme: LayerScheme) -> Tensor:
    """Return where `on_grid` clips, one row for each group."""
    values, steps, zeros = _in_groups(rows, grid)
    codes = values.to(steps.dtype) / steps
    if scheme.element is not None:
        return codes.abs() >= BEYOND[scheme.element]
    codes, (qmin, qmax) = codes.round_() + zeros, scheme.weight_range
    return (codes < qmin) | (codes > qmax)


def _in_groups(rows: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, scale and zero point with a row for each group. A shorter last group is padded with zeros."""
    steps = grid.scale.to(kernels.compute_dtype(rows.dtype)).view(-1, 1)
    zeros = torch.zeros_like(steps) if grid.zero_point is None else grid.zero_point.view(-1, 1)
    return F.pad(rows, (0, -rows.shape[1] % grid.group_size)).reshape(-1, grid.group_size), steps, zeros
