"""`eff_kernels.loss_scaling` in Triton: all tensors of a dtype in one launch, counts private to a program."""

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

_BLOCK, _TILES, _WARPS, _EACH = 4096, 8, 8, 8
_BINS = 256


def _magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Return the bits of a magnitude as float32."""
    if x.dtype == tl.bfloat16:
        # by hand: the interpreter loses subnormal numbers (Triton 3.9)
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits & 0x7FFFFFFF


def _unscale(
    table: tl.tensor,
    owners: tl.tensor,
    like: tl.tensor,
    inv_scale: tl.tensor,
    found_inf: tl.tensor,
    largest_of: tl.tensor,
    aligned: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, start, size, index = row_of_program(table, owners, 1, chunk, aligned)
    values = pointer(row, 0, like, aligned)
    factor = tl.load(inv_scale)
    largest = tl.zeros((block,), tl.int32)
    for i in range(chunk // block):
        places = start + i * block + tl.arange(0, block)
        inside = places < size
        x = tl.load(values + places, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(x))
        # Multiplied in float32 and rounded once to the gradient's type, as torch's own kernel does.
        x = (x.to(tl.float32) * factor).to(x.dtype)
        tl.store(values + places, x, mask=inside)
    highest = tl.max(largest, 0)
    if highest >= 0x7F800000:
        # Every program that finds one stores the same number: no atomic is needed.
        tl.store(found_inf, 1.0)
    # Bits of magnitudes are ordered as integers, so an integer maximum is one of numbers, and needs no float atomic.
    tl.atomic_max(largest_of + index, tl.minimum(highest, 0x7F800000).to(tl.int64), sem="relaxed")


def _count(
    table: tl.tensor,
    owners: tl.tensor,
    like: tl.tensor,
    histogram: tl.tensor,
    rest: tl.tensor,
    bound: tl.tensor,
    edge: tl.constexpr,
    aligned: tl.constexpr,
    tiles: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    threads: tl.constexpr,
) -> None:
    chunk: tl.constexpr = rounds * tiles * block
    row, start, size, index = row_of_program(table, owners, 1, chunk, aligned)
    values = pointer(row, 0, like, aligned)
    columns = histogram + index * 256
    # Gradients lie in few powers of two: those up to 4 above the largest of the first block are counted in registers.
    places = start + tl.arange(0, block)
    first = magnitude_bits(tl.load(values + places, mask=places < size, other=0.0))
    lowest = tl.maximum(tl.minimum((tl.max(first, 0) >> 23) + 4, 255) - 31, 1)
    below = tl.zeros((block,), tl.int32)
    largest = tl.zeros((block,), tl.int32)
    total = tl.zeros((block // lanes, 8), tl.int32)
    for i in range(rounds):
        a = tl.zeros((block,), tl.int32)
        b = tl.zeros((block,), tl.int32)
        c = tl.zeros((block,), tl.int32)
        d = tl.zeros((block,), tl.int32)
        for j in range(tiles):
            places = start + (i * tiles + j) * block + tl.arange(0, block)
            bits = magnitude_bits(tl.load(values + places, mask=places < size, other=0.0))
            a, b, c, d = tally(((bits >> 23) - lowest).to(tl.uint32, bitcast=True), a, b, c, d)
            if not edge:
                # Columns tell magnitudes apart by powers of two only. -1 for each one below the threshold.
                below += (bits - bound) >> 31
            # By this sum infinity and NaN become negative.
            largest = tl.maximum(largest, bits + 0x00800000)
        total += as_bytes(a, b, c, d, lanes)
    found, bin = totals(total)
    tl.atomic_add(columns + lowest + bin, found.to(tl.int64), mask=found > 0, sem="relaxed")
    small = tl.sum(tl.where(lowest + bin < bound >> 23, found, 0), 0)
    num_zeros = 0
    # Zeros and the rare others are looked for where there are any.
    if tl.sum(found, 0) < chunk:
        zeros = tl.zeros((block,), tl.int32)
        others = tl.zeros((256,), tl.int32)
        for i in range(rounds * tiles):
            places = start + i * block + tl.arange(0, block)
            bits = magnitude_bits(tl.load(values + places, mask=places < size, other=0.0))
            zeros += (bits == 0).to(tl.int32)
            far = (bits != 0) & (((bits >> 23) - lowest).to(tl.uint32, bitcast=True) >= 32)
            if tl.max(far.to(tl.int32), 0) > 0:
                # in parts: a histogram of all at once needs registers that every program would be given
                for part in range(block // threads):
                    few = start + i * block + part * threads + tl.arange(0, threads)
                    some = magnitude_bits(tl.load(values + few, mask=few < size, other=0.0))
                    apart = (some != 0) & (((some >> 23) - lowest).to(tl.uint32, bitcast=True) >= 32)
                    others += tl.histogram(some >> 23, 256, mask=apart)
        # what lies behind the tensor was read as zeros
        num_zeros = tl.sum(zeros, 0) - tl.maximum(start + chunk - size, 0).to(tl.int32)
        column = tl.arange(0, 256)
        tl.atomic_add(columns + column, others.to(tl.int64), mask=others > 0, sem="relaxed")
        small += tl.sum(tl.where(column < bound >> 23, others, 0), 0)
        tl.atomic_add(columns, num_zeros.to(tl.int64), mask=num_zeros > 0, sem="relaxed")
        tl.atomic_add(rest + index * 3, num_zeros.to(tl.int64), mask=num_zeros > 0, sem="relaxed")
    if not edge:
        small = -tl.sum(below, 0) - tl.maximum(start + chunk - size, 0).to(tl.int32) - num_zeros
    tl.atomic_add(rest + index * 3 + 1, small.to(tl.int64), mask=small > 0, sem="relaxed")
    highest = tl.maximum(tl.max(largest, 0) - 0x00800000, 0)
    tl.atomic_max(rest + index * 3 + 2, highest.to(tl.int64), sem="relaxed")


def _exponents(
    values: tl.tensor,
    counts: tl.tensor,
    size: tl.tensor,
    offset: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * chunk
    found = tl.zeros((512,), tl.int32)
    for i in range(chunk // block):
        places = start + i * block + tl.arange(0, block)
        bits = magnitude_bits(tl.load(values + places, mask=places < size, other=0.0))
        # At most 2^-126 times 2^23 has as exponent 0 for zero, 1 to 23 for what is subnormal in float32, 24 for what
        # is normal there, 255 for NaN: added to the number's own, all that has a column of its own has a bin.
        low = tl.minimum(bits.to(tl.float32, bitcast=True), 2.0**-126, propagate_nan=tl.PropagateNan.ALL) * 2.0**23
        found += tl.histogram((bits >> 23) + ((low.to(tl.int32, bitcast=True) >> 23) & 255), 512)
    bin = tl.arange(0, 512)
    found -= tl.where(bin == 0, tl.maximum(start + chunk - size, 0).to(tl.int32), 0)
    # Columns as of `eff_kernels.loss_scaling._count_exponents`: zero, subnormals, normals, infinity (bin 279), NaN.
    column = tl.minimum(tl.maximum(bin - (bin > 24).to(tl.int32) - offset, 0), columns - 2)
    tl.atomic_add(counts + column + (bin > 279).to(tl.int32), found.to(tl.int64), mask=found > 0, sem="relaxed")


if importlib.util.find_spec("triton") is not None:
    magnitude_bits = triton.jit(_magnitude_bits)
    unscale = remembering(triton.jit(_unscale))
    count = remembering(triton.jit(_count))
    exponents = remembering(triton.jit(_exponents))


def scan_triton_(
    tensors: Sequence[Tensor],
    bound: int,
    warps: int = _WARPS,
    each: int = _EACH,
    tiles: int = FULL,
    rounds: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the histogram, and beside it the zeros, the small ones and the bits of the largest, in one pass.

    Args:
        tensors: Dense, float16, bfloat16, float32 or float64.
        bound: Bits of the float32 below which a magnitude is small.
        warps: Of a program.
        each: How many a thread takes at a time, a multiple of what 16 bytes hold.
        tiles: How often it does so before counts are widened, up to 15.
        rounds: How often that is done; a program takes fewer than 2^16 elements.

    Returns:
        int64 ``[n, 256]`` and ``[n, 3]``.
    """
    histogram = torch.zeros(len(tensors), _BINS, dtype=torch.int64, device=tensors[0].device)
    rest = torch.zeros(len(tensors), 3, dtype=torch.int64, device=tensors[0].device)
    # a launch of one width for all types
    lanes = 16 // max(tensor.element_size() for tensor in tensors)
    block = 32 * warps * each
    for part in tensor_tables(rounds * tiles * block, tensors):
        count[(len(part.owners),)](
            part.table,
            part.owners,
            part.like[0],
            histogram,
            rest,
            bound,
            edge=bound & 0x7FFFFF == 0,
            aligned=part.is_aligned,
            tiles=tiles,
            rounds=rounds,
            block=block,
            lanes=lanes,
            threads=32 * warps,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    return histogram, rest


def unscale_triton_(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, block: int = _BLOCK, tiles: int = _TILES
) -> Tensor:
    """Multiply in place in one pass; return the bits of the largest magnitude that was there, infinity for NaN.

    Args:
        grads: Dense, float16, bfloat16, float32 or float64.
        found_inf: float32 ``[1]``, set to 1 where an element is not finite.
        inv_scale: float32 ``[1]``.
        block: Elements at a time, a power of two.
        tiles: How often a program takes so many.

    Returns:
        int64 ``[n]``.
    """
    largest = torch.zeros(len(grads), dtype=torch.int64, device=grads[0].device)
    for part in tensor_tables(tiles * block, grads):
        unscale[(len(part.owners),)](
            part.table,
            part.owners,
            part.like[0],
            inv_scale,
            found_inf,
            largest,
            aligned=part.is_aligned,
            chunk=tiles * block,
            block=block,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )
    return largest


def count_exponents_triton(
    values: Tensor, mantissa: int, exponent: int, block: int = _BLOCK, tiles: int = _TILES
) -> Tensor:
    """Return the counts of `eff_kernels.loss_scaling.count_exponents`.

    Args:
        values: float16, bfloat16 or float32, dense.
        mantissa: Bits of the mantissa.
        exponent: Bits of the exponent.
        block: Elements at a time, a power of two.
        tiles: How often a program takes so many.
    """
    columns = mantissa + (1 << exponent) + 1
    counts = torch.zeros(columns, dtype=torch.int64, device=values.device)
    chunk = tiles * block
    if values.numel():
        exponents[(cdiv(values.numel(), chunk),)](
            values,
            counts,
            values.numel(),
            # the exponents of float32 below the format's lowest
            offset=150 - ((1 << exponent - 1) - 1) - mantissa,
            columns=columns,
            chunk=chunk,
            block=block,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )
    return counts
