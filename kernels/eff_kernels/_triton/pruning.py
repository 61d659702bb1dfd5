"""`eff_kernels.pruning` in Triton: masks on all weights in one launch, and the digits of scores counted on the GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from eff_kernels._triton.launch import cdiv, remembering, tensor_tables
from eff_kernels._triton.tallies import FULL

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from eff_kernels._triton.table_rows import pointer, row_of_program
    from eff_kernels._triton.tallies import as_bytes, tally, totals

_CHUNK, _WARPS = 1 << 14, 8
_BLOCK, _TILES = 4096, 8
# A histogram of so many bins is a program's own, in shared memory; more are counted in global memory.
_PRIVATE_BITS = 8
_RANK_WARPS, _RANK_EACH = 8, 8
_SHIFTS = 27, 22, 17, 12, 7, 2, 0
"""Of the digits of five bits by which scores are ranked, the last of two."""


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
    bits = (x.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals +0.0
    return bits ^ ((bits >> 31) | -2147483648)


def _count_digits(
    values: tl.tensor,
    counts: tl.tensor,
    prefix: tl.tensor,
    size: tl.tensor,
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
        inside = places < size
        key = ordered(tl.load(values + places, mask=inside, other=0.0))
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
            # the digit of 0.0
            behind = tl.maximum(start + chunk - size, 0).to(tl.int32)
            found -= tl.where(column == 1 << (bits - 1), behind, 0)
        tl.atomic_add(counts + column, found.to(tl.int64), mask=found > 0, sem="relaxed")


def _chosen(counts: tl.tensor, state: tl.tensor, shift: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the lowest key that begins with the digits found so far, the rank among those that do, and the digit."""
    column = tl.arange(0, 32)
    found = tl.load(counts + column)
    rank = tl.load(state + 1)
    digit = tl.sum((tl.cumsum(found, 0) < rank).to(tl.int32), 0)
    rank -= tl.sum(tl.where(column < digit, found, 0), 0)
    return tl.load(state) + (digit.to(tl.int64) << shift), rank, digit


