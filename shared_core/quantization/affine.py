"""Compute scales from values, and fake-quantize: round values to what small integers can represent.

Groups, tokens, output channels and rows have their own ranges. Their codes are available too.
Results have the shape and type of the values; float16 and bfloat16 are computed in float32. Invalid arguments
raise `ConfigError`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization import group as grouped
from torch import Tensor

from shared_core.config.options import checked
from shared_core.errors import ConfigError, did_you_mean
from shared_core.modules.weight_views import output_channels_first

LARGEST_CODE = 2**16


def fake_quantize(
    x: Tensor,
    scale: float | Tensor,
    zero_point: int | Tensor,
    qmin: int,
    qmax: int,
    *,
    axis: int | None = None,
    gate: Literal["unrounded", "rounded"] = "unrounded",
    rounding: Literal["nearest", "stochastic"] = "nearest",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `x` rounded to the values that integer codes can hold, with a straight-through gradient.

    ``q = clamp(ne(x/s) + z, qmin, qmax)`` with ``ne`` rounding halves to even; the result is ``s·(q − z)``.
    The gradient passes where ``qmin <= x/s + z <= qmax`` and is zero elsewhere. Scale and zero point get
    no gradient. NaN stays NaN. The arithmetic is float32 for float16 and bfloat16.

    Stochastic rounding takes ``⌊x/s⌋ + 1`` with probability ``x/s − ⌊x/s⌋``, else ``⌊x/s⌋``, so the expected
    result is `x` wherever `x` is in range.

    Args:
        x: Values of any shape and floating type.
        scale: Step between neighboring values (divides); positive, finite; with `axis` one for each channel.
        zero_point: The code of 0, a whole number in [qmin, qmax]; with `axis` one for each channel or one for
            all.
        qmin: Smallest code, inclusive.
        qmax: Largest code, inclusive.
        axis: Channels lie along this axis of `x`; None: one scale for all.
        gate: ``"rounded"`` lets the gradient pass where the rounded code is in range, as torch's own ops do.
        rounding: To the nearest code or, without bias, to one of the two around `x`.
        generator: Source of the randomness, on the device of `x`; torch's global one if None. Activation
            checkpointing restores only the global one when it recomputes.

    Source: Jacob et al. 2018, arXiv:1712.05877; the gate: Bengio et al. 2013, arXiv:1308.3432; rounding: ONNX
    QuantizeLinear.

    Example:
        >>> fake_quantize(torch.tensor([-1.0, 0.26, 0.75, 9.0]), 0.5, 0, -8, 7)
        tensor([-1.0000,  0.5000,  1.0000,  3.5000])
    """
    where = "fake_quantize"
    check_floats(where, x)
    check_codes(where, qmin, qmax)
    check_choice(where, "gate", gate, ("unrounded", "rounded"))
    scales = torch.as_tensor(scale, dtype=kernels.compute_dtype(x.dtype), device=x.device).detach()
    zeros = torch.as_tensor(zero_point, device=x.device).detach()
    scales = by_axis(where, "scale", scales, x, axis)
    zeros = by_axis(where, "zero_point", zeros, x, axis if zeros.dim() else None)
    # A compiled graph cannot read values. The caller's first, eager call has checked them.
    if not torch.compiler.is_compiling():
        _check_values(where, scales, zeros, qmin, qmax)
    noise = rounding_noise(where, x, rounding, generator)
    return kernels.fake_quantize(x, scales, zeros, qmin, qmax, gate == "rounded", noise)


def choose_qparams_symmetric(weight: Tensor, axis: int | None = 0, qmax: int = 127) -> Tensor:
    """Return the scale that puts the largest magnitude on the largest code, ``s = max|w| / qmax``.

    A channel of zeros has scale 1. If the quotient was rounded down, the next larger number is used, so that
    ``max|w| / s <= qmax`` holds in floating point and the largest weight keeps its gradient.

    Args:
        weight: Values of any shape and floating type, finite.
        axis: One scale for each channel along this axis; None: one for all.
        qmax: Largest code, at least 1; the smallest is ``-qmax``.

    Returns:
        Scale of shape (channels,) or (), float64 for float64 weights and float32 for all others.

    Raises:
        ConfigError: If an argument is invalid or a value is not finite.

    Example:
        >>> choose_qparams_symmetric(torch.tensor([[0.5, -2.54], [0.0, 0.0]]))
        tensor([0.0200, 1.0000])
    """
    where = "choose_qparams_symmetric"
    check_floats(where, weight, "weight", elements=True)
    check_axis(where, weight.dim(), axis)
    check_codes(where, -qmax, qmax)
    scale = kernels.symmetric_scale(weight.detach(), axis, qmax)
    _check_finite(where, "weight", scale)
    return scale


