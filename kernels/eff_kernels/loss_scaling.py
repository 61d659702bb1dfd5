"""Loss scaling: count magnitudes by power of two, and unscale gradients while measuring them.

On CUDA one Triton launch reads and writes each gradient once. Elsewhere torch's fused operator unscales, and a second
pass finds non-finite values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eff_kernels._triton.launch import runs_in_one_launch

NUM_BINS = 256
MAGNITUDE, INFINITY = 0x7FFFFFFF, 0x7F800000
"""Bits of a float32: all except the sign, and infinity."""
# On a CPU a piece and its temporaries stay in cache. On a GPU fewer launches matter, and below 2**24 a float32 count
# is exact.
_CPU_PIECE, _DEVICE_PIECE = 1 << 16, 1 << 22


class Magnitudes(NamedTuple):
    """Counts of each tensor's magnitudes, on the device of the tensors."""

    histogram: Tensor
    """int64 ``[n, 256]``: column k counts ``2^(k − 127) <= |x| < 2^(k − 126)``, column 0 also smaller values and
    zeros, column 255 Inf and NaN."""
    zeros: Tensor
    """int64 ``[n]``: exact zeros."""
    small: Tensor
    """int64 ``[n]``: nonzero values below the threshold."""
    amax: Tensor
    """float32 ``[n]``: the largest finite magnitude, or 0."""


@torch.no_grad()
def count_magnitudes(tensors: Sequence[Tensor], threshold: float) -> Magnitudes:
    """Return the counts of each tensor's magnitudes in one pass, without a host read on a GPU.

    Bit patterns are compared instead of floats: as integers they have the same order, and a shift gives the exponent.

    Args:
        tensors: Floating point, any shape, all on one device. Other dtypes are rounded to float32.
        threshold: Nonzero values below it count as small; a normal float32, > 0.

    Raises:
        ValueError: If the threshold is not a normal float32 above 0.

    Example:
        >>> counts = count_magnitudes([torch.tensor([0.0, 0.75, -3.0, 1e-6])], 2.0**-14)
        >>> counts.zeros.item(), counts.small.item(), counts.amax.item(), counts.histogram[0, 126:129].tolist()
        (1, 1, 3.0, [1, 0, 1])
    """
    bound = bits_of_threshold(threshold)
    if not tensors:
        empty = torch.zeros(0, dtype=torch.int64)
        return Magnitudes(empty.view(0, NUM_BINS), empty, empty, empty.float())
    if runs_in_one_launch(tensors) and all(tensor.dtype in _LAYOUTS for tensor in tensors):
        return as_magnitudes(*count_magnitudes_of([tensor.detach() for tensor in tensors], bound))
    return as_magnitudes(*_count(tensors, bound))


def bits_of_threshold(threshold: float) -> int:
    """Return the bits of a threshold as a float32.

    Args:
        threshold: Rounded to float32.

    Raises:
        ValueError: If it is not a normal number above 0.

    Example:
        >>> hex(bits_of_threshold(1.0))
        '0x3f800000'
    """
    bound = torch.tensor(threshold, dtype=torch.float32)
    if not torch.finfo(torch.float32).tiny <= bound.item() < math.inf:
        raise ValueError(f"count_magnitudes: threshold must be a normal float32 above 0, got {threshold}")
    return int(bound.view(torch.int32))


def as_magnitudes(histogram: Tensor, rest: Tensor) -> Magnitudes:
    """Return `Magnitudes` from the histogram and the other counts.

    Args:
        histogram: From `count_magnitudes_of`.
        rest: int64, [tensors, 3]: zeros, small values, and the bits of the largest.
    """
    return Magnitudes(histogram, rest[:, 0], rest[:, 1], rest[:, 2].to(torch.int32).view(torch.float32))


@torch.library.custom_op("eff_kernels::count_magnitudes", mutates_args=())
def count_magnitudes_of(tensors: list[Tensor], bound: int) -> tuple[Tensor, Tensor]:
    """`count_magnitudes` for the bits of the threshold as one operator; returns the arguments of `as_magnitudes`."""
    if tensors[0].is_cuda:
        from eff_kernels._triton.loss_scaling import scan_triton_

        with torch.cuda.device(tensors[0].device):
            return scan_triton_(tensors, bound)
    return _count(tensors, bound)


@count_magnitudes_of.register_fake
def _(tensors: list[Tensor], bound: int) -> tuple[Tensor, Tensor]:
    histogram = tensors[0].new_empty(len(tensors), NUM_BINS, dtype=torch.int64)
    return histogram, histogram.new_empty(len(tensors), 3)


