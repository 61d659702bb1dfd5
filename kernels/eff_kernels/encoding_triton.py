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

from eff_kernels.triton_available import has_triton

if has_triton():
    import triton
    import triton.language as tl


def _magnitude(x: tl.tensor) -> tl.tensor:
    # integers order magnitudes, and NaN above infinity: a maximum of them loses none
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


def _nearest(x: tl.tensor, mantissa: tl.constexpr, bias: tl.constexpr) -> tl.tensor:
    """Return float32 rounded to a float with that many mantissa bits, halves to even, without a largest value."""
    shift: tl.constexpr = 23 - mantissa
    half: tl.constexpr = (1 << (shift - 1)) - 1
    # its ulp is the smallest subnormal
    magic: tl.constexpr = 2.0 ** (24 - bias - mantissa)
    a = magnitude(x)
    normal = ((a + half + ((a >> shift) & 1)) >> shift) << shift
    subnormal = ((a.to(tl.float32, bitcast=True) + magic) - magic).to(tl.int32, bitcast=True)
    y = tl.where(a < ((128 - bias) << 23), subnormal, normal) | (x.to(tl.int32, bitcast=True) ^ a)
    return tl.where(x != x, x, y.to(tl.float32, bitcast=True))


def _clamped(x: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    return tl.where(x > largest, largest, tl.where(x < -largest, -largest, x))


def _fp8_code(x: tl.tensor, mantissa: tl.constexpr, native: tl.constexpr) -> tl.tensor:
    """Return bits of e4m3 (3 mantissa bits) or e5m2 (2): nearest, saturating, NaN kept."""
    x = clamped(x, 448.0 if mantissa == 3 else 57344.0)
    if native:
        if mantissa == 3:
            code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        bias: tl.constexpr = 7 if mantissa == 3 else 15
        y = nearest(x, mantissa, bias)
        a = magnitude(y)
        magic: tl.constexpr = 2.0 ** (24 - bias - mantissa)
        subnormal = (a.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - (
            (151 - bias - mantissa) << 23
        )
        code = tl.where(a < ((128 - bias) << 23), subnormal, (a >> (23 - mantissa)) - ((127 - bias) << mantissa))
        code = tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


def _narrowed(x: tl.tensor, dtype: tl.constexpr, native: tl.constexpr) -> tl.tensor:
    """Return float32 in a type of 16 or 32 bits, rounded to nearest."""
    if dtype == tl.bfloat16 and not native:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        y = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


def _scale_of(amax: tl.tensor, mantissa: tl.constexpr, rounding: tl.constexpr) -> tl.tensor:
    """Return `eff_kernels.fp8.block_scale` of the bits of magnitudes; both FP8 types end at 1.75 times 2^emax."""
    largest: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
    emax: tl.constexpr = 8 if mantissa == 3 else 15
    at_least = tl.maximum(amax.to(tl.float32, bitcast=True), largest * 2.0**-126)
    if rounding == "exact":
        scale = tl.div_rn(at_least, tl.full(at_least.shape, largest, tl.float32))
    else:
        bits = at_least.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 - emax
        if rounding == "power_of_two":
            exponent += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -126), 127)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


def _divisor(scale: tl.tensor, rounding: tl.constexpr) -> tl.tensor:
    # of a power of two the reciprocal, as exact and faster to apply
    one = tl.full(scale.shape, 1.0, tl.float32)
    return scale if rounding == "exact" else tl.div_rn(one, scale)


def _divided(x: tl.tensor, divisor: tl.tensor, rounding: tl.constexpr) -> tl.tensor:
    return tl.div_rn(x, tl.zeros_like(x) + divisor) if rounding == "exact" else x * divisor


if has_triton():
    # a kernel finds what it calls among its module's globals
    magnitude = triton.jit(_magnitude)
    nearest = triton.jit(_nearest)
    clamped = triton.jit(_clamped)
    fp8_code = triton.jit(_fp8_code)
    narrowed = triton.jit(_narrowed)
    scale_of = triton.jit(_scale_of)
    divisor_of = triton.jit(_divisor)
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
