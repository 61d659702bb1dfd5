"""Rounding in Triton to narrow floats (to nearest, toward zero or stochastically) and to MX and NVFP4 blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eff_kernels._triton.encoding import device_of, has_native_fp8
from eff_kernels._triton.fp8 import measure_amax
from eff_kernels._triton.launch import cdiv, grid_of_tiles, has_triton, next_power_of_2, remembering

if has_triton():
    import triton
    import triton.language as tl

    from eff_kernels._triton.encoding import fp8_code, fused, magnitude, narrowed

_BLOCK, _WARPS = 2048, 4
_FP8 = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


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


def _raised(a: tl.tensor, low: tl.tensor, is_small: tl.tensor, smallest: tl.constexpr) -> tl.tensor:
    """Return a + low·2^-32 ulp + (smallest where a is small), each sum cut off; ulp is float32's at `smallest`."""
    code: tl.constexpr = "{.reg .f32 l; cvt.rz.f32.u32 l, $2; fma.rz.f32 l, l, $4, $1; fma.rz.f32 $0, $3, $5, l;}"
    unit, offset = tl.full(a.shape, smallest * 2.0**-55, tl.float32), tl.full(a.shape, smallest, tl.float32)
    operands = [a, low, is_small, unit, offset]
    return tl.inline_asm_elementwise(code, "=f,f,r,f,f,f", operands, tl.float32, is_pure=True, pack=1)


def _raised_in_interpreter(a: tl.tensor, low: tl.tensor, is_small: tl.tensor, smallest: tl.constexpr) -> tl.tensor:
    # float64 has 29 bits more, which are cut off
    total = a.to(tl.float64) + ((low >> 8) << 8).to(tl.float64) * (smallest * 2.0**-55)
    bits = (total + is_small.to(tl.float64) * smallest).to(tl.int64, bitcast=True)
    return ((bits >> 29) << 29).to(tl.float64, bitcast=True).to(tl.float32)


