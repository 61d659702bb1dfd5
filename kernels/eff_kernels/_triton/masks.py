"""`eff_kernels.masks` in Triton: groups ranked in registers, bits packed and unpacked, one pass each."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eff_kernels._triton.launch import cdiv, next_power_of_2, remembering

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

_GROUPS, _BYTES, _WARPS = 1024, 2048, 4
_WORD_TILES, _WORD_WARPS = 4, 8


def _widened(x: tl.tensor, magnitudes: tl.constexpr) -> tl.tensor:
    """Return scores that compare as these do: magnitudes of up to 32 bits as theirs without the sign, uint32."""
    bits: tl.constexpr = x.dtype.primitive_bitwidth
    if magnitudes and bits == 16:
        y = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 17
    elif magnitudes and bits == 32:
        y = x.to(tl.uint32, bitcast=True) << 1
    elif magnitudes:
        y = tl.abs(x)
    else:
        # float64 keeps its order only as it is
        y = x if bits == 64 else x.to(tl.float32)
    return y


def _nan_marks(y: tl.tensor) -> tl.tensor:
    """Return of widened scores uint32 above what infinity has as a magnitude's bits where one was NaN."""
    return (y != y).to(tl.uint32) * 0xFFFFFFFF if y.dtype.is_floating() else y


