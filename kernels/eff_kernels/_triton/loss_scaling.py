"""`eff_kernels.loss_scaling` in Triton: all tensors of a dtype in one launch, counts private to a program."""

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

_BLOCK, _TILES, _WARPS = 4096, 8, 8
_BINS = 256


def _magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Return the bits of a magnitude as float32."""
    if x.dtype == tl.bfloat16:
        # by hand: the interpreter loses subnormal numbers (Triton 3.9)
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return bits & 0x7FFFFFFF


def _scan(
    table: tl.tensor,
    owners: tl.tensor,
    like: tl.tensor,
    inv_scale: tl.tensor,
    found_inf: tl.tensor,
    histogram: tl.tensor,
    rest: tl.tensor,
    bound: tl.tensor,
    unscaled: tl.constexpr,
    edge: tl.constexpr,
    aligned: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, start, size, index = row_of_program(table, owners, 1, chunk, aligned)
    values = pointer(row, 0, like, aligned)
    factor = 1.0
    if unscaled:
        factor = tl.load(inv_scale)
    # Counts of a program's own in registers, summed at its end: one atomic a column, not one a number. What lies
    # behind the tensor counts as zeros, which are taken off then: each number is counted without a condition.
    bins = tl.zeros((512,), tl.int32)
    below = tl.zeros((block,), tl.int32)
    largest = tl.zeros((block,), tl.int32)
    for i in range(chunk // block):
        places = start + i * block + tl.arange(0, block)
        inside = places < size
        x = tl.load(values + places, mask=inside, other=0.0)
        bits = magnitude_bits(x)
        if unscaled:
            largest = tl.maximum(largest, bits)
            # Multiplied in float32 and rounded once to the gradient's type, as torch's own kernel does.
            x = (x.to(tl.float32) * factor).to(x.dtype)
            tl.store(values + places, x, mask=inside)
        else:
            # Bin 0 for zero, and behind it the columns.
            bins += tl.histogram(tl.minimum(bits, (bits >> 23) + 1), 512)
            if not edge:
                # Columns tell magnitudes apart by powers of two only. -1 for each one below the threshold.
                below += (bits - bound) >> 31
            # By this sum infinity and NaN become negative.
            largest = tl.maximum(largest, bits + 0x00800000)
    highest = tl.max(largest, 0)
    if unscaled:
        if highest >= 0x7F800000:
            # Every program that finds one stores the same number: no atomic is needed.
            tl.store(found_inf, 1.0)
        highest = tl.minimum(highest, 0x7F800000)
    else:
        highest = tl.maximum(highest - 0x00800000, 0)
        bin = tl.arange(0, 512)
        zeros = tl.sum(tl.where(bin == 0, bins, 0), 0)
        small = -tl.sum(tl.where(bin <= bound >> 23, -bins, 0) if edge else below, 0) - zeros
        behind = tl.maximum(start + chunk - size, 0).to(tl.int32)
        bins -= tl.where(bin == 0, behind, 0)
        column = tl.maximum(bin - 1, 0)
        tl.atomic_add(histogram + index * 256 + column, bins.to(tl.int64), mask=bins > 0, sem="relaxed")
        tl.atomic_add(rest + index * 3, (zeros - behind).to(tl.int64), sem="relaxed")
        tl.atomic_add(rest + index * 3 + 1, small.to(tl.int64), sem="relaxed")
    # Bits of magnitudes are ordered as integers, so an integer maximum is one of numbers, and needs no float atomic.
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
    scan = remembering(triton.jit(_scan))
    exponents = remembering(triton.jit(_exponents))


def scan_triton_(
    tensors: Sequence[Tensor], bound: int, block: int = _BLOCK, tiles: int = _TILES
) -> tuple[Tensor, Tensor]:
    """Return the histogram, and beside it the zeros, the small ones and the bits of the largest, in one pass.

    Args:
        tensors: Dense, float16, bfloat16, float32 or float64.
        bound: Bits of the float32 below which a magnitude is small.
        block: Elements at a time, a power of two.
        tiles: How often a program takes so many.

    Returns:
        int64 ``[n, 256]`` and ``[n, 3]``.
    """
    histogram = torch.zeros(len(tensors), _BINS, dtype=torch.int64, device=tensors[0].device)
    rest = torch.zeros(len(tensors), 3, dtype=torch.int64, device=tensors[0].device)
    _launch(tensors, rest, rest, histogram, rest, bound, False, block, tiles)
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
    rest = torch.zeros(len(grads), 3, dtype=torch.int64, device=grads[0].device)
    _launch(grads, inv_scale, found_inf, rest, rest, 0, True, block, tiles)
    return rest[:, 2]


def _launch(
    tensors: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    histogram: Tensor,
    rest: Tensor,
    bound: int,
    unscaled: bool,
    block: int,
    tiles: int,
) -> None:
    chunk = tiles * block
    for part in tensor_tables(chunk, tensors):
        scan[(len(part.owners),)](
            part.table,
            part.owners,
            part.like[0],
            inv_scale,
            found_inf,
            histogram,
            rest,
            bound,
            unscaled=unscaled,
            edge=bound & 0x7FFFFF == 0,
            aligned=part.is_aligned,
            chunk=chunk,
            block=block,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )


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
        exponents[(triton.cdiv(values.numel(), chunk),)](
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