def _count(tensors: Sequence[Tensor], bound: int) -> tuple[Tensor, Tensor]:
    device = tensors[0].device
    on_cpu = device.type == "cpu"
    count, size = (_count_on_cpu, _CPU_PIECE) if on_cpu else (_count_on_device, _DEVICE_PIECE)
    histogram = torch.zeros(len(tensors), NUM_BINS, dtype=torch.int64, device=device)
    # zeros, small, and the bits of the largest: int32 bits have the order of magnitudes, so their maximum is right
    rest = torch.zeros(len(tensors), 3, dtype=torch.int64, device=device)
    for index, tensor in enumerate(tensors):
        for piece in torch.split(tensor.detach().reshape(-1), size):
            if piece.numel():
                # Widening to float32 is exact, so that all dtypes share one layout: 8 bits of exponent, and integers
                # in the order of magnitudes.
                count(piece.float().view(torch.int32) & MAGNITUDE, bound, histogram[index], rest[index])
    return histogram, rest


def _count_on_cpu(bits: Tensor, bound: int, histogram: Tensor, rest: Tensor) -> None:
    # bincount of bytes is four times as fast as of integers
    bins = torch.bincount((bits >> 23).to(torch.uint8), minlength=NUM_BINS)
    histogram += bins
    lowest, highest = int(bins[0]), int(bins[-1])
    zeros = bits.numel() - int(torch.count_nonzero(bits)) if lowest else 0
    # Only a threshold inside a column requires comparing each number.
    # a power of two is the edge of a column
    below = int((bits < bound).sum()) if bound & ~INFINITY else int(bins[: bound >> 23].sum())
    # Zeros are in column 0 and below every threshold, so they are counted separately.
    rest[0] += zeros
    rest[1] += below - zeros
    if highest:
        bits = torch.where(bits < INFINITY, bits, 0)
    rest[2] = max(int(rest[2]), int(bits.max()))


def _count_on_device(bits: Tensor, bound: int, histogram: Tensor, rest: Tensor) -> None:
    # histc needs no host read if its range is given; bincount does
    histogram += torch.histc((bits >> 23).float(), NUM_BINS, 0, NUM_BINS).to(torch.int64)
    zeros = (bits == 0).sum()
    rest[0] += zeros
    rest[1] += (bits < bound).sum() - zeros
    rest[2] = torch.maximum(rest[2], torch.where(bits < INFINITY, bits, 0).max())


class _Layout(NamedTuple):
    """Position of the exponent in a binary float."""

    integer: torch.dtype
    mantissa: int
    exponent: int
    bias: int


_LAYOUTS = {
    torch.float16: _Layout(torch.int16, 10, 5, 15),
    torch.bfloat16: _Layout(torch.int16, 7, 8, 127),
    torch.float32: _Layout(torch.int32, 23, 8, 127),
    torch.float64: _Layout(torch.int64, 52, 11, 1023),
}


class Exponents(NamedTuple):
    """Counts of ``⌊log2|x|⌋``, including exact exponents of subnormal numbers."""

    lowest: int
    """log2 of the dtype's smallest subnormal number: the exponent of column 1."""
    counts: Tensor
    """int64 ``[columns]``, on the tensor's device: exact zeros, then one column per exponent from `lowest` up, then
    infinities, then NaN."""


@torch.no_grad()
def count_exponents(tensor: Tensor) -> Exponents:
    """Return how often each power of two occurs in a tensor, in one pass over its bits, without a host read on a GPU.

    The exponent of a normal number is a field of its bits. That of a subnormal number is its highest set bit.

    Args:
        tensor: float16, bfloat16, float32 or float64, any shape.

    Raises:
        TypeError: If the dtype is not supported.

    Example:
        >>> lowest, counts = count_exponents(torch.tensor([0.0, 0.75, -3.0, 2.0**-24], dtype=torch.float16))
        >>> lowest, {lowest + column - 1: count for column, count in enumerate(counts.tolist()) if count and column}
        (-24, {-24: 1, -1: 1, 1: 1})
    """
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None:
        raise TypeError(f"count_exponents: dtype must be one of {', '.join(map(str, _LAYOUTS))}, got {tensor.dtype}")
    # 2^(1 - bias) is the smallest normal number. Subnormal ones go `mantissa` bits below it.
    lowest = 1 - layout.bias - layout.mantissa
    if tensor.dtype != torch.float64 and runs_in_one_launch([tensor]):
        return Exponents(lowest, count_exponents_of(tensor.detach()))
    return Exponents(lowest, _count_exponents(tensor))


@torch.library.custom_op("eff_kernels::count_exponents", mutates_args=())
def count_exponents_of(tensor: Tensor) -> Tensor:
    """Return the counts of `count_exponents` as one operator."""
    if not tensor.is_cuda:
        return _count_exponents(tensor)
    from eff_kernels._triton.loss_scaling import count_exponents_triton

    with torch.cuda.device(tensor.device):
        return count_exponents_triton(tensor, *_LAYOUTS[tensor.dtype][1:3])


@count_exponents_of.register_fake
def _(tensor: Tensor) -> Tensor:
    layout = _LAYOUTS[tensor.dtype]
    return tensor.new_empty(_num_columns(layout), dtype=torch.int64)


def _num_columns(layout: _Layout) -> int:
    return layout.mantissa + (1 << layout.exponent) + 1