def choose_qparams_affine(
    minimum: float | Tensor, maximum: float | Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor]:
    """Return (scale, zero point) of the range [minimum, maximum], widened to contain 0.

    ``s = (max − min)/(qmax − qmin)``, 1 if that is 0; ``z = clamp(ne(qmin − min/s), qmin, qmax)``. Zero is
    representable, so that padding and ReLU stay exact.

    Args:
        minimum: Smallest value, or a tensor of them.
        maximum: Largest value, not below `minimum`; the same shape.
        qmin: Smallest code, inclusive.
        qmax: Largest code, inclusive.

    Returns:
        Scale (float64 for float64 input, else float32) and zero point (int32).

    Raises:
        ConfigError: If a bound is not finite, or the minimum is above the maximum.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1; zero point as in ONNX QuantizeLinear.

    Example:
        >>> choose_qparams_affine(0.0, 2.55, -128, 127)
        (tensor(0.0100), tensor(-128, dtype=torch.int32))
    """
    where = "choose_qparams_affine"
    check_codes(where, qmin, qmax)
    low, high = torch.as_tensor(minimum), torch.as_tensor(maximum)
    if not low.is_floating_point():
        low = low.to(torch.float32)
    high = high.to(low)
    if low.shape != high.shape or not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
        raise ConfigError(
            where,
            "minimum and maximum must have one shape and be finite, with minimum <= maximum, got "
            f"{minimum!r:.80} and {maximum!r:.80}",
        )
    return kernels.affine_qparams(low, high, qmin, qmax)


class ActivationQParams(NamedTuple):
    """The grid of activations: scale, zero point (int32), and the smallest and largest code."""

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int


def choose_qparams_activation(
    minimum: float | Tensor, maximum: float | Tensor, bits: int = 8, *, clip: float | None = None
) -> ActivationQParams:
    """Return the integer grid for activations in the range [minimum, maximum].

    If no value is negative (after a ReLU or softmax), the codes are unsigned, ``0 … 2^b − 1``, with zero point 0. This
    wastes no codes, and integer products need no correction for the zero point. Otherwise codes
    are signed, ``−2^(b−1) … 2^(b−1) − 1``, with the zero point of `choose_qparams_affine`.

    `clip` limits the maximum. A GELU returns values from −0.17 up. Clipped at 10, its 8-bit step stays small enough
    to represent the negative values.

    Args:
        minimum: Smallest value, or a tensor of them, which then share one choice of codes.
        maximum: Largest value, not below `minimum`; the same shape.
        bits: Width of a code, 2 to 8.
        clip: Largest value to represent, above 0; None: `maximum`.

    Source: Wu et al. 2020, arXiv:2004.09602 (GELU10); Jacob et al. 2018, arXiv:1712.05877.

    Example:
        >>> choose_qparams_activation(0.0, 2.55)
        ActivationQParams(scale=tensor(0.0100), zero_point=tensor(0, dtype=torch.int32), qmin=0, qmax=255)
        >>> choose_qparams_activation(-0.17, 40.0, clip=10.0).scale
        tensor(0.0399)
    """
    where = "choose_qparams_activation"
    check_bits(where, bits)
    low, high = torch.as_tensor(minimum), torch.as_tensor(maximum)
    if clip is not None:
        checked(clip, float, where, "clip", above=0)
        # Clamp both: otherwise a range entirely above the clip would have minimum > maximum.
        low, high = low.clamp(max=clip), high.clamp(max=clip)
    # Unsigned codes are twice as fine as signed ones for values that are never negative.
    qmin, qmax = (0, 2**bits - 1) if bool((low >= 0).all()) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return ActivationQParams(*choose_qparams_affine(low, high, qmin, qmax), qmin, qmax)


def rounding_noise(where: str, x: Tensor, rounding: str, generator: torch.Generator | None) -> Tensor | None:
    """Return the random numbers for stochastic rounding of `x`, or None for rounding to nearest."""
    check_choice(where, "rounding", rounding, ("nearest", "stochastic"))
    if generator is not None and (rounding == "nearest" or generator.device.type != x.device.type):
        wanted = "None for rounding to nearest" if rounding == "nearest" else f"on the device of x, {x.device}"
        raise ConfigError(where, f"generator must be {wanted}, got one on {generator.device}")
    if rounding == "nearest":
        return None
    return torch.rand(x.shape, dtype=kernels.compute_dtype(x.dtype), device=x.device, generator=generator)


