"""`eff_kernels.masks` in Triton: groups ranked in registers, bits packed and unpacked, one pass each."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

_GROUPS, _BYTES, _WARPS = 1024, 2048, 4


def _widened(x: tl.tensor) -> tl.tensor:
    # float64 keeps its order only as it is
    return x if x.dtype == tl.float64 else x.to(tl.float32)


def _rank_fours(
    scores: tl.tensor, mask: tl.tensor, has_nan: tl.tensor, size: tl.tensor, n: tl.constexpr, block: tl.constexpr
) -> None:
    places = tl.program_id(0).to(tl.int64) * (4 * block) + tl.arange(0, 4 * block)
    x = widened(tl.load(scores + places, mask=places < size, other=0.0))
    if tl.max((x != x).to(tl.int32), 0) > 0:
        tl.store(has_nan, 1)
    even, odd = tl.split(tl.reshape(x, (block, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    ab, ac, ad = (a >= b).to(tl.int32), (a >= c).to(tl.int32), (a >= d).to(tl.int32)
    bc, bd, cd = (b >= c).to(tl.int32), (b >= d).to(tl.int32), (c >= d).to(tl.int32)
    # how many of the other three come before each
    even = tl.join(3 - ab - ac - ad < n, ac + bc + 1 - cd < n)
    odd = tl.join(ab + 2 - bc - bd < n, ad + bd + cd < n)
    kept = tl.reshape(tl.join(even, odd), (4 * block,))
    tl.store(mask + places, kept.to(tl.uint8), mask=places < size)


def _rank_groups(
    scores: tl.tensor,
    mask: tl.tensor,
    has_nan: tl.tensor,
    groups: tl.tensor,
    inner: tl.tensor,
    n: tl.constexpr,
    m: tl.constexpr,
    block: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = group < groups
    first = group // inner * m * inner + group % inner
    nan = tl.zeros((block,), tl.int32)
    kept = tl.zeros((block,), tl.int32)  # bits: a store between the loads would make the compiler repeat them
    for i in tl.static_range(m):
        x = widened(tl.load(scores + first + i * inner, mask=inside, other=0.0))
        before = tl.zeros((block,), tl.int32)
        for j in tl.static_range(m):
            y = widened(tl.load(scores + first + j * inner, mask=inside, other=0.0))
            if j < i:
                before += (y >= x).to(tl.int32)
            if j > i:
                before += (y > x).to(tl.int32)
        nan = tl.maximum(nan, (x != x).to(tl.int32))
        kept |= (before < n).to(tl.int32) << i
    for i in tl.static_range(m):
        tl.store(mask + first + i * inner, ((kept >> i) & 1).to(tl.uint8), mask=inside)
    if tl.max(nan, 0) > 0:
        tl.store(has_nan, 1)


def _pack(mask: tl.tensor, packed: tl.tensor, size: tl.tensor, block: tl.constexpr) -> None:
    byte = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    bit = tl.arange(0, 8)
    places = byte[:, None] * 8 + bit[None, :]
    bits = tl.load(mask + places, mask=places < size, other=0).to(tl.int32)
    tl.store(packed + byte, tl.sum(bits << (7 - bit)[None, :], 1).to(tl.uint8), mask=byte * 8 < size)


def _unpack(packed: tl.tensor, mask: tl.tensor, size: tl.tensor, block: tl.constexpr) -> None:
    byte = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    bit = tl.arange(0, 8)
    places = byte[:, None] * 8 + bit[None, :]
    value = tl.load(packed + byte, mask=byte * 8 < size, other=0).to(tl.int32)
    tl.store(mask + places, ((value[:, None] >> (7 - bit)[None, :]) & 1).to(tl.uint8), mask=places < size)


if importlib.util.find_spec("triton") is not None:
    widened = triton.jit(_widened)
    rank_fours = triton.jit(_rank_fours)
    rank_groups = triton.jit(_rank_groups)
    pack = triton.jit(_pack)
    unpack = triton.jit(_unpack)


def rank_groups_triton(scores: Tensor, n: int, m: int, inner: int, block: int = _GROUPS) -> tuple[Tensor, Tensor]:
    """Return which scores are among the `n` largest of their groups, and whether one was NaN, bool ``[1]``.

    Args:
        scores: Contiguous, float16, bfloat16, float32 or float64.
        n: How many of each group stay.
        m: Size of a group.
        inner: How many elements lie from one of a group to its next.
        block: Groups at a time, a power of two.
    """
    mask = torch.empty_like(scores, dtype=torch.uint8)
    has_nan = torch.zeros(1, dtype=torch.uint8, device=scores.device)
    # the groups of a thread stay in registers
    block = max(1, block * 8 // max(8, triton.next_power_of_2(m)))
    grid = (triton.cdiv(scores.numel(), m * block),)
    if not scores.numel():
        pass
    elif m == 4 and inner == 1:
        rank_fours[grid](scores, mask, has_nan, scores.numel(), n=n, block=block, num_warps=_WARPS)
    else:
        groups = scores.numel() // m
        rank_groups[grid](scores, mask, has_nan, groups, inner, n=n, m=m, block=block, num_warps=_WARPS)
    return mask.view(torch.bool), has_nan.view(torch.bool)


def pack_bits_triton(mask: Tensor, block: int = _BYTES) -> Tensor:
    """Return `eff_kernels.masks.pack_bits` of a contiguous mask.

    Args:
        mask: bool.
        block: Bytes of a program, a power of two.
    """
    packed = torch.empty((mask.numel() + 7) // 8, dtype=torch.uint8, device=mask.device)
    if mask.numel():
        grid = (triton.cdiv(len(packed), block),)
        pack[grid](mask.view(torch.uint8), packed, mask.numel(), block=block, num_warps=_WARPS)
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
        unpack[(triton.cdiv(size, 8 * block),)](packed, mask, size, block=block, num_warps=_WARPS)
    return mask.view(torch.bool)
