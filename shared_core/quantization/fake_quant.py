"""Scales from values, and fake quantisation: what a value becomes when it is stored as a small integer."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from eff_kernels import quantization as kernels
from torch import Tensor

from shared_core.errors import ConfigError


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
    The gradient passes where ``qmin <= x/s + z <= qmax`` and is zero elsewhere; scale and zero point get
    none. NaN stays NaN. The arithmetic is float32 for float16 and bfloat16.

    Stochastic rounding takes ``⌊x/s⌋ + 1`` with the probability ``x/s − ⌊x/s⌋``, else ``⌊x/s⌋``: the mean of the
    result is `x` wherever `x` is in range.

    Args:
        x: Values of any shape and floating type.
        scale: Step between neighbouring values (divides); positive, finite; with `axis` one for each channel.
        zero_point: The code of 0, a whole number in [qmin, qmax]; with `axis` one for each channel or one for
            all.
        qmin: Smallest code, inclusive.
        qmax: Largest code, inclusive.
        axis: Channels lie along this axis of `x`; None: one scale for all.
        gate: ``"rounded"`` lets the gradient pass where the rounded code is in range, as torch's own ops do.
        rounding: To the nearest code or, without bias, to one of the two around `x`.
        generator: Source of the randomness, on the device of `x`; torch's global one if None. Activation
            checkpointing computes twice and restores the global one alone.

    Returns:
        Of the shape and type of `x`.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Jacob et al. 2018, arXiv:1712.05877; the gate: Bengio et al. 2013, arXiv:1308.3432; rounding: ONNX
    QuantizeLinear.

    Example:
        >>> fake_quantize(torch.tensor([-1.0, 0.26, 0.75, 9.0]), 0.5, 0, -8, 7)
        tensor([-1.0000,  0.5000,  1.0000,  3.5000])
    """
    where = "fake_quantize"
    check_floats(where, x)
    check_codes(where, qmin, qmax)
    check_gate(where, gate)
    dtype = kernels.compute_dtype(x.dtype)
    scales = torch.as_tensor(scale, dtype=dtype, device=x.device).detach()
    zeros = torch.as_tensor(zero_point, device=x.device).detach()
    if axis is None:
        if scales.numel() != 1 or zeros.numel() != 1:
            raise ConfigError(
                f"{where}: scale and zero_point must be one number each without an axis, got shapes "
                f"{tuple(scales.shape)} and {tuple(zeros.shape)}; pass axis for one a channel"
            )
        scales, zeros = scales.reshape(()), zeros.reshape(())
    else:
        check_axis(where, x, axis)
        channels = x.shape[axis]
        if scales.shape != (channels,) or zeros.shape not in ((channels,), ()):
            raise ConfigError(
                f"{where}: scale and zero_point must have one value for each of the {channels} channels "
                f"along axis {axis}, got shapes {tuple(scales.shape)} and {tuple(zeros.shape)}"
            )
        scales = kernels.along(scales, x.dim(), axis)
        zeros = kernels.along(zeros, x.dim(), axis) if zeros.dim() else zeros
    # A compiled graph cannot look at values; there the caller's own first, eager call has checked them.
    if not torch.compiler.is_compiling():
        _check_values(where, scales, zeros, qmin, qmax)
    noise = rounding_noise(where, x, rounding, generator)
    return kernels.fake_quantize(x, scales, zeros, qmin, qmax, gate == "rounded", noise)


def choose_qparams_symmetric(weight: Tensor, axis: int | None = 0, qmax: int = 127) -> Tensor:
    """Return the scale that puts the largest magnitude on the largest code, ``s = max|w| / qmax``.

    A channel that is all zero has scale 1. Where the quotient was rounded down the next number is taken, so
    that ``max|w| / s <= qmax`` holds in floating point and the largest weight keeps its gradient.

    Args:
        weight: Values of any shape and floating type, finite.
        axis: One scale for each channel along this axis; None: one for all.
        qmax: Largest code, at least 1; the smallest is ``-qmax``.

    Returns:
        Of shape (channels,) or (), float64 for float64 weights and float32 for all others.

    Raises:
        ConfigError: If an argument breaks its rule or a value is not finite.

    Example:
        >>> choose_qparams_symmetric(torch.tensor([[0.5, -2.54], [0.0, 0.0]]))
        tensor([0.0200, 1.0000])
    """
    where = "choose_qparams_symmetric"
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.numel() == 0:
        raise ConfigError(f"{where}: weight must be a floating-point tensor with elements, got {weight!r:.80}")
    check_axis(where, weight, axis, "weight")
    check_codes(where, -qmax, qmax)
    scale = kernels.symmetric_scale(weight.detach(), axis, qmax)
    if not bool(torch.isfinite(scale).all()):
        raise ConfigError(f"{where}: weight must be finite, got NaN or infinity; look for the step that diverged")
    return scale