def check_floats(where: str, x: Tensor, name: str = "x", *, elements: bool = False) -> None:
    """Raise `ConfigError` unless `x` is a floating-point tensor, with `elements` a non-empty one."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or (elements and not x.numel()):
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        wanted = "a floating-point tensor with elements" if elements else "a floating-point tensor"
        raise ConfigError(where, f"{name} must be {wanted}, got {got}", "quantize values, not codes")


def check_axis(where: str, dims: int, axis: int | None) -> None:
    """Raise `ConfigError` unless `axis` is None or exists in a tensor of `dims` axes."""
    if axis is not None and not -dims <= axis < dims:
        raise ConfigError(where, f"axis must name one of the {dims} axes, got {axis}")


def by_axis(where: str, name: str, values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Return `values`, one in all or one per channel along `axis`, shaped to broadcast with `x`."""
    check_axis(where, x.dim(), axis)
    if axis is None:
        fits, wanted = values.numel() == 1, "be one number unless an axis is given"
    else:
        fits = values.shape == (x.shape[axis],)
        wanted = f"have one value for each of the {x.shape[axis]} channels along axis {axis}"
    if not fits:
        raise ConfigError(where, f"{name} must {wanted}, got shape {tuple(values.shape)}")
    return values.reshape(()) if axis is None else kernels.along(values, x.dim(), axis)


