"""What Triton kernels share: narrow floats and their scales, bit for bit those of torch.

Without `native` conversions are made of integers: hardware before compute capability 8.9 has none to FP8, and Triton's
interpreter (3.6 to 3.9) cuts off where it should round. Kernels must be launched with ``enable_fp_fusion=False``:
a product that flows into an addition must be rounded before.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from eff_kernels._triton.launch import has_triton

if has_triton():
    import triton
    import triton.language as tl


def _magnitude(x: tl.tensor) -> tl.tensor:
    # integers order magnitudes, and NaN above infinity: a maximum of them loses none
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


def _nearest(x: tl.tensor, mantissa: tl.constexpr, bias: tl.constexpr) -> tl.tensor:
    """Return float32 rounded to a float with that many mantissa bits, halves to even, without a largest value."""
    # float32's bits below the last one that is kept; `half` plus that last bit rounds halves to even.
    shift: tl.constexpr = 23 - mantissa
    half: tl.constexpr = (1 << (shift - 1)) - 1
    # its ulp is the smallest subnormal
    magic: tl.constexpr = 2.0 ** (24 - bias - mantissa)
    a = magnitude(x)
    # A carry out of the mantissa raises the exponent by one, which is the next power of two: integers do it right.
    normal = ((a + half + ((a >> shift) & 1)) >> shift) << shift
    # Below the smallest normal: adding `magic` makes float32's own rounding happen at the format's last bit.
    subnormal = ((a.to(tl.float32, bitcast=True) + magic) - magic).to(tl.int32, bitcast=True)
    # The sign bit is the only one in which x and its magnitude differ.
    y = tl.where(a < ((128 - bias) << 23), subnormal, normal) | (x.to(tl.int32, bitcast=True) ^ a)
    return tl.where(x != x, x, y.to(tl.float32, bitcast=True))


def _clamped(x: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    return tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))


def _fp8_code(x: tl.tensor, mantissa: tl.constexpr, native: tl.constexpr) -> tl.tensor:
    """Return bits of e4m3 (3 mantissa bits) or e5m2 (2): nearest, saturating, NaN kept."""
    if native:
        # cvt.rn.satfinite
        code = x.to(tl.float8e4nv if mantissa == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        # Without the instructions (before sm_89, or interpreted): rounded as a float32, then its bits moved into
        # place.
        x = clamped(x, 448.0 if mantissa == 3 else 57344.0)
        bias: tl.constexpr = 7 if mantissa == 3 else 15
        y = nearest(x, mantissa, bias)
        a = magnitude(y)
        magic: tl.constexpr = 2.0 ** (24 - bias - mantissa)
        subnormal = (a.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True)
        # The added magic leaves the code in the lowest bits of the sum: subtract the magic's own bits.
        subnormal -= (151 - bias - mantissa) << 23
        # A normal number: its exponent from bias 127 to the format's, mantissa cut to size.
        code = tl.where(a < ((128 - bias) << 23), subnormal, (a >> (23 - mantissa)) - ((127 - bias) << mantissa))
        code = tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


def _narrowed(x: tl.tensor, dtype: tl.constexpr, native: tl.constexpr) -> tl.tensor:
    """Return float32 in a type of 16 or 32 bits, rounded to nearest."""
    if dtype == tl.bfloat16 and not native:
        # bfloat16 is the upper half of float32. By integers: the interpreter's own conversion does not round to even.
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        y = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


def _fused(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return tl.fma(a, b, c)


def _fused_in_interpreter(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


def _scale_of(amax: tl.tensor, mantissa: tl.constexpr, rounding: tl.constexpr) -> tl.tensor:
    """Return `eff_kernels.fp8.block_scale` of the bits of magnitudes; both FP8 types end at 1.75 times 2^emax."""
    largest: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
    emax: tl.constexpr = 8 if mantissa == 3 else 15
    # At least 2^-126, so that the scale is a normal float32 and its reciprocal finite.
    at_least = tl.maximum(amax.to(tl.float32, bitcast=True), largest * 2.0**-126)
    if rounding == "exact":
        # a product and one correction: rounded as the division is, for these two divisors (tried for all mantissas)
        inverse = tl.full(at_least.shape, 1.0 / largest, tl.float32)
        rough = at_least * inverse
        rest = fused(-rough, tl.full(at_least.shape, largest, tl.float32), at_least)
        scale = fused(rest, inverse, rough)
    else:
        bits = at_least.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 - emax
        if rounding == "power_of_two":
            # 0x600000 is the mantissa of 1.75: a larger amax would exceed the largest value under this power of two.
            exponent += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -126), 127)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


def _inverse_of_power(scale: tl.tensor) -> tl.tensor:
    """Return the reciprocal of powers of two, NaN of NaN, by their exponents: a division takes five times as long."""
    bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
    inverse = tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)  # that of 2^127 is subnormal
    return tl.where(scale != scale, scale, inverse)


def _divided(x: tl.tensor, scale: tl.tensor, rounding: tl.constexpr) -> tl.tensor:
    """Return x/scale, rounded to nearest where FP8 has a value other than zero or the largest.

    Scales are few and values many: a reciprocal and two corrections (Markstein 1990) cost half of a division.
    """
    if rounding != "exact":
        quotient = x * inverse_of_power(scale)
    else:
        # Below 2^-64 the products of the corrections would leave float32's normal range: numerator and scale are
        # lifted alike.
        lift = tl.where(scale < 2.0**-64, 2.0**64, 1.0)
        by = tl.broadcast_to(scale * lift, x.shape)
        reciprocal = tl.broadcast_to(tl.div_rn(scale * 0.0 + 1.0, scale * lift), x.shape)
        quotient = x * lift * reciprocal
        # Newton's correction: q + (x - q s) / s, the residual exact by fma. Twice gives the rounded quotient.
        closer = tl.fma(tl.fma(-quotient, by, x * lift), reciprocal, quotient)
        closer = tl.fma(tl.fma(-closer, by, x * lift), reciprocal, closer)
        # corrected, an infinity becomes NaN and -0 becomes 0
        a = tl.abs(quotient)
        quotient = tl.where((a < 2.0**17) & (a > 2.0**-30), closer, quotient)
    return quotient


if has_triton():
    # a kernel finds what it calls among its module's globals
    magnitude = triton.jit(_magnitude)
    nearest = triton.jit(_nearest)
    clamped = triton.jit(_clamped)
    fp8_code = triton.jit(_fp8_code)
    narrowed = triton.jit(_narrowed)
    # the interpreter's own rounds twice (Triton 3.9)
    fused = triton.jit(_fused_in_interpreter if triton.knobs.runtime.interpret else _fused)
    scale_of = triton.jit(_scale_of)
    inverse_of_power = triton.jit(_inverse_of_power)
    divided = triton.jit(_divided)


def device_of(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which Triton launches where `x` lies."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call, no-any-return]


def has_native_fp8(x: Tensor) -> bool:
    """Return whether the device of `x` converts to FP8 by instructions that round as torch does."""
    return x.is_cuda and torch.version.hip is None and _capability(x.device) >= (8, 9)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