def _has_nan(marks: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    infinity: tl.constexpr = 0xF8000000 if dtype == tl.float16 else 0xFF000000
    return tl.max(marks, 0) > infinity


def _of_four(x: tl.tensor) -> tuple[tl.tensor, ...]:
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


def _of_eight(x: tl.tensor) -> tuple[tl.tensor, ...]:
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    a, c, e, g = of_four(even)
    b, d, f, h = of_four(odd)
    return a, b, c, d, e, f, g, h


def _ranked(a: tl.tuple) -> tl.tensor:
    """Return for four scores how many of them come before each, in four bits each."""
    ranks = tl.zeros(a[0].shape, tl.int32)
    for i in tl.static_range(4):
        for j in tl.static_range(i + 1, 4):
            ranks += tl.where(a[i] >= a[j], 1 << (4 * j), 1 << (4 * i))
    return ranks


def _against(a: tl.tuple, b: tl.tuple) -> tl.tensor:
    """Return how many of four later scores come before each of four, and in the higher bits the reverse."""
    ranks = tl.zeros(a[0].shape, tl.int32)
    for i in tl.static_range(4):
        for j in tl.static_range(4):
            ranks += tl.where(a[i] >= b[j], 1 << (16 + 4 * j), 1 << (4 * i))
    return ranks


def _ordered(x: tl.tensor, place: tl.constexpr) -> tl.tensor:
    """Return different integers in the order of scores of 16 bits, an earlier one first among equals."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals +0.0
    # such a score leaves at least 13 bits of its float32 at 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFF0)) | (15 - place)


def _sorted_eight(a: tl.tuple) -> tl.tuple:
    """Return eight integers in order by 19 exchanges, the fewest there are (Knuth, volume 3, 5.3.4)."""
    a0, a1, a2, a3, a4, a5, a6, a7 = a
    a0, a2, a1, a3 = tl.minimum(a0, a2), tl.maximum(a0, a2), tl.minimum(a1, a3), tl.maximum(a1, a3)
    a4, a6, a5, a7 = tl.minimum(a4, a6), tl.maximum(a4, a6), tl.minimum(a5, a7), tl.maximum(a5, a7)
    a0, a4, a1, a5 = tl.minimum(a0, a4), tl.maximum(a0, a4), tl.minimum(a1, a5), tl.maximum(a1, a5)
    a2, a6, a3, a7 = tl.minimum(a2, a6), tl.maximum(a2, a6), tl.minimum(a3, a7), tl.maximum(a3, a7)
    a0, a1, a2, a3 = tl.minimum(a0, a1), tl.maximum(a0, a1), tl.minimum(a2, a3), tl.maximum(a2, a3)
    a4, a5, a6, a7 = tl.minimum(a4, a5), tl.maximum(a4, a5), tl.minimum(a6, a7), tl.maximum(a6, a7)
    a2, a4, a3, a5 = tl.minimum(a2, a4), tl.maximum(a2, a4), tl.minimum(a3, a5), tl.maximum(a3, a5)
    a1, a4, a3, a6 = tl.minimum(a1, a4), tl.maximum(a1, a4), tl.minimum(a3, a6), tl.maximum(a3, a6)
    a1, a2, a3, a4 = tl.minimum(a1, a2), tl.maximum(a1, a2), tl.minimum(a3, a4), tl.maximum(a3, a4)
    a5, a6 = tl.minimum(a5, a6), tl.maximum(a5, a6)
    return a0, a1, a2, a3, a4, a5, a6, a7


def _larger_half(x: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Return which of sixteen scores of 16 bits are the eight largest, ``(block, 16)``."""
    place = tl.arange(0, 16)[None, :]
    scores = tl.reshape(x, (block, 16))
    keys = ordered(scores, place) if x.dtype.is_floating() else scores | (15 - place).to(tl.uint32)
    even, odd = tl.split(tl.reshape(keys, (8 * block, 2)))
    p, q = sorted_eight(of_eight(even)), sorted_eight(of_eight(odd))
    # The larger of the i-th smallest on one side and the i-th largest on the other: the larger half of all.
    least = tl.maximum(p[0], q[7])
    for i in tl.static_range(1, 8):
        least = tl.minimum(least, tl.maximum(p[i], q[7 - i]))
    return keys >= least[:, None]


def _rank_vectors(
    scores: tl.tensor,
    mask: tl.tensor,
    has_nan: tl.tensor,
    size: tl.tensor,
    n: tl.constexpr,
    m: tl.constexpr,
    magnitudes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * (m * block) + tl.arange(0, m * block)
    x = widened(tl.load(scores + places, mask=places < size, other=0.0), magnitudes)
    if has_nan_in(nan_marks(x), scores.dtype.element_ty):
        tl.store(has_nan, 1)
    if m == 16 and n == 8 and scores.dtype.element_ty.primitive_bitwidth == 16:
        kept = larger_half(x, block)
        tl.store(mask + places, tl.reshape(kept, (m * block,)).to(tl.uint8), mask=places < size)
        return
    if m == 4:
        ranks = tl.reshape(ranked(of_four(x)), (block, 1, 1))
    elif m == 8:
        a, b, c, d, e, f, g, h = of_eight(x)
        p, q = (a, b, c, d), (e, f, g, h)
        ranks = tl.reshape(ranked(p) + (ranked(q) << 16) + against(p, q), (block, 1, 1))
    else:
        even, odd = tl.split(tl.reshape(x, (8 * block, 2)))
        a0, a2, b0, b2, c0, c2, d0, d2 = of_eight(even)
        a1, a3, b1, b3, c1, c3, d1, d3 = of_eight(odd)
        p, q, r, s = (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3)
        pr, ps, qr, qs = against(p, r), against(p, s), against(q, r), against(q, s)
        low = ranked(p) + (ranked(q) << 16) + against(p, q) + (pr & 0xFFFF) + (ps & 0xFFFF) + ((qr + qs) << 16)
        high = ranked(r) + (ranked(s) << 16) + against(r, s) + ((pr >> 16) & 0xFFFF) + ((qr >> 16) & 0xFFFF)
        ranks = tl.reshape(tl.join(low, high + (ps & -65536) + (qs & -65536)), (block, 2, 1))
    nibble = 4 * tl.arange(0, m if m < 8 else 8)[None, None, :]
    kept = ((ranks >> nibble) & 15) < n
    tl.store(mask + places, tl.reshape(kept, (m * block,)).to(tl.uint8), mask=places < size)


def _rank_groups(
    scores: tl.tensor,
    mask: tl.tensor,
    has_nan: tl.tensor,
    groups: tl.tensor,
    inner: tl.tensor,
    n: tl.constexpr,
    m: tl.constexpr,
    magnitudes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = group < groups
    # m neighbors along an axis lie `inner` elements apart: the product of the dims behind it.
    first = group // inner * m * inner + group % inner
    nan = tl.zeros((block,), tl.uint32)
    kept = tl.zeros((block,), tl.int32)  # bits: a store between the loads would make the compiler repeat them
    for i in tl.static_range(m):
        x = widened(tl.load(scores + first + i * inner, mask=inside, other=0.0), magnitudes)
        earlier = tl.zeros((block,), tl.int32)
        for j in tl.static_range(m):
            y = widened(tl.load(scores + first + j * inner, mask=inside, other=0.0), magnitudes)
            # Ties: an equal earlier score comes before, an equal later one does not.
            if j < i:
                earlier += (y >= x).to(tl.int32)
            if j > i:
                earlier += (y > x).to(tl.int32)
        nan = tl.maximum(nan, nan_marks(x))
        kept |= (earlier < n).to(tl.int32) << i
    for i in tl.static_range(m):
        tl.store(mask + first + i * inner, ((kept >> i) & 1).to(tl.uint8), mask=inside)
    if has_nan_in(nan, scores.dtype.element_ty):
        tl.store(has_nan, 1)


def _pack(mask: tl.tensor, packed: tl.tensor, size: tl.tensor, block: tl.constexpr) -> None:
    byte = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    bit = tl.arange(0, 8)
    places = byte[:, None] * 8 + bit[None, :]
    bits = tl.load(mask + places, mask=places < size, other=0).to(tl.int32)
    # Bits do not overlap, so their sum is their union; the first element is the highest bit, as numpy.packbits has
    # it.
    tl.store(packed + byte, tl.sum(bits << (7 - bit)[None, :], 1).to(tl.uint8), mask=byte * 8 < size)


def _pack_words(
    mask: tl.tensor,
    words: tl.tensor,
    packed: tl.tensor,
    size: tl.tensor,
    tiles: tl.constexpr,
    block: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * (tiles * block)
    last = size // 8
    for i in tl.static_range(tiles):
        byte = start + i * block + tl.arange(0, block)
        # Eight elements at a time: the product moves each to its bit of the highest byte, and no two meet elsewhere.
        eight = tl.load(words + byte, mask=byte < last, other=0).to(tl.uint64, bitcast=True)
        tl.store(packed + byte, ((eight * 0x8040201008040201) >> 56).to(tl.uint8), mask=byte < last)
    if (size % 8 > 0) & (last // (tiles * block) == tl.program_id(0)):
        bit = tl.arange(0, 8)
        bits = tl.load(mask + last * 8 + bit, mask=bit < size % 8, other=0).to(tl.int32)
        tl.store(packed + last, tl.sum(bits << (7 - bit), 0).to(tl.uint8))


def _unpack(packed: tl.tensor, mask: tl.tensor, size: tl.tensor, block: tl.constexpr) -> None:
    byte = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    bit = tl.arange(0, 8)
    places = byte[:, None] * 8 + bit[None, :]
    value = tl.load(packed + byte, mask=byte * 8 < size, other=0).to(tl.int32)
    tl.store(mask + places, ((value[:, None] >> (7 - bit)[None, :]) & 1).to(tl.uint8), mask=places < size)


if importlib.util.find_spec("triton") is not None:
    widened = triton.jit(_widened)
    nan_marks = triton.jit(_nan_marks)
    has_nan_in = triton.jit(_has_nan)
    of_four = triton.jit(_of_four)
    of_eight = triton.jit(_of_eight)
    ranked = triton.jit(_ranked)
    against = triton.jit(_against)
    ordered = triton.jit(_ordered)
    sorted_eight = triton.jit(_sorted_eight)
    larger_half = triton.jit(_larger_half)
    rank_vectors = remembering(triton.jit(_rank_vectors))
    rank_groups = remembering(triton.jit(_rank_groups))
    pack = remembering(triton.jit(_pack))
    pack_words = remembering(triton.jit(_pack_words))
    unpack = remembering(triton.jit(_unpack))


def rank_groups_triton(
    scores: Tensor, n: int, m: int, inner: int, magnitudes: bool = False, block: int = _GROUPS
) -> tuple[Tensor, Tensor]:
    """Return which scores are among the `n` largest of their groups, and whether one was NaN, bool ``[1]``.

    Args:
        scores: Contiguous, float16, bfloat16, float32 or float64.
        n: How many of each group stay.
        m: Size of a group.
        inner: How many elements lie from one of a group to its next.
        magnitudes: Whether scores count without their sign.
        block: Groups at a time, a power of two.
    """
    mask = torch.empty_like(scores, dtype=torch.uint8)
    has_nan = torch.zeros(1, dtype=torch.uint8, device=scores.device)
    # the groups of a thread stay in registers
    block = max(1, block * 8 // max(8, next_power_of_2(m)))
    grid = (cdiv(scores.numel(), m * block),)
    options = {"n": n, "m": m, "magnitudes": magnitudes, "block": block, "num_warps": _WARPS, "enable_fp_fusion": True}
    if not scores.numel():
        pass
    elif m in (4, 8, 16) and inner == 1:
        rank_vectors[grid](scores, mask, has_nan, scores.numel(), **options)
    else:
        rank_groups[grid](scores, mask, has_nan, scores.numel() // m, inner, **options)
    return mask.view(torch.bool), has_nan.view(torch.bool)


def pack_bits_triton(mask: Tensor, block: int = _BYTES, tiles: int = _WORD_TILES, warps: int = _WORD_WARPS) -> Tensor:
    """Return `eff_kernels.masks.pack_bits` of a contiguous mask."""
    size = mask.numel()
    packed = torch.empty((size + 7) // 8, dtype=torch.uint8, device=mask.device)
    flat = mask.view(-1).view(torch.uint8)
    if size >= 8 and flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0:
        words, wide = flat[: size // 8 * 8].view(torch.int64), 64 * warps
        pack_words[(cdiv(len(packed), wide * tiles),)](
            flat, words, packed, size, tiles=tiles, block=wide, num_warps=warps, enable_fp_fusion=True
        )
    elif size:
        pack[(cdiv(len(packed), block),)](flat, packed, size, block=block, num_warps=_WARPS, enable_fp_fusion=True)
    return packed


def unpack_bits_triton(packed: Tensor, shape: Sequence[int], block: int = _BYTES) -> Tensor:
    """Return `eff_kernels.masks.unpack_bits` of contiguous bytes.

    Args:
        packed: uint8.
        shape: Of the mask.
        block: Bytes of a program, a power of two.
    """
    mask = torch.empty(tuple(shape), dtype=torch.uint8, device=packed.device)
    if size := math.prod(shape):
        unpack[(cdiv(size, 8 * block),)](packed, mask, size, block=block, num_warps=_WARPS, enable_fp_fusion=True)
    return mask.view(torch.bool)
