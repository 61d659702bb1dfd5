"""Narrow floats and their scales in Triton, bit for bit those of torch.

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


def _saturated(x: tl.tensor, mantissa: tl.constexpr, bias: tl.constexpr, largest: tl.constexpr) -> tl.tensor:
    """Return float32 rounded to a float with that many mantissa bits, halves to even, and clamped; NaN kept."""
    x = tl.clamp(x, -largest, largest, tl.PropagateNan.ALL)
    # Adding 1.5 times 2^23 units of the last bit that is kept makes float32's own rounding happen there; below the
    # smallest normal number that is the bit of the smallest subnormal one.
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (128 - bias) << 23)
    magic = (exponent + (((23 - mantissa) << 23) | 0x400000)).to(tl.float32, bitcast=True)
    bits = ((x + magic) - magic).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


def _fp8_code(x: tl.tensor, mantissa: tl.constexpr, native: tl.constexpr) -> tl.tensor:
    """Return bits of e4m3 (3 mantissa bits) or e5m2 (2): nearest, saturating, NaN kept."""
    if native:
        # cvt.rn.satfinite
        code = x.to(tl.float8e4nv if mantissa == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        # Without the instructions (before sm_89, or interpreted): rounded as a float32, then its bits moved into
        # place.
        bias: tl.constexpr = 7 if mantissa == 3 else 15
        y = saturated(x, mantissa, bias, 448.0 if mantissa == 3 else 57344.0)
        a = magnitude(y)
        magic: tl.constexpr = 2.0 ** (24 - bias - mantissa)
        subnormal = (a.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True)
        # The added magic leaves the code in the lowest bits of the sum: subtract the magic's own bits.
        subnormal -= (151 - bias - mantissa) << 23
        # A normal number: its exponent from bias 127 to the format's, mantissa cut to size.
        code = tl.where(a < ((128 - bias) << 23), subnormal, (a >> (23 - mantissa)) - ((127 - bias) << mantissa))
        code = tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return code.to(tl.uint8)


def _code_apart(x: tl.tensor, mantissa: tl.constexpr, native: tl.constexpr) -> tl.tensor:
    """Return what `_fp8_code` returns, by an instruction for each value, for the second of two stores."""
    # Codes that one store packs four to a register and another takes apart again, ptxas reads before they are
    # converted: on an H100 every fourth row of the transpose of a float32 matrix was zero (Triton 3.6 with ptxas 12.8).
    if native:
        kind: tl.constexpr = "e4m3x2" if mantissa == 3 else "e5m2x2"
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 code; cvt.rn.satfinite." + kind + ".f32 code, 0f00000000, $1; cvt.u32.u16 $0, code; }",
            "=r,f", [x], tl.int32, is_pure=True, pack=1,
        ).to(tl.uint8)  # fmt: skip
    else:
        code = fp8_code(x, mantissa, native)
    return code


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
        if rounding == "power_of_two":
            # a mantissa above that of 1.75 carries: a larger amax would exceed the largest value under its power of two
            bits += 0x1FFFFF
        scale = ((bits & 0x7F800000) - (emax << 23)).to(tl.float32, bitcast=True)
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


def _inverse_of_power(scale: tl.tensor) -> tl.tensor:
    """Return the reciprocal of powers of two, NaN of NaN, by their exponents: a division takes five times as long."""
    bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
    inverse = tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)  # that of 2^127 is subnormal
    return tl.where(scale != scale, scale, inverse)


def _rough_inverse(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


def _inverse_in_interpreter(x: tl.tensor) -> tl.tensor:
    return 1.0 / x


def _divided(x: tl.tensor, scale: tl.tensor, rounding: tl.constexpr) -> tl.tensor:
    """Return x/scale, rounded to nearest where FP8 lies between two values: what it rounds to is that of a division."""
    # Scales are few and values many: with 1/scale in two parts a value takes two operations. Tried for all mantissas of
    # scales beside all ties; above scales of 2^103 the lower part has fewer bits, and the quotient is within 2^-31.
    if rounding != "exact":
        quotient = x * inverse_of_power(scale)
    else:
        one = tl.full(scale.shape, 1.0, tl.float32)
        rough = rough_inverse(scale)
        inverse = fused(fused(-rough, scale, one), rough, rough)
        # rounded down: no part is negative, and the sign of zero is that of x
        down = fused(-inverse, scale, one).to(tl.int32, bitcast=True) >> 31
        inverse = (inverse.to(tl.int32, bitcast=True) + down).to(tl.float32, bitcast=True)
        rest = fused(-inverse, scale, one) * inverse
        # the last bit, where without it a tie fell to the wrong side (three mantissas)
        up = (scale.to(tl.int32, bitcast=True) >> 22) & 1
        rest = (rest.to(tl.int32, bitcast=True) + up).to(tl.float32, bitcast=True)
        quotient = fused(x, tl.broadcast_to(inverse, x.shape), x * rest)
    return quotient


if has_triton():
    # a kernel finds what it calls among its module's globals
    magnitude = triton.jit(_magnitude)
    saturated = triton.jit(_saturated)
    fp8_code = triton.jit(_fp8_code)
    code_apart = triton.jit(_code_apart)
    narrowed = triton.jit(_narrowed)
    # the interpreter's own rounds twice (Triton 3.9)
    fused = triton.jit(_fused_in_interpreter if triton.knobs.runtime.interpret else _fused)
    scale_of = triton.jit(_scale_of)
    inverse_of_power = triton.jit(_inverse_of_power)
    rough_inverse = triton.jit(_inverse_in_interpreter if triton.knobs.runtime.interpret else _rough_inverse)
    divided = triton.jit(_divided)


def device_of(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which Triton launches where `x` lies."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call, no-any-return]


def has_native_fp8(x: Tensor) -> bool:
    """Return True if the device of `x` converts to FP8 by instructions that round as torch does."""
    return x.is_cuda and torch.version.hip is None and _capability(x.device) >= (8, 9)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
