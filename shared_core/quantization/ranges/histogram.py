"""Histograms of streams with unknown range. The counts do not depend on the order or the split into batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import ConfigError

_CHUNK = 2**20  # elements converted at a time, so that a large batch needs at most 24 MiB of float64
_SMALLEST_EXPONENT = -1000  # of a cell's width: its reciprocal must be a float64


class Histogram:
    """Counts of values in cells that double in width when the data outgrow them, one histogram per row.

    Cell ``k`` of a row holds ``k·w ≤ x < (k + 1)·w`` with ``w = 2^e``. The cells cover the smallest and the
    largest value and zero, and ``e`` is the smallest exponent for which they fit into `bins`. The grid thus depends
    only on the extrema, and since ``⌊x/2w⌋ = ⌊⌊x/w⌋/2⌋`` exactly, widening merges pairs of cells without moving a
    value to another cell. Every split and every permutation of the data gives the same counts, bit for bit. Zero
    lies on an edge. One-sided data have all cells on their side, and the data always span over half of the cells.

    Exact zeros are counted separately (every quantizer represents them exactly), and so are NaN and infinity, which
    never change a range. Counts are integers in float64, exact up to 2^53. On an accelerator the host reads nothing,
    so that an update does not wait for the device.

    All values are in one tensor, `data`: (min, -max, cells, zeros, NaN and infinity) of every row.

    Args:
        rows: Number of independent histograms: layers or channels.
        bins: Cells per row, a power of two from 4 to 2^20.
        device: Device of the counts.

    Raises:
        ConfigError: If `bins` is invalid.

    Example:
        >>> histogram = Histogram(bins=4)
        >>> histogram.update(torch.tensor([[0.0, 1.0, 1.5, 3.0]]))
        >>> histogram.cells.tolist(), histogram.zeros.tolist(), histogram.width.tolist()
        ([[0.0, 2.0, 0.0, 1.0]], [1.0], [1.0])
        >>> histogram.update(torch.tensor([[-4.0, math.nan]]))
        >>> histogram.cells.tolist(), histogram.first.tolist(), histogram.width.tolist()
        ([[1.0, 0.0, 2.0, 1.0]], [-2], [2.0])
    """

    def __init__(self, rows: int = 1, bins: int = 2048, device: torch.device | str = "cpu") -> None:
        if isinstance(bins, bool) or not isinstance(bins, int) or not 4 <= bins <= 2**20 or bins & (bins - 1):
            raise ConfigError("histogram", f"bins must be a power of two from 4 to 2^20, got {bins!r}", "2048 is usual")
        self.data = torch.empty(rows, bins + 4, dtype=torch.float64, device=device)
        self.clear_()

    @classmethod
    def of(cls, data: Tensor) -> Histogram:
        """Return a histogram on the storage of `data`, such as some rows of another histogram."""
        self = object.__new__(cls)
        self.data = data
        return self

    @property
    def bins(self) -> int:
        """Cells of a row."""
        return self.data.shape[1] - 4

    @property
    def extrema(self) -> Tensor:
        """(min, -max) per row, infinite for rows without finite values; a view."""
        return self.data[:, :2]

    @property
    def counts(self) -> Tensor:
        """Counts (rows, bins + 2) of the cells, of zeros, and of NaN and infinity; a view."""
        return self.data[:, 2:]

    @property
    def cells(self) -> Tensor:
        """Counts (rows, bins) of the values that are neither zero nor NaN nor infinite; a view."""
        return self.data[:, 2:-2]

    @property
    def zeros(self) -> Tensor:
        """Counts (rows,) of exact zeros; a view."""
        return self.data[:, -2]

    @property
    def non_finite(self) -> Tensor:
        """Counts (rows,) of NaN and infinite values; a view."""
        return self.data[:, -1]

    @property
    def total(self) -> Tensor:
        """Counts (rows,) of finite values."""
        return self.data[:, 2:-1].sum(1)

    @property
    def exponent(self) -> Tensor:
        """The ``e`` (rows,) of every row's cell width ``2^e``."""
        return _grid(self.extrema, self.bins)[0]

    @property
    def first(self) -> Tensor:
        """The ``k`` (rows,) of every row's first cell: 0, or negative where there are negative values."""
        return _grid(self.extrema, self.bins)[1]

    @property
    def width(self) -> Tensor:
        """Cell widths (rows,) in float64."""
        return power_of_two(self.exponent)

    def update(self, x: Tensor) -> None:
        """Count the values of a batch (rows, any number) of any floating type. It may be empty."""
        x = x.detach()
        if not x.numel():
            return
        self._cover(torch.minimum(self.extrema, finite_extrema(x)))
        bins, counts = self.bins, self.counts
        exponent, first = _grid(self.extrema, bins)
        reciprocal, shift = power_of_two(-exponent)[:, None], first.to(torch.float64)[:, None]
        # The scatter adds one expanded element, which needs no tensor of ones.
        one = torch.ones((), dtype=torch.float64, device=x.device)
        for part in torch.split(x, max(1, _CHUNK // x.shape[0]), 1):
            values = part.to(torch.float64)  # a product with a power of two is exact, and here cannot overflow
            cell = (values * reciprocal).floor_().sub_(shift)
            # Two more counters after the cells: exact zeros, and non-finite values.
            cell = torch.where(values == 0, float(bins), cell)
            cell = torch.where(torch.isfinite(values), cell, float(bins + 1))
            # integers add up exactly in any order; bincount would wait for a CUDA device
            counts.scatter_add_(1, cell.to(torch.int64), one.expand(cell.shape))

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same number of rows and bins.

        Raises:
            ConfigError: If rows or bins differ.
        """
        if other.data.shape != self.data.shape:
            raise ConfigError(
                "histogram",
                f"other must have {self.data.shape[0]} rows and {self.bins} bins, got "
                f"{other.data.shape[0]} and {other.bins}",
            )
        extrema, counts = other.extrema.to(self.data.device), other.counts.to(self.data.device)
        wider = torch.minimum(self.extrema, extrema)
        self._cover(wider)
        # Join on the wider grid, where each old cell lies within one new cell.
        self.counts.add_(_regrid(counts, extrema, wider))

    def all_reduce(self) -> None:
        """Sum the histograms of all ranks, on every rank: first the extrema, then the counts.

        Takes two collectives for any number of rows. Every rank must call it, once for the same data.
        """
        # Two collectives: all ranks first agree on the extrema, which determine the grid.
        self._cover(all_reduce_(self.extrema.clone(memory_format=torch.contiguous_format), "min"))
        self.counts.copy_(all_reduce_(self.counts.clone(memory_format=torch.contiguous_format), "sum"))

    def clear_(self) -> None:
        """Forget all data."""
        self.extrema.fill_(math.inf)
        self.counts.zero_()

    def _cover(self, extrema: Tensor) -> None:
        # in place, because others hold views of the rows
        self.counts.copy_(_regrid(self.counts, self.extrema, extrema))
        self.extrema.copy_(extrema)


def finite_extrema(x: Tensor) -> Tensor:
    """Return (min, -max) of the finite values per row: (rows, 2) in float64, infinite for rows without any.

    Example:
        >>> finite_extrema(torch.tensor([[1.0, -2.0, math.nan], [math.inf, math.nan, -math.inf]]))
        tensor([[-2., -1.],
                [inf, inf]], dtype=torch.float64)
    """
    x = x.detach()
    if not x.numel():
        return torch.full((x.shape[0], 2), math.inf, dtype=torch.float64, device=x.device)
    low, high = torch.aminmax(x) if x.shape[0] == 1 else (x.amin(1), x.amax(1))
    # on a CPU this check is free and avoids masks, which take ten times as long as the reduction
    if x.device.type != "cpu" or not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        finite = torch.isfinite(x)
        low, high = torch.where(finite, x, math.inf).amin(1), torch.where(finite, x, -math.inf).amax(1)
    extrema = torch.stack([low.reshape(-1), -high.reshape(-1)], 1).to(torch.float64)
    return extrema + 0.0  # no negative zero: the smaller of two zeros would depend on their order


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2^e`` in float64, exactly, for whole numbers from -1022 to 1023.

    Example:
        >>> power_of_two(torch.tensor([-1, 10]))
        tensor([5.0000e-01, 1.0240e+03], dtype=torch.float64)
    """
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)  # pow and exp2 may be off by an ulp


def _grid(extrema: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return (exponent of the width, first cell) of every row."""
    low, high = extrema[:, 0].clamp(max=0), (-extrema[:, 1]).clamp(min=0)
    # Cell widths are powers of two and cells begin at multiples of their width, so that grids always nest: a coarser
    # grid joins cells of a finer one. So counts never depend on the order of the data.
    log2 = bins.bit_length() - 1
    # With 2^(p-1) <= max|x| < 2^p: below 2^(p - log2) one side alone has too many cells, and one step above it
    # each side has bins/2 at most.
    exponent = torch.frexp(torch.maximum(high, -low)).exponent.to(torch.int64) - log2
    exponent = exponent.clamp(min=_SMALLEST_EXPONENT)
    reciprocal = power_of_two(-exponent)
    above = torch.floor(high * reciprocal) - torch.floor(low * reciprocal) >= bins
    # Negative and positive cells together must fit: if they do not, one doubling does it.
    exponent = exponent + above
    return exponent, torch.floor(low * power_of_two(-exponent)).to(torch.int64)


def _regrid(counts: Tensor, extrema: Tensor, wider: Tensor) -> Tensor:
    """Return `counts` on the grid of the `wider` extrema."""
    bins = counts.shape[1] - 2
    (exponent, first), (new_exponent, new_first) = _grid(extrema, bins), _grid(wider, bins)
    # Empty cells may lie anywhere, so their index is clamped. A shift right rounds down, also for negative cells.
    # No index has 62 bits. Shifts are never negative, because the grid only gets coarser.
    shift = (new_exponent - exponent).clamp(0, 62)
    cell = (first[:, None] + torch.arange(bins, device=counts.device)) >> shift[:, None]
    index = (cell - new_first[:, None]).clamp(0, bins - 1)
    new = torch.zeros_like(counts)
    new.scatter_add_(1, index, counts[:, :bins])
    new[:, bins:] = counts[:, bins:]
    return new
