"""The quantization scheme of a layer, and fake quantization of its weight and input by that scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.group import fake_quantize_fp8, fake_quantize_groups
from eff_kernels.quantization.low_bit import binarize, ternarize
from torch import Tensor, nn

from shared_core.modules.matching import StackedExperts
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.quantization.low_bit import (
    from_blocks,
    mxfp4_fake_quantize,
    nvfp4_fake_quantize,
    to_blocks,
)

Weight = Literal["channel", "group", "fp8", "fp8_block", "mxfp4", "nvfp4", "ternary", "binary"]
Input = Literal["none", "static", "token", "fp8", "fp8_static", "fp8_group", "mxfp4", "nvfp4"]
WITH_RANGE = ("static", "fp8_static")
"""Inputs whose range is observed and saved."""


@dataclasses.dataclass(frozen=True)
class LayerScheme:
    """The quantization of one layer, as plain values.

    Args:
        weight: Granularity of scales, or the number format. ``channel`` and ``fp8``: one scale per output channel;
            ``fp8_block``: per `group_size` inputs of 128 channels.
        weight_bits: Bits of an integer code.
        input: ``static``: one range per layer; ``token`` and ``fp8``: one per vector, computed at run time;
            ``fp8_group``: one per `group_size` features of a vector.
        activation_bits: Bits of an integer code.
        group_size: Weights that share a scale; 0 unless `weight` is ``group`` or ``fp8_block``.
        affine: True if groups have a zero point.
        affine_input: True if tokens have a zero point.
    """

    weight: Weight = "channel"
    weight_bits: int = 8
    input: Input = "static"
    activation_bits: int = 8
    group_size: int = 0
    affine: bool = False
    affine_input: bool = False

    @property
    def of_weight(self) -> tuple[str, int, int, bool]:
        """The fields that concern only the weight."""
        return self.weight, self.weight_bits, self.group_size, self.affine

    @property
    def has_range(self) -> bool:
        """True if the input has a range that is observed and saved."""
        return self.input in WITH_RANGE

    @property
    def spans_rows(self) -> bool:
        """True if weights of several rows share a scale."""
        return self.weight in ("fp8_block", "nvfp4")

    def group_of(self, width: int) -> int:
        """Return how many weights of a row share a scale: `group_size` if it divides the width, else all."""
        return width if width % self.group_size else self.group_size

    @property
    def weight_qmax(self) -> int:
        """Largest code of a symmetric weight; the smallest is its negative."""
        return (1 << (self.weight_bits - 1)) - 1

    @property
    def input_range(self) -> tuple[int, int]:
        """Smallest and largest code of an input."""
        return -(2 ** (self.activation_bits - 1)), 2 ** (self.activation_bits - 1) - 1


# Zero points as in torchao's kernels: in int4 groups, and in tokens for int8_dynamic_int4_weight.
SCHEMES: dict[str, LayerScheme] = {
    "int8": LayerScheme("channel", 8, "static", 8),
    "int8_weight": LayerScheme("channel", 8, "none", 0),
    "int8_dynamic": LayerScheme("channel", 8, "token", 8),
    "int4_weight": LayerScheme("group", 4, "none", 0, affine=True),
    "int8_dynamic_int4_weight": LayerScheme("group", 4, "token", 8, affine_input=True),
    "fp8": LayerScheme("fp8", 8, "fp8", 8),
    "fp8_static": LayerScheme("fp8", 8, "fp8_static", 8),
    "fp8_block": LayerScheme("fp8_block", 8, "fp8_group", 8, group_size=128),
    "mxfp4": LayerScheme("mxfp4", 4, "mxfp4", 4),
    "nvfp4": LayerScheme("nvfp4", 4, "nvfp4", 4),
    "ternary": LayerScheme("ternary", 2, "none", 0),
    "binary": LayerScheme("binary", 1, "none", 0),
}


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
    """Return a layer's input fake-quantized dynamically, with a straight-through gradient.

    Each token has its own scale. For convolutions, a token is one spatial position.
    """
    quantize = _QUANTIZE_INPUT.get(scheme.input)
    if quantize is None or not x.numel():
        return x
    if isinstance(module, nn.modules.conv._ConvNd):
        axis = -1 - len(module.kernel_size)
        # In a convolution's input the channel axis precedes the spatial axes.
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
    """Return `weight` fake-quantized, with a straight-through gradient."""
    noise = None if noise is None else as_rows(module, noise)
    quantize, rows = _QUANTIZE_WEIGHT[scheme.weight], as_rows(module, weight)
    if scheme.spans_rows and isinstance(module, StackedExperts):  # no scale spans two experts
        rows = torch.cat([quantize(one, scheme, None) for one in rows.chunk(len(weight))])
    else:
        rows = quantize(rows, scheme, noise)
    return from_rows(module, rows, weight)


def on_grid(module: nn.Module, weight: Tensor, scale: Tensor) -> Tensor:
    """Return `weight` rounded to multiples of its channels' scales."""
    rows = as_rows(module, weight)
    steps = scale.to(rows.device).unsqueeze(1)
    # A baked weight already lies on the grid of the saved scale, so that rounding it again changes no value.
    return from_rows(module, (rows.to(steps.dtype) / steps).round_().mul_(steps).to(rows.dtype), weight)