def _count_exponents(tensor: Tensor) -> Tensor:
    layout = _LAYOUTS[tensor.dtype]
    counts = torch.zeros(_num_columns(layout), dtype=torch.int64, device=tensor.device)
    on_cpu = tensor.device.type == "cpu"
    count, size = (_exponents_on_cpu, _CPU_PIECE) if on_cpu else (_exponents_on_device, _DEVICE_PIECE)
    magnitude = torch.iinfo(layout.integer).max
    for piece in torch.split(tensor.detach().reshape(-1), size):
        if piece.numel():
            count(piece.view(layout.integer) & magnitude, layout, counts)
    return counts


def _exponents_on_cpu(bits: Tensor, layout: _Layout, counts: Tensor) -> None:
    smallest_normal, fields = 1 << layout.mantissa, 1 << layout.exponent
    field = bits >> layout.mantissa
    bins = torch.bincount(field.to(torch.uint8) if fields <= NUM_BINS else field, minlength=fields)
    # Columns: zero, `mantissa` exponents of subnormals, then normal ones, infinity, NaN.
    counts[layout.mantissa + 1 : -2] += bins[1:-1]
    if special := int(bins[-1]):
        nans = int((bits > (fields - 1) << layout.mantissa).sum())
        counts[-2] += special - nans
        counts[-1] += nans
    if bins[0]:
        counts[0] += bits.numel() - int(torch.count_nonzero(bits))
        # Subnormal: the exponent is that of the highest set bit, with one column each.
        below = bits[(bits < smallest_normal) & (bits > 0)]
        if below.numel():
            counts[1 : layout.mantissa + 1] += torch.bincount(_highest_bit(below), minlength=layout.mantissa)


def _exponents_on_device(bits: Tensor, layout: _Layout, counts: Tensor) -> None:
    infinity = ((1 << layout.exponent) - 1) << layout.mantissa
    # field + mantissa is the column of normal numbers and of infinity. NaN has the next one.
    normal = (bits >> layout.mantissa) + layout.mantissa + (bits > infinity)
    column = torch.where(bits >> layout.mantissa > 0, normal, torch.where(bits > 0, _highest_bit(bits) + 1, 0))
    # histc needs no host read if its range is given; bincount does
    counts += torch.histc(column.float(), len(counts), 0, len(counts)).to(torch.int64)


def _highest_bit(bits: Tensor) -> Tensor:
    """Return ``⌊log2 bits⌋``, -1 for 0. Integers below 2**53 are exact in float64."""
    return torch.frexp(bits.double()).exponent.to(torch.int64) - 1


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def unscale_with_largest_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor:
    """Multiply gradients in place and return their previous largest magnitude, or 0 if one was not finite.

    Args:
        grads: Floating point, any shapes, all on one device and of one dtype. Of DTensors the local part counts.
        found_inf: float32 ``[1]``, set to 1 if an element is not finite, else not changed.
        inv_scale: float32 ``[1]``.

    Returns:
        float32 scalar on the device of the gradients.

    Example:
        >>> grad, found_inf = torch.tensor([4.0, -8.0]), torch.zeros(1)
        >>> unscale_with_largest_([grad], found_inf, torch.tensor([0.5])), grad, found_inf
        (tensor(8.), tensor([ 2., -4.]), tensor([0.]))
    """
    if runs_in_one_launch(grads, [found_inf, inv_scale]) and all(grad.dtype in _DTYPES for grad in grads):
        bits = unscale_and_scan_(list(grads), found_inf, inv_scale).max().to(torch.int32)
        return torch.where(bits < INFINITY, bits, 0).view(torch.float32)
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    norms = torch._foreach_norm([grad for grad in local if grad.numel()] or [inv_scale.new_zeros(1)], math.inf)
    # Inf and NaN have a separate flag, because NaN in a maximum over processes would be undefined
    largest = torch.stack(list(norms)).max().float().nan_to_num(nan=0.0, posinf=0.0)
    torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)
    return largest


@torch.library.custom_op("eff_kernels::unscale_and_scan_", mutates_args={"grads", "found_inf"})
def unscale_and_scan_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor:
    """Unscale as one operator. Return the bits of each tensor's previous largest magnitude, of infinity for NaN."""
    if not grads[0].is_cuda:
        # clamp, because NaN's bits are above infinity's, and both mean "not finite".
        bits = [(grad.float().view(torch.int32) & MAGNITUDE).view(-1) for grad in grads]
        largest = [each.max().clamp(max=INFINITY) if each.numel() else each.new_zeros(()) for each in bits]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        return torch.stack(largest).long()
    from eff_kernels._triton.loss_scaling import unscale_triton_

    with torch.cuda.device(grads[0].device):
        return unscale_triton_(grads, found_inf, inv_scale)


@unscale_and_scan_.register_fake
def _(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor:
    return found_inf.new_empty(len(grads), dtype=torch.int64)