def check_choice(where: str, name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` for an unknown name. Unlike `checked`, it does not break a compiled graph."""
    if value not in known:
        raise ConfigError(where, f"{name} must be one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")


def check_whole(where: str, name: str, value: int, low: int, high: int) -> None:
    """Raise `ConfigError` unless `value` is an integer in the range. Does not break a compiled graph."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(where, f"{name} must be a whole number from {low} to {high}, got {value!r}")


def check_bits(where: str, bits: int) -> None:
    """Raise `ConfigError` unless `bits` is an integer from 2 to 8."""
    check_whole(where, "bits", bits, 2, 8)


def check_codes(where: str, qmin: int, qmax: int) -> None:
    """Raise `ConfigError` unless both codes are integers within ±2^16 and ``qmin < qmax``."""
    check_whole(where, "qmin", qmin, -LARGEST_CODE, LARGEST_CODE)
    check_whole(where, "qmax", qmax, -LARGEST_CODE, LARGEST_CODE)
    if not qmin < qmax:
        raise ConfigError(where, f"qmin must be below qmax, got {qmin} and {qmax}")


def _check_finite(where: str, name: str, scale: Tensor) -> None:
    if not bool(torch.isfinite(scale).all()):
        raise ConfigError(where, f"{name} must be finite, got NaN or infinity", "find the step that diverged")


def _check_values(where: str, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> None:
    if scale.numel() and not bool(((scale > 0) & (scale < math.inf)).all()):
        raise ConfigError(where, f"scale must be positive and finite, the smallest is {scale.min().item()}")
    if not bool(((zero_point >= qmin) & (zero_point <= qmax) & (zero_point == zero_point.round())).all()):
        raise ConfigError(
            where, f"zero_point must be a whole number in [{qmin}, {qmax}], got {zero_point.flatten()[:8].tolist()}"
        )


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
    """Return `x` fake-quantized with one range per group along the last axis.

    Symmetric: codes ±(2^(b−1) − 1), ``s = max|x|/(2^(b−1) − 1)``. Affine: codes −2^(b−1) … 2^(b−1) − 1 over the
    group's range widened to contain 0, ``s = (max − min)/(2^b − 1)``, ``z = clamp(ne(qmin − min/s))``. A group of
    zeros has scale 1. No value lies outside its group's range by more than half a step (from rounding z), so the
    gradient passes everywhere. A group with a non-finite value becomes NaN.

    The group size must divide the last axis, because the layouts of integer kernels have no shorter last group.

    Args:
        x: (..., K), a weight with its inputs along the last axis, of any floating type.
        group_size: Values per group; divides K.
        bits: Width of a code, 2 to 8.
        symmetric: Zero point 0.
        rounding: To the nearest code or, without bias, to one of the two around the value (except in the last half
            step of an affine range whose zero point was rounded).
        generator: Source of the randomness, on the device of `x`; torch's global one if None.

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
    """Return activations fake-quantized with one range per token, computed from the token's values.

    Same as `fake_quantize_groups` with the whole last axis as the group.

    Args:
        x: (..., features) of any floating type.
        bits: Width of a code, 2 to 8.
        symmetric: Zero point 0.
        rounding: To the nearest code or, without bias, to one of the two around the value.
        generator: Source of the randomness, on the device of `x`; torch's global one if None.

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
    """Return codes, scales and zero points that represent the result of `fake_quantize_groups` bit for bit.

    Args:
        x: (..., K) of any floating type, finite.
        group_size: Values per group; divides K.
        bits: Width of a code, 2 to 8; codes of fewer than 8 take a byte each.
        symmetric: Zero point 0.

    Returns:
        Codes (..., K) in int8; scales (..., K / group_size) in float32, or float64 for float64; zero points in int8,
        with the shape of the scales.

    Raises:
        ConfigError: If an argument is invalid or a value is not finite.

    Example:
        >>> quantize_groups(torch.tensor([[1.5, 0.0]]), 2)
        (tensor([[ 7, -8]], dtype=torch.int8), tensor([[0.1000]]), tensor([[-8]], dtype=torch.int8))
    """
    where = "quantize_groups"
    _check_groups(where, x, group_size, bits)
    x = x.detach()
    scale, zero_point = grouped.group_qparams(x, group_size, bits, symmetric)
    _check_finite(where, "x", scale)
    codes = grouped.group_codes(x, scale, None if symmetric else zero_point, group_size, bits)
    return codes.flatten(-2).to(torch.int8), scale, zero_point.to(torch.int8)


def dequantize_groups(codes: Tensor, scale: Tensor, zero_point: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of grouped codes, ``s·(q − z)``.

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
            "dequantize_groups",
            "scale and zero_point must have one value for each group along the last axis, got shapes "
            f"{tuple(scale.shape)} and {tuple(zero_point.shape)} for codes of {tuple(codes.shape)}",
        )
    groups = codes.reshape(*scale.shape, codes.shape[-1] // scale.shape[-1]).to(scale.dtype)
    return ((groups - zero_point.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize_weight(weight: Tensor, bits: int = 8, *, transposed: bool = False, groups: int = 1) -> Tensor:
    """Return a layer's weight fake-quantized symmetrically with one scale per output channel; gradient 1.

    ``s = max|w|/(2^(b−1) − 1)`` over all weights of one output: rows of a Linear, Conv or Embedding weight, and for a
    transposed convolution the slices of `output_channels_first`.

    Args:
        weight: Of Linear, Embedding, Conv1d/2d/3d, or ConvTranspose1d/2d/3d.
        bits: Width of a code, 2 to 8.
        transposed: True for the weight of a transposed convolution: (in, out / groups, ...).
        groups: The layer's groups. Only transposed convolutions use them.

    Returns:
        A tensor with the shape and type of `weight`. Channels with a non-finite value become NaN.

    Source: Krishnamoorthi 2018, arXiv:1806.08342.

    Example:
        >>> weight = torch.tensor([[[3.0]], [[1.4]]])  # two inputs, one output
        >>> fake_quantize_weight(weight, 3, transposed=True).flatten()
        tensor([3., 1.])
    """
    where = "fake_quantize_weight"
    check_floats(where, weight, "weight", elements=True)
    check_bits(where, bits)
    if weight.dim() < 2:
        raise ConfigError(where, f"weight must have at least two axes, got {tuple(weight.shape)}")
    qmax = 2 ** (bits - 1) - 1
    if not transposed:
        return kernels.fake_quantize_symmetric(weight, 0, qmax)
    # Transposed convolutions hold (in, out / groups, ...), so outputs are moved first, and back after rounding.
    rows = kernels.fake_quantize_symmetric(output_channels_first(weight, groups), 0, qmax)
    return output_channels_first(rows, groups)


def _check_groups(where: str, x: Tensor, group_size: int, bits: int) -> None:
    check_floats(where, x)
    check_bits(where, bits)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ConfigError(where, f"x must have values along its last axis, got shape {tuple(x.shape)}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or x.shape[-1] % group_size:
        raise ConfigError(
            where,
            f"group_size must be a whole number that divides the last axis, {x.shape[-1]}, got {group_size!r}",
            "use a divisor, or quantize per channel",
        )