def _words(seed: tl.tensor, at: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return random words for eight elements, (n, 2, 2, 2): higher bits and lower ones."""
    # Four words of Philox serve them: the halves of each are the higher bits of two, and all of it the lower bits of
    # their neighbors, so that in one draw of 2^16 two elements know of each other. Seven rounds are enough: Salmon et
    # al. 2011, table 2.
    a, b = at.to(tl.uint32), tl.zeros_like(at).to(tl.uint32)
    c, d = b, b
    key, other = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        # one product each for the higher and the lower half
        p, q = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b, c, d = (
            (q >> 32).to(tl.uint32) ^ b ^ key, q.to(tl.uint32), (p >> 32).to(tl.uint32) ^ d ^ other, p.to(tl.uint32)
        )  # fmt: skip
        key, other = key + 0x9E3779B9, other + 0xBB67AE85
    high, low = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(b, a), tl.join(d, c))
    return tl.join(high, (high << 16) | (high >> 16)), tl.join(low, low)


def _stepped(
    a: tl.tensor, high: tl.tensor, low: tl.tensor, random: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr
) -> tl.tensor:
    """Return a magnitude rounded down, or up where random bits are below the fraction that is lost; NaN stays NaN."""
    # These bits are the complements of the first ones of `high`, as many as a normal number loses, and of the first 24
    # of `low`, which do not count where all numbers lose the same bits.
    shift: tl.constexpr = 23 - mantissa
    smallest: tl.constexpr = 2.0 ** (1 - bias)
    bits = a.to(tl.int32, bitcast=True)
    if bias < 127:
        # Subnormal numbers of the format, with its smallest normal one added, lose the same bits as normal ones do, and
        # what lies below float32's last bit: there too a complement carries. In a normal number nothing lies there, and
        # what is added is cut off.
        is_small = tl.where(a < smallest, 1.0, 0.0)
        bits = raised(a, low, is_small, smallest).to(tl.int32, bitcast=True)
    # so much below the largest integer that what is added makes no other number of NaN
    bits = tl.minimum(bits, 0x7FC00000)
    if random:
        # the complement below the fraction: their sum carries, into the exponent too
        bits += (high >> (32 - shift)).to(tl.int32)
    y = ((bits >> shift) << shift).to(tl.float32, bitcast=True)
    if bias < 127:
        y = fused(is_small, tl.full(a.shape, -smallest, tl.float32), y)
    return y


def _rounded(
    x: tl.tensor,
    out: tl.tensor,
    seed: tl.tensor,
    noise: tl.tensor,
    count: tl.tensor,
    largest: tl.tensor,
    beyond: tl.tensor,
    infinite: tl.tensor,
    overflow: tl.constexpr,
    patched: tl.constexpr,
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
    a = magnitude(value).to(tl.float32, bitcast=True)
    high = tl.zeros((block,), tl.uint32)
    low = high
    if noisy:
        random = tl.load(noise + at, mask=inside, other=0)
        high, low = (~(random >> 30)).to(tl.uint32), (~(random >> (7 + mantissa))).to(tl.uint32)
    elif rounding == "stochastic":
        # sixteen elements of a thread, one after another
        fours = tl.program_id(0) * (block // 8) + 2 * tl.arange(0, block // 16)
        high, low = words(tl.load(seed), fours)
        next_high, next_low = words(tl.load(seed), fours + 1)
        high = tl.reshape(tl.join(high, next_high), (block,))
        low = tl.reshape(tl.join(low, next_low), (block,))
    if rounding != "nearest_even":
        y = stepped(a, high, low, rounding == "stochastic", mantissa, bias)
        if bias == 127:
            y = tl.where(value != value, value, y)
    elif overflow == "code" and code == mantissa:
        y = a  # rounded when it becomes a code
    else:
        y = tl.abs(nearest(value, mantissa, bias))
    # Only the magnitude so far: what exceeds the format becomes its largest value or infinity, as the caller says.
    if overflow == "largest":
        y = tl.minimum(y, largest, tl.PropagateNan.ALL)
    elif overflow == "beyond":
        y = tl.where(y > largest, beyond, y)
    if patched:
        y = tl.where(a == float("inf"), infinite, y)
    bits = y.to(tl.int32, bitcast=True) | (value.to(tl.int32, bitcast=True) & -0x80000000)
    y = bits.to(tl.float32, bitcast=True)
    if code == 0:
        tl.store(out + at, narrowed(y, out.dtype.element_ty, native), mask=inside)
    else:
        bits = fp8_code(y, code, native)
        if code == 2:
            # codes saturate, values need not
            end = a if overflow == "code" else tl.abs(y)
            bits = tl.where(end == float("inf"), (bits & 0x80) | 0x7C, bits).to(tl.uint8)
        tl.store(out + at, bits, mask=inside)


if has_triton():
    # the interpreter knows no assembler
    raised = triton.jit(_raised_in_interpreter if triton.knobs.runtime.interpret else _raised)
    nearest = triton.jit(_nearest)
    words = triton.jit(_words)
    stepped = triton.jit(_stepped)
    rounded = remembering(triton.jit(_rounded))


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
    overflow = "largest" if beyond == largest else "beyond"
    if code:
        if beyond == largest >= torch.finfo(out.dtype).max and (
            infinite == math.inf or (infinite == largest and code == 3)
        ):
            overflow = "code"
        out = out.view(torch.uint8)
    if x.numel():
        with device_of(x):
            rounded[(cdiv(x.numel(), _BLOCK),)](
                x, out, x if seed is None else seed, x if noise is None else noise.contiguous(), x.numel(), largest,
                beyond, infinite, overflow=overflow, patched=overflow != "code" and infinite != beyond,
                rounding=rounding, noisy=noise is not None, mantissa=mantissa, bias=bias, code=code,
                native=has_native_fp8(x), block=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
            )  # fmt: skip


if has_triton():
    import triton
    import triton.language as tl

    from eff_kernels._triton.encoding import inverse_of_power, magnitude, narrowed, saturated

# mantissa bits, bias, largest value and its exponent
_ELEMENTS = {"fp4_e2m1": (1, 1, 6.0, 2), "fp8_e4m3": (3, 7, 448.0, 8), "fp8_e5m2": (2, 15, 57344.0, 15)}
_TILE, _WIDEST, _WARPS = 4096, 512, 4


def _mx_values(
    x: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    group: tl.constexpr,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    largest: tl.constexpr,
    emax: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    column = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    j = column * width + tl.arange(0, width)[None, :]
    at, inside = i.to(tl.int64) * columns + j, (i < rows) & (j < columns)
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # (height, blocks, group): the maximum of a block is a reduction of the last dim, in registers.
    blocks = tl.reshape(tile, (height, width // group, group))
    amax = tl.max(magnitude(blocks), 2, keep_dims=True)
    # Shared exponent ⌊log2 amax⌋ - emax (OCP MX 1.0); a subnormal amax counts as 2^-126.
    exponent = tl.minimum(tl.maximum(tl.maximum(amax >> 23, 1) - 127 - emax, -126), 127)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(amax >= 0x7F800000, float("nan"), scale)
    # products with a power of two are exact: no other rounding
    values = saturated(blocks * inverse_of_power(scale), mantissa, bias, largest) * scale
    tl.store(y + at, narrowed(tl.reshape(values, (height, width)), y.dtype.element_ty, native), mask=inside)


def _nvfp4_values(
    x: tl.tensor,
    y: tl.tensor,
    given: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    of_amax: tl.constexpr,
    binary: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    tensor_scale = tl.load(given + tl.zeros((1, 1, 1), tl.int32))
    if of_amax:
        # amax / (448 · 6): the block scales, e4m3, then end at 448 and the elements, e2m1, at 6.
        tensor_scale = tl.div_rn(tensor_scale, tl.full((1, 1, 1), 2688.0, tl.float32))
    finite = magnitude(tensor_scale) < 0x7F800000
    tensor_scale = tl.maximum(tensor_scale, 2.0**-121)
    if of_amax and binary:
        # a mantissa carries into the exponent, and is gone
        bits = (tensor_scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        tensor_scale = bits.to(tl.float32, bitcast=True)
    tensor_scale = tl.where(finite, tensor_scale, float("nan"))
    column = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    j = column * width + tl.arange(0, width)[None, :]
    at, inside = i.to(tl.int64) * columns + j, (i < rows) & (j < columns)
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    blocks = tl.reshape(tile, (height, width // 16, 16))
    bits = tl.max(magnitude(blocks), 2, keep_dims=True)
    amax = tl.where(bits < 0x7F800000, bits.to(tl.float32, bitcast=True), float("nan"))
    # the roundings of `nvfp4_round_to`: two divisions, a reciprocal of two, products
    relative = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    relative = tl.div_rn(relative, tl.zeros_like(amax) + tensor_scale)
    # 2^-6 is e4m3's smallest normal number: smaller scales would have fewer bits.
    scale = saturated(tl.where(relative < 2.0**-6, 2.0**-6, relative), 3, 7, 448.0)
    inverse = tl.div_rn(tl.full(tensor_scale.shape, 1.0, tl.float32), tensor_scale)
    inverse = tl.div_rn(tl.zeros_like(scale) + inverse, scale)
    values = saturated(blocks * inverse, 1, 1, 6.0) * (tensor_scale * scale)
    tl.store(y + at, narrowed(tl.reshape(values, (height, width)), y.dtype.element_ty, native), mask=inside)


if has_triton():
    mx_values = remembering(triton.jit(_mx_values))
    nvfp4_values = remembering(triton.jit(_nvfp4_values))


def mx_round_triton(x: Tensor, element: str, group_size: int) -> Tensor:
    """Return what `eff_kernels.rounding.mx_round` does; the arguments are the same."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, columns, height, width, grid = _tiles(x, group_size)
    mantissa, bias, largest, emax = _ELEMENTS[element]
    with device_of(x):
        mx_values[grid](
            x, y, rows, columns, group=group_size, mantissa=mantissa, bias=bias, largest=largest, emax=emax,
            native=has_native_fp8(x), height=height, width=width, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def nvfp4_round_triton(x: Tensor, per_tensor_scale: Tensor | None, dtype: torch.dtype, binary: bool = False) -> Tensor:
    """Return what `eff_kernels.rounding.nvfp4_round` does; the arguments are the same."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    rows, columns, height, width, grid = _tiles(x, 16)
    given = measure_amax(x.view(rows, columns)) if per_tensor_scale is None else per_tensor_scale.float()
    with device_of(x):
        nvfp4_values[grid](
            x, y, given, rows, columns, of_amax=per_tensor_scale is None, binary=binary, native=has_native_fp8(x),
            height=height, width=width, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def _tiles(x: Tensor, group_size: int) -> tuple[int, int, int, int, tuple[int, int, int]]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    width = max(group_size, min(_WIDEST, next_power_of_2(columns)))
    height = max(1, min(next_power_of_2(rows), _TILE // width))
    return rows, columns, height, width, grid_of_tiles(cdiv(rows, height), cdiv(columns, width))