def choose_qparams_affine(
    minimum: float | Tensor, maximum: float | Tensor, qmin: int, qmax: int
) -> tuple[Tensor, Tensor]:
    """Return (scale, zero point) of the range [minimum, maximum], widened to contain 0.

    ``s = (max − min)/(qmax − qmin)``, 1 if that is 0; ``z = clamp(ne(qmin − min/s), qmin, qmax)``. Zero has a
    code of its own, so that padding and ReLU stay exact.

    Args:
        minimum: Smallest value, or a tensor of them.
        maximum: Largest value, not below `minimum`; the same shape.
        qmin: Smallest code, inclusive.
        qmax: Largest code, inclusive.

    Returns:
        Scale (float64 for float64 input, else float32) and zero point (int32).

    Raises:
        ConfigError: If a bound is not finite or they are the wrong way round.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1; zero point as ONNX QuantizeLinear counts it.

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
    if low.shape != high.shape:
        raise ConfigError(f"{where}: maximum must have the shape of minimum, got {high.shape} and {low.shape}")
    if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
        raise ConfigError(
            f"{where}: minimum and maximum must be finite and in this order, got {minimum!r:.80} and {maximum!r:.80}"
        )
    return kernels.affine_qparams(low, high, qmin, qmax)


class ActivationQParams(NamedTuple):
    """How activations become codes: scale, zero point (int32), and the smallest and largest code."""

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int


def choose_qparams_activation(
    minimum: float | Tensor, maximum: float | Tensor, bits: int = 8, *, clip: float | None = None
) -> ActivationQParams:
    """Return how activations of the range [minimum, maximum] are stored.

    Where no value is negative (a ReLU, a softmax) the codes are unsigned, ``0 … 2^b − 1``, with zero point 0: none
    is spent on values that do not occur, and integer products need no correction for the zero point. Otherwise they
    are signed, ``−2^(b−1) … 2^(b−1) − 1``, with the zero point of `choose_qparams_affine`.

    With `clip` the maximum is at most that. A GELU gives values from −0.17 up; clipped at 10 its step stays small
    enough at 8 bits that the negative ones keep codes of their own.

    Args:
        minimum: Smallest value, or a tensor of them; then all share one choice of codes.
        maximum: Largest value, not below `minimum`; the same shape.
        bits: Width of a code, 2 to 8.
        clip: Largest value to represent, above 0; None: `maximum`.

    Raises:
        ConfigError: If an argument breaks its rule.

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
        if not 0 < clip < math.inf:
            raise ConfigError(f"{where}: clip must be positive and finite, got {clip}; GELU outputs take 10")
        # both: a range that lies beyond the clip as a whole would be turned round
        low, high = low.clamp(max=clip), high.clamp(max=clip)
    qmin, qmax = (0, 2**bits - 1) if bool((low >= 0).all()) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return ActivationQParams(*choose_qparams_affine(low, high, qmin, qmax), qmin, qmax)


def rounding_noise(where: str, x: Tensor, rounding: str, generator: torch.Generator | None) -> Tensor | None:
    """Return what stochastic rounding of `x` draws, or None for rounding to nearest."""
    if rounding not in ("nearest", "stochastic"):
        raise ConfigError(f"{where}: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if rounding == "nearest":
        if generator is not None:
            raise ConfigError(f"{where}: generator must be None where rounding is 'nearest', which draws nothing")
        return None
    if generator is not None and generator.device.type != x.device.type:
        raise ConfigError(f"{where}: generator must be on the device of x, {x.device}, got {generator.device}")
    return torch.rand(x.shape, dtype=kernels.compute_dtype(x.dtype), device=x.device, generator=generator)


def check_floats(where: str, x: Tensor, name: str = "x") -> None:
    """Refuse what is no floating-point tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(f"{where}: {name} must be a floating-point tensor, got {got}; quantise values, not codes")


def check_axis(where: str, x: Tensor, axis: int | None, name: str = "x") -> None:
    """Refuse an axis that the tensor does not have; None is none."""
    if axis is not None and not -x.dim() <= axis < x.dim():
        raise ConfigError(f"{where}: axis must name one of the {x.dim()} axes of {name}, got {axis}")


def check_gate(where: str, gate: str) -> None:
    """Refuse a gate that is not known."""
    if gate not in ("unrounded", "rounded"):
        raise ConfigError(f"{where}: gate must be 'unrounded' or 'rounded', got {gate!r}")


def check_bits(where: str, bits: int) -> None:
    """Refuse a width that is no whole number from 2 to 8."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ConfigError(f"{where}: bits must be a whole number from 2 to 8, got {bits!r}")


def check_codes(where: str, qmin: int, qmax: int) -> None:
    """Refuse codes that are no whole numbers or the wrong way round."""
    for name, value in (("qmin", qmin), ("qmax", qmax)):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**16:
            raise ConfigError(f"{where}: {name} must be a whole number of at most 16 bits, got {value!r}")
    if not qmin < qmax:
        raise ConfigError(f"{where}: qmin must be below qmax, got {qmin} and {qmax}")


def _check_values(where: str, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> None:
    if scale.numel() and not bool(((scale > 0) & (scale < math.inf)).all()):
        raise ConfigError(f"{where}: scale must be positive and finite, got {scale.min().item()} as the smallest")
    if not bool(((zero_point >= qmin) & (zero_point <= qmax) & (zero_point == zero_point.round())).all()):
        raise ConfigError(
            f"{where}: zero_point must be a whole number in [{qmin}, {qmax}], got {zero_point.flatten()[:8].tolist()}"
        )
