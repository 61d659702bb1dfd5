"""Ranges of their own for groups, tokens, output channels and rows: fake quantisation, and the codes it stands for."""

from __future__ import annotations

from typing import Literal

import torch
from eff_kernels import quantization as kernels
from eff_kernels import quantization_group as grouped
from torch import Tensor

from shared_core.errors import ConfigError
from shared_core.quantization.fake_quant import check_bits, check_floats, rounding_noise

Rounding = Literal["nearest", "stochastic"]


def fake_quantize_groups(
    x: Tensor,
    group_size: int,
    bits: int = 4,
    *,
    symmetric: bool = False,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `x` rounded to integer codes under one range for each group along the last axis.

    Symmetric: codes ±(2^(b−1) − 1), ``s = max|x|/(2^(b−1) − 1)``. Affine: codes −2^(b−1) … 2^(b−1) − 1 over the
    group's range widened to contain 0, ``s = (max − min)/(2^b − 1)``, ``z = clamp(ne(qmin − min/s))``. A group of
    zeros has scale 1. No value lies outside its group's range, but for half a step where z was rounded, so the
    gradient passes everywhere. A group that holds a value that is not finite becomes NaN.

    A group size that does not divide the last axis is refused: a ragged last group has no place in the layouts that
    integer kernels read.

    Args:
        x: (..., K), a weight with its inputs along the last axis, of any floating type.
        group_size: Values to a group; divides K.
        bits: Width of a code, 2 to 8.
        symmetric: Zero point 0.
        rounding: To the nearest code or, without bias, to one of the two around the value (the last half step of an
            affine range excepted, where the zero point was rounded).
        generator: Source of the randomness, on the device of `x`; torch's global one if None.

    Returns:
        Of the shape and type of `x`; the arithmetic is float32 for float16 and bfloat16.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Jacob et al. 2018, arXiv:1712.05877; groups: Shen et al. 2019, arXiv:1909.05840.

    Example:
        >>> fake_quantize_groups(torch.tensor([[1.5, 0.04, 7.0, 1.4]]), 2, symmetric=True)
        tensor([[1.5000, 0.0000, 7.0000, 1.0000]])
    """
    where = "fake_quantize_groups"
    _check_groups(where, x, group_size, bits)
    return grouped.fake_quantize_groups(x, group_size, bits, symmetric, rounding_noise(where, x, rounding, generator))


def fake_quantize_tokens(
    x: Tensor,
    bits: int = 8,
    *,
    symmetric: bool = True,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return activations rounded to integer codes under one range for each token, found as they pass.

    As `fake_quantize_groups` with the whole last axis as the group.

    Args:
        x: (..., features) of any floating type.
        bits: Width of a code, 2 to 8.
        symmetric: Zero point 0.
        rounding: To the nearest code or, without bias, to one of the two around the value.
        generator: Source of the randomness, on the device of `x`; torch's global one if None.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Yao et al. 2022 (ZeroQuant), arXiv:2206.01861.

    Example:
        >>> fake_quantize_tokens(torch.tensor([[127.0, 1.4], [0.127, 0.0014]]))
        tensor([[1.2700e+02, 1.0000e+00],
                [1.2700e-01, 1.0000e-03]])
    """
    where = "fake_quantize_tokens"
    check_floats(where, x)
    size = x.shape[-1] if x.dim() else 1
    _check_groups(where, x, size, bits)
    return grouped.fake_quantize_groups(x, size, bits, symmetric, rounding_noise(where, x, rounding, generator))


def quantize_groups(
    x: Tensor, group_size: int, bits: int = 4, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points, which stand bit for bit for what `fake_quantize_groups` gives.

    Args:
        x: (..., K) of any floating type, finite.
        group_size: Values to a group; divides K.
        bits: Width of a code, 2 to 8; codes of fewer than 8 take a byte each.
        symmetric: Zero point 0.

    Returns:
        Codes (..., K) in int8; scales (..., K / group_size) in float32, float64 for float64; zero points like the
        scales in int8.

    Raises:
        ConfigError: If an argument breaks its rule or a value is not finite.

    Example:
        >>> quantize_groups(torch.tensor([[1.5, 0.0]]), 2)
        (tensor([[ 7, -8]], dtype=torch.int8), tensor([[0.1000]]), tensor([[-8]], dtype=torch.int8))
    """
    where = "quantize_groups"
    _check_groups(where, x, group_size, bits)
    x = x.detach()
    scale, zero_point = grouped.group_qparams(x, group_size, bits, symmetric)
    if not bool(torch.isfinite(scale).all()):
        raise ConfigError(f"{where}: x must be finite, got NaN or infinity; an integer code cannot stand for either")
    codes = grouped.group_codes(x, scale, None if symmetric else zero_point, group_size, bits)
    return codes.flatten(-2).to(torch.int8), scale, zero_point.to(torch.int8)


def dequantize_groups(codes: Tensor, scale: Tensor, zero_point: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values that grouped codes stand for, ``s·(q − z)``.

    Args:
        codes: (..., K), whole numbers.
        scale: (..., groups); the number of groups divides K.
        zero_point: Of the shape of `scale`.
        dtype: Type of the result.

    Raises:
        ConfigError: If the shapes do not fit.

    Example:
        >>> dequantize_groups(torch.tensor([[7, -8]]), torch.tensor([[0.5]]), torch.tensor([[-8]]))
        tensor([[7.5000, 0.0000]])
    """
    fits = codes.dim() > 0 and codes.shape[:-1] == scale.shape[:-1] and scale.shape == zero_point.shape
    if not fits or scale.shape[-1] == 0 or codes.shape[-1] % scale.shape[-1]:
        raise ConfigError(
            "dequantize_groups: scale and zero_point must have one value for each group along the last axis, got "
            f"shapes {tuple(scale.shape)} and {tuple(zero_point.shape)} for codes of {tuple(codes.shape)}"
        )
    groups = codes.reshape(*scale.shape, codes.shape[-1] // scale.shape[-1]).to(scale.dtype)
    return ((groups - zero_point.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize_weight(weight: Tensor, bits: int = 8, *, transposed: bool = False, groups: int = 1) -> Tensor:
    """Return a layer's weight rounded to symmetric codes, one scale for each output channel; gradient 1.

    ``s = max|w|/(2^(b−1) − 1)`` over everything that one output is computed from: rows of a Linear or Conv weight, rows
    of an Embedding, and for a transposed convolution the slices of `output_channels_first`.

    Args:
        weight: Of Linear, Embedding, Conv1d/2d/3d, or ConvTranspose1d/2d/3d.
        bits: Width of a code, 2 to 8.
        transposed: Whether it is that of a transposed convolution: (in, out / groups, ...).
        groups: The layer's groups; they matter to a transposed convolution alone.

    Returns:
        Of the shape and type of `weight`; NaN in a channel that holds a value that is not finite.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Krishnamoorthi 2018, arXiv:1806.08342.

    Example:
        >>> weight = torch.tensor([[[3.0]], [[1.4]]])  # two inputs, one output
        >>> fake_quantize_weight(weight, 3, transposed=True).flatten()
        tensor([3., 1.])
    """
    where = "fake_quantize_weight"
    check_floats(where, weight, "weight")
    check_bits(where, bits)
    if weight.dim() < 2 or weight.numel() == 0:
        raise ConfigError(f"{where}: weight must have at least two axes and an element, got {tuple(weight.shape)}")
    qmax = 2 ** (bits - 1) - 1
    if not transposed:
        return kernels.fake_quantize_symmetric(weight, 0, qmax)
    rows = kernels.fake_quantize_symmetric(output_channels_first(weight, groups), 0, qmax)
    return output_channels_first(rows, groups)


def output_channels_first(weight: Tensor, groups: int = 1) -> Tensor:
    """Return a transposed convolution's weight with its output channels along axis 0; its own inverse.

    (in, out / groups, ...) becomes (out, in / groups, ...): output channel ``g·(out/groups) + j`` is computed from
    ``weight[g·(in/groups) : (g+1)·(in/groups), j]``, the g-th group's inputs. What works per output channel along
    axis 0 (scales, LSQ, ternary) then works for transposed convolutions too.

    Args:
        weight: Of ConvTranspose1d/2d/3d.
        groups: The layer's groups.

    Raises:
        ConfigError: If the groups do not divide the first axis.

    Example:
        >>> output_channels_first(torch.zeros(6, 5, 3, 3), groups=2).shape
        torch.Size([10, 3, 3, 3])
    """
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or weight.dim() < 2:
        raise ConfigError(f"output_channels_first: groups must be a whole number of at least 1, got {groups!r}")
    if weight.shape[0] % groups:
        raise ConfigError(
            f"output_channels_first: groups must divide the first axis of the weight, {weight.shape[0]}, got {groups}"
        )
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)


def _check_groups(where: str, x: Tensor, group_size: int, bits: int) -> None:
    check_floats(where, x)
    check_bits(where, bits)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ConfigError(f"{where}: x must have values along its last axis, got shape {tuple(x.shape)}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or x.shape[-1] % group_size:
        raise ConfigError(
            f"{where}: group_size must be a whole number that divides the last axis, {x.shape[-1]}, got "
            f"{group_size!r}; take a divisor, or quantise per channel"
        )
