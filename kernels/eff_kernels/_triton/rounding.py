"""Rounding to narrow floats in Triton: to nearest, toward zero, or stochastically, by integers alone."""

from __future__ import annotations

import torch
from torch import Tensor

from eff_kernels._triton.encoding import device_of, has_native_fp8
from eff_kernels._triton.launch import has_triton

if has_triton():
    import triton
    import triton.language as tl

    from eff_kernels._triton.encoding import fp8_code, magnitude, narrowed, nearest

_BLOCK, _WARPS = 2048, 4
_FP8 = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def _stepped(
    x: tl.tensor, high: tl.tensor, low: tl.tensor, random: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr
) -> tl.tensor:
    """Return the magnitude of x rounded down, or up where 62 random bits are below the fraction that is lost.

    They come as the 32 higher ones and the 30 lower ones, which do not count where all numbers lose the same bits.
    """
    shift: tl.constexpr = 23 - mantissa
    a = magnitude(x)
    # The significand with its hidden bit; a subnormal number has none.
    significand = tl.where(a < 0x800000, a, (a & 0x7FFFFF) | 0x800000)
    # How many bits are lost: more where x is below the format's smallest normal number.
    lost = shift + tl.maximum(128 - bias - tl.maximum(a >> 23, 1), 0)
    # what lies below the last bit of a significand, and further zeros
    near = tl.minimum(lost, 24)
    kept = significand >> near
    rest = (significand - (kept << near)).to(tl.uint32)
    up = tl.zeros_like(kept)
    if random and bias == 127:
        up = ((high >> (32 - shift)) < rest).to(tl.int32)
    elif random:
        # The lost part as a fraction of 2^62, so that comparing it with 62 random bits rounds up with that probability.
        # Of numbers far below the last bit the fraction is shifted down further, not cut to 0.
        fraction = (rest.to(tl.int64) << (62 - near).to(tl.int64)) >> tl.minimum(lost - near, 62).to(tl.int64)
        up = (((high.to(tl.int64) << 30) | low.to(tl.int64)) < fraction).to(tl.int32)
    # As in `nearest`: a carry goes into the exponent.
    normal = (((a >> shift) + up) << shift).to(tl.float32, bitcast=True)
    # Below the smallest normal the result is a multiple of the smallest subnormal, 2^(1 - bias - mantissa).
    return tl.where(lost > shift, (kept + up).to(tl.float32) * 2.0 ** (1 - bias - mantissa), normal)


def _rounded(
    x: tl.tensor,
    out: tl.tensor,
    seed: tl.tensor,
    noise: tl.tensor,
    count: tl.tensor,
    largest: tl.tensor,
    beyond: tl.tensor,
    infinite: tl.tensor,
    rounding: tl.constexpr,
    noisy: tl.constexpr,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    code: tl.constexpr,
    native: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if rounding == "nearest_even":
        y = tl.abs(nearest(value, mantissa, bias))
    else:
        high = tl.zeros((block,), tl.uint32)
        low = high
        if rounding == "stochastic":
            if noisy:
                random = tl.load(noise + at, mask=inside, other=0)
                high = (random >> 30).to(tl.uint32)
                low = random.to(tl.uint32) & 0x3FFFFFFF
            else:
                # four words serve four elements: each is the higher bits of one, and the lower ones of its neighbour,
                # which count in one draw of 2^32. Seven rounds are enough: Salmon et al. 2011, table 2.
                fours = tl.program_id(0) * (block // 4) + tl.arange(0, block // 4)
                a, b, c, d = tl.randint4x(tl.load(seed), fours, 7)
                high = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (block,)).to(tl.uint32, bitcast=True)
                low = tl.reshape(tl.join(tl.join(b, d), tl.join(c, a)), (block,)).to(tl.uint32, bitcast=True) >> 2
        y = stepped(value, high, low, rounding == "stochastic", mantissa, bias)
    # Only the magnitude so far: what exceeds the format becomes its largest value or infinity, as the caller says.
    y = tl.where(y > largest, beyond, y)
    y = tl.where(magnitude(value) == 0x7F800000, infinite, y)
    sign = value.to(tl.int32, bitcast=True) ^ magnitude(value)
    y = (magnitude(y) | sign).to(tl.float32, bitcast=True)
    y = tl.where(value != value, value, y)
    if code == 0:
        tl.store(out + at, narrowed(y, out.dtype.element_ty, native), mask=inside)
    else:
        bits = fp8_code(y, code, native)
        if code == 2:
            # codes saturate, values need not
            bits = tl.where(magnitude(y) == 0x7F800000, (bits & 0x80) | 0x7C, bits).to(tl.uint8)
        tl.store(out + at, bits, mask=inside)


if has_triton():
    stepped = triton.jit(_stepped)
    rounded = triton.jit(_rounded)


def round_triton_(
    out: Tensor,
    x: Tensor,
    rounding: str,
    mantissa: int,
    bias: int,
    largest: float,
    beyond: float,
    infinite: float,
    seed: Tensor | None,
    noise: Tensor | None,
) -> None:
    """Do what `eff_kernels.rounding.round_float_` does; the arguments are the same."""
    x = x.contiguous()
    code = _FP8.get(out.dtype, 0)
    if code:
        out = out.view(torch.uint8)
    if x.numel():
        with device_of(x):
            rounded[(triton.cdiv(x.numel(), _BLOCK),)](
                x, out, x if seed is None else seed, x if noise is None else noise.contiguous(), x.numel(), largest,
                beyond, infinite, rounding=rounding, noisy=noise is not None, mantissa=mantissa, bias=bias, code=code,
                native=has_native_fp8(x), block=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