def _rank_digits(
    table: tl.tensor,
    owners: tl.tensor,
    like: tl.tensor,
    mask_like: tl.tensor,
    bins_like: tl.tensor,
    counts: tl.tensor,
    states: tl.tensor,
    rank: tl.tensor,
    step: tl.tensor,
    shift: tl.tensor,
    before: tl.tensor,
    first: tl.constexpr,
    aligned: tl.constexpr,
    tiles: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    chunk: tl.constexpr = rounds * tiles * block
    row, start, size, _ = row_of_program(table, owners, 3, chunk, aligned)
    values = pointer(row, 0, like, aligned)
    bins = pointer(row, 2, bins_like, True) + start // chunk * 32
    column = tl.arange(0, 32)
    lowest = tl.zeros((), tl.int64)
    alive = True
    if first:
        if tl.program_id(0) == 0:
            tl.store(states, lowest)
            tl.store(states + 1, rank)
    else:
        # Each program chooses the digit by the counts of the launch before; one tells the next launch.
        lowest, rank, digit = chosen(counts + (step - 1) * 32, states + (step - 1) * 2, before)
        if tl.program_id(0) == 0:
            tl.store(states + step * 2, lowest)
            tl.store(states + step * 2 + 1, rank)
        alive = tl.load(bins + digit) > 0
    if alive:
        least = lowest.to(tl.uint32)
        total = tl.zeros((block // lanes, 8), tl.int32)
        for i in range(rounds):
            a = tl.zeros((block,), tl.int32)
            b = tl.zeros((block,), tl.int32)
            c = tl.zeros((block,), tl.int32)
            d = tl.zeros((block,), tl.int32)
            for j in range(tiles):
                places = start + (i * tiles + j) * block + tl.arange(0, block)
                key = ordered(tl.load(values + places, mask=places < size, other=0.0)).to(tl.uint32, bitcast=True)
                # Unsigned, a key that does not begin with the digits found so far lies beyond all bins.
                a, b, c, d = tally((key - least) >> shift.to(tl.uint32), a, b, c, d)
            total += as_bytes(a, b, c, d, lanes)
        found, bin = totals(total)
        # what lies behind the tensor was counted as 0.0
        behind = tl.maximum(start + chunk - size, 0).to(tl.int32)
        zero = (tl.full((), 0x80000000, tl.uint32) - least) >> shift.to(tl.uint32)
        found -= tl.where(bin.to(tl.uint32) == zero, behind, 0)
        tl.store(bins + bin, found.to(tl.int64))
        tl.atomic_add(counts + step * 32 + bin, found.to(tl.int64), mask=found > 0, sem="relaxed")
    else:
        tl.store(bins + column, tl.zeros((32,), tl.int64))


def _rank_ties(
    counts: tl.tensor,
    states: tl.tensor,
    bins: tl.tensor,
    chunks: tl.tensor,
    steps: tl.constexpr,
    block: tl.constexpr,
) -> None:
    lowest, rank, digit = chosen(counts + (steps - 1) * 32, states + (steps - 1) * 2, 0)
    # of the scores that equal the threshold `rank` go, and the first of them stay
    tl.store(states + steps * 2, lowest)
    tl.store(states + steps * 2 + 1, tl.load(counts + (steps - 1) * 32 + digit) - rank)
    seen = tl.zeros((), tl.int64)
    for at in range(0, chunks, block):
        chunk = at + tl.arange(0, block).to(tl.int64)
        ties = tl.load(bins + chunk * 32 + digit, mask=chunk < chunks, other=0)
        tl.store(bins + chunk * 32, seen + tl.cumsum(ties, 0) - ties, mask=chunk < chunks)
        tl.store(bins + chunk * 32 + 1, ties, mask=chunk < chunks)
        seen += tl.sum(ties, 0)


def _keep_largest(
    table: tl.tensor,
    owners: tl.tensor,
    like: tl.tensor,
    mask_like: tl.tensor,
    bins_like: tl.tensor,
    state: tl.tensor,
    kept_and_nan: tl.tensor,
    aligned: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, start, size, index = row_of_program(table, owners, 3, chunk, aligned)
    values = pointer(row, 0, like, aligned)
    mask = pointer(row, 1, mask_like, aligned)
    bins = pointer(row, 2, bins_like, True) + start // chunk * 32
    threshold = tl.load(state).to(tl.uint32)
    ties = tl.load(bins + 1)
    quota = tl.minimum(tl.maximum(tl.load(state + 1) - tl.load(bins), 0), ties)
    kept_here = tl.zeros((block,), tl.int32)
    nan = tl.zeros((block,), tl.int32)
    if (quota == 0) | (quota == ties):
        least = threshold + (quota == 0).to(tl.uint32)
        for i in range(chunk // block):
            places = start + i * block + tl.arange(0, block)
            x = tl.load(values + places, mask=places < size, other=0.0)
            kept = (ordered(x).to(tl.uint32, bitcast=True) >= least) & (places < size)
            tl.store(mask + places, kept.to(tl.uint8), mask=places < size)
            kept_here += kept.to(tl.int32)
            nan |= (x != x).to(tl.int32)
    else:
        # one program of all: the ties run out in its part
        left = quota.to(tl.int32)
        for i in range(chunk // block):
            places = start + i * block + tl.arange(0, block)
            x = tl.load(values + places, mask=places < size, other=0.0)
            key = ordered(x).to(tl.uint32, bitcast=True)
            tie = (key == threshold).to(tl.int32)
            kept = ((key > threshold) | ((tie > 0) & (tl.cumsum(tie, 0) <= left))) & (places < size)
            tl.store(mask + places, kept.to(tl.uint8), mask=places < size)
            left -= tl.sum(tie, 0)
            kept_here += kept.to(tl.int32)
            nan |= (x != x).to(tl.int32)
    tl.atomic_add(kept_and_nan + index * 2, tl.sum(kept_here, 0).to(tl.int64), sem="relaxed")
    if tl.max(nan, 0) > 0:
        tl.store(kept_and_nan + index * 2 + 1, 1)


if importlib.util.find_spec("triton") is not None:
    apply_masks = remembering(triton.jit(_apply_masks))
    ordered = triton.jit(_ordered)
    count_digits = remembering(triton.jit(_count_digits))
    chosen = triton.jit(_chosen)
    # digits differ in their shifts alone: not compiled anew for one that 16 divides
    rank_digits = remembering(triton.jit(_rank_digits, do_not_specialize=["step", "shift", "before", "rank"]))
    rank_ties = remembering(triton.jit(_rank_ties))
    keep_largest = remembering(triton.jit(_keep_largest))


def vector_block(dtype: torch.dtype, chunk: int, warps: int) -> int:
    """Return how many elements make one vector of 16 bytes a thread, so that neighbors read whole sectors."""
    return min(chunk, 32 * warps * 16 // dtype.itemsize)


def apply_mask_triton_(bits: Sequence[Tensor], masks: Sequence[Tensor], chunk: int = _CHUNK) -> None:
    """Set every element whose mask is 0 to 0, in place."""
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
    shift: int,
    block: int = _BLOCK,
    tiles: int = _TILES,
) -> None:
    """Add how often each digit occurs to `counts`, see `eff_kernels.masks.count_digits_`."""
    bits = len(counts).bit_length() - 1
    chunk = tiles * block
    if values.numel():
        count_digits[(cdiv(values.numel(), chunk),)](
            values,
            counts,
            prefix,
            values.numel(),
            shift=shift,
            bits=bits,
            private=bits <= _PRIVATE_BITS,
            chunk=chunk,
            block=block,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )


def mark_largest_triton_(
    masks: Sequence[Tensor],
    scores: Sequence[Tensor],
    num_pruned: int,
    warps: int = _RANK_WARPS,
    each: int = _RANK_EACH,
    tiles: int = FULL,
    rounds: int = 1,
) -> Tensor:
    """Do as `eff_kernels.masks.mark_largest_`: nine launches for scores of one type, and nothing waits.

    Args:
        masks: bool, contiguous.
        scores: float16, bfloat16 or float32, contiguous.
        num_pruned: How many go.
        warps: Of a program.
        each: How many a thread takes at a time, a multiple of what 16 bytes hold.
        tiles: How often it does so before counts are widened, up to 15.
        rounds: How often that is done; a program takes fewer than 2^16 scores.
    """
    device = scores[0].device
    # A launch of one width for all types, so that a part of a tensor is the same in all launches.
    lanes = 16 // max(score.element_size() for score in scores)
    block = 32 * warps * each
    chunk = rounds * tiles * block
    chunks = [cdiv(score.numel(), chunk) for score in scores]
    bins = torch.empty(sum(chunks), 32, dtype=torch.int64, device=device)
    steps = len(_SHIFTS)
    room = torch.zeros(steps * 32 + (steps + 1) * 2 + 2 * len(scores), dtype=torch.int64, device=device)
    counts, states, kept_and_nan = torch.split(room, [steps * 32, (steps + 1) * 2, 2 * len(scores)])
    columns = [*scores], [mask.view(torch.uint8) for mask in masks], torch.split(bins, chunks)
    parts = list(tensor_tables(chunk, *columns))
    for step, shift in enumerate(_SHIFTS):
        for part in parts:
            rank_digits[(len(part.owners),)](
                part.table,
                part.owners,
                *part.like,
                counts,
                states,
                num_pruned,
                step,
                shift,
                _SHIFTS[max(step - 1, 0)],
                first=step == 0,
                aligned=part.is_aligned,
                tiles=tiles,
                rounds=rounds,
                block=block,
                lanes=lanes,
                num_warps=warps,
                enable_fp_fusion=True,
            )
    rank_ties[(1,)](counts, states, bins, len(bins), steps=steps, block=1024, num_warps=8, enable_fp_fusion=True)
    for part in parts:
        keep_largest[(len(part.owners),)](
            part.table,
            part.owners,
            *part.like,
            states[2 * steps :],
            kept_and_nan,
            aligned=part.is_aligned,
            chunk=chunk,
            block=block,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    found: Tensor = kept_and_nan.view(-1, 2)
    return found
