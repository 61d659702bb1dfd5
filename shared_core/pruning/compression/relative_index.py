"""Where the weights of a sparse tensor are: the zeros between them, in few bits, long runs with filler zeros."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared_core.pruning.compression.entropy import coded_bits

WIDTHS = range(1, 9)
"""Bits of a gap that may be chosen; the paper takes 8 for convolutions and 5 for fully connected layers."""

Ints = NDArray[np.integer]


def runs_of_zeros(live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many zeros stand before each nonzero weight; those after the last one are not told.

    Example:
        >>> runs_of_zeros(np.array([False, True, True, False, False, True, False])).tolist()
        [1, 0, 2]
    """
    places = np.flatnonzero(live).astype(np.int64)
    return np.diff(places, prepend=-1) - 1


def gap_symbols(runs: Ints, bits: int) -> NDArray[np.uint8]:
    """Return runs of zeros as symbols of `bits` bits: ``s < 2**bits - 1`` is s zeros and a weight.

    The largest symbol is as many zeros as its value says and no weight: the paper's filler zero, which costs no code
    of a value here (Han, Mao and Dally 2016, arXiv:1510.00149, figure 2).

    Args:
        runs: Zeros before each weight, >= 0, shape (n,).
        bits: Of a symbol, in [1, 8].

    Returns:
        uint8, at least n of them.

    Example:
        >>> gap_symbols(np.array([1, 0, 9]), 2).tolist()
        [1, 0, 3, 3, 3, 0]
    """
    filler = 2**bits - 1
    ends = np.cumsum(runs // filler + 1)
    symbols = np.full(int(ends[-1]) if len(runs) else 0, filler, dtype=np.uint8)
    symbols[ends - 1] = runs % filler
    return symbols


def weight_places(symbols: Ints, bits: int, start: int) -> tuple[NDArray[np.int64], int]:
    """Return the flat indices of the weights that gap symbols tell, and where the next symbols go on.

    Example:
        >>> places, following = weight_places(np.array([1, 0, 3, 3, 3, 0]), 2, start=0)
        >>> places.tolist(), following
        ([1, 2, 12], 13)
    """
    has_weight = symbols != 2**bits - 1
    after = start + np.cumsum(symbols.astype(np.int64) + has_weight)
    return after[has_weight] - 1, int(after[-1]) if len(after) else start


def smallest_width(runs: Ints) -> tuple[int, float]:
    """Return the bits of a gap that give the fewest coded bits, the table of the symbols included, and those bits.

    Example:
        >>> smallest_width(np.full(1000, 2))[0]
        2
    """
    cost = {bits: _gap_bits(runs, bits) for bits in WIDTHS}
    best = min(cost, key=lambda bits: cost[bits])
    return best, cost[best]


def _gap_bits(runs: Ints, bits: int) -> float:
    filler = 2**bits - 1
    counts = np.bincount(runs % filler, minlength=filler + 1)
    counts[filler] = int((runs // filler).sum())
    return coded_bits(counts)
