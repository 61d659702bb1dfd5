"""`eff_kernels.pruning` in Triton: masks on all weights in one launch, and the digits of scores counted on the GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from eff_kernels._triton.launch import remembering, tensor_tables

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from eff_kernels._triton.launch import pointer, row_of_program

_CHUNK, _WARPS = 1 << 14, 8
_BLOCK, _TILES = 4096, 8
# A histogram of so many bins is a program's own, in shared memory; more are counted in global memory.
_PRIVATE_BITS = 8


def _apply_masks(
    table: tl.tensor,
    owners: tl.tensor,
    like: tl.tensor,
    mask_like: tl.tensor,
    aligned: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, start, size, _ = row_of_program(table, owners, 2, chunk, aligned)
    values = pointer(row, 0, like, aligned)
    masks = pointer(row, 1, mask_like, aligned)
    for i in range(chunk // block):
        places = start + i * block + tl.arange(0, block)
        inside = places < size
        kept = tl.load(masks + places, mask=inside, other=0)
        # Stores of the zeros alone would be no faster: memory writes a sector whole, and of 8 weights one is pruned.
        bits = tl.load(values + places, mask=inside, other=0)
        tl.store(values + places, tl.where(kept != 0, bits, 0), mask=inside)


def _ordered(x: tl.tensor) -> tl.tensor:
    """Return a key of 32 bits in the order of the floats, from 0."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)  # -0.0 equals +0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648


def _count_digits(
    values: tl.tensor,
    counts: tl.tensor,
    prefix: tl.tensor,
    size: tl.tensor,
    left_out: tl.tensor,
    shift: tl.constexpr,
    bits: tl.constexpr,
    private: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * chunk
    wanted = tl.load(prefix).to(tl.int32)
    first: tl.constexpr = shift + bits >= 32
    found = tl.zeros((1 << bits if private else 1,), tl.int32)
    for i in range(chunk // block):
        places = start + i * block + tl.arange(0, block)
        # `left_out` is one place that does not take part: its score is asked about among the others.
        inside = (places < size) & (places != left_out)
        key = ordered(tl.load(values + places, mask=places < size, other=0.0))
        # Only keys that begin with the digits found so far; the mask takes off what an arithmetic shift fills in.
        if not first:
            inside &= ((key >> (shift + bits)) & ((1 << (32 - shift - bits)) - 1)) == wanted
        digit = (key >> shift) & ((1 << bits) - 1)
        if private:
            # Without a condition two instructions a key; below is taken off what does not take part.
            found += tl.histogram(digit, 1 << bits) if first else tl.histogram(digit, 1 << bits, mask=inside)
        else:
            # 65,536 bins do not fit a program. Few keys share 16 bits by then, so that atomics rarely collide.
            tl.atomic_add(counts + digit, tl.full((block,), 1, tl.int64), mask=inside, sem="relaxed")
    if private:
        column = tl.arange(0, 1 << bits)
        if first:
            mine = (left_out >= start) & (left_out < tl.minimum(start + chunk, size))
            key = ordered(tl.load(values + left_out, mask=mine, other=0.0))
            found -= tl.where(column == (key >> shift) & ((1 << bits) - 1), mine.to(tl.int32), 0)
            # the digit of 0.0
            behind = tl.maximum(start + chunk - size, 0).to(tl.int32)
            found -= tl.where(column == 1 << (bits - 1), behind, 0)
        tl.atomic_add(counts + column, found.to(tl.int64), mask=found > 0, sem="relaxed")


if importlib.util.find_spec("triton") is not None:
    apply_masks = remembering(triton.jit(_apply_masks))
    ordered = triton.jit(_ordered)
    count_digits = remembering(triton.jit(_count_digits))


def vector_block(dtype: torch.dtype, chunk: int, warps: int) -> int:
    """Return how many elements make one vector of 16 bytes a thread, so that neighbours read whole sectors."""
    return min(chunk, 32 * warps * 16 // dtype.itemsize)


def apply_mask_triton_(bits: Sequence[Tensor], masks: Sequence[Tensor], chunk: int = _CHUNK) -> None:
    """Set every element whose mask is 0 to 0, in place.

    Args:
        bits: Integers of any sizes, dense.
        masks: bool with the same strides.
        chunk: Elements of a program, a power of two.
    """
    for part in tensor_tables(chunk, bits, [mask.view(torch.uint8) for mask in masks]):
        apply_masks[(len(part.owners),)](
            part.table,
            part.owners,
            *part.like,
            aligned=part.is_aligned,
            chunk=chunk,
            block=vector_block(part.like[0].dtype, chunk, _WARPS),
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )


def count_digits_triton_(
    counts: Tensor,
    values: Tensor,
    prefix: Tensor,
    left_out: int,
    shift: int,
    block: int = _BLOCK,
    tiles: int = _TILES,
) -> None:
    """Add how often each digit occurs to `counts`, see `eff_kernels.pruning.count_digits_`."""
    bits = len(counts).bit_length() - 1
    chunk = tiles * block
    if values.numel():
        count_digits[(triton.cdiv(values.numel(), chunk),)](
            values,
            counts,
            prefix,
            values.numel(),
            left_out,
            shift=shift,
            bits=bits,
            private=bits <= _PRIVATE_BITS,
            chunk=chunk,
            block=block,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )
