"""Entropy coding by constriction's ANS coder, with tables of one byte a symbol.

Where the weights of a sparse tensor are: the zeros between them, in few bits, long runs with filler zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared_core.errors import CheckpointError
from shared_core.libraries import optional

PIECE = 1 << 20
# 2^16 · 2^(i/8): as whole numbers, because two machines may disagree in the last digit of a power
_EIGHTHS = (65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194)


def coded_bits(counts: NDArray[np.integer]) -> float:
    """Return the bits that symbols with these counts take, with their table: ``Σ n_i log2(N / n_i) + 8`` a symbol.

    Example:
        >>> coded_bits(np.array([4, 4]))
        24.0
    """
    positive = counts[counts > 0].astype(np.float64)
    total = positive.sum()
    return float((positive * np.log2(total / positive)).sum()) + 8 * len(counts) if len(positive) else 8 * len(counts)


def make_table(symbols: NDArray[np.integer], size: int) -> bytes:
    """Return how often each of `size` symbols occurs, as one byte each: 0 for never, else ``1 + round(8 log2(n))``.

    Steps of 9 % cost less than a thousandth of a bit a symbol and make a table a quarter of the size of one of counts.

    Example:
        >>> list(make_table(np.array([0, 0, 0, 0, 2]), 3))
        [17, 0, 1]
    """
    counts = np.bincount(symbols, minlength=size)
    # A logarithm in eighths of an octave: counts are 4 % off at most, some 0.001 bits a symbol, and 255 reaches 2^31.
    return bytes(min(255, 1 + round(8 * math.log2(count))) if count else 0 for count in counts.tolist())


def encode(streams: Sequence[tuple[NDArray[np.integer], bytes]]) -> bytes:
    """Return streams of symbols, each with its table, as one string of bytes, the first to be decoded first.

    Raises:
        MissingExtraError: If constriction is not installed.
    """
    library = optional("constriction", "compress", "compress")
    coder = library.stream.stack.AnsCoder()  # a stack: what is encoded last is decoded first
    # Last stream first, and each from its last piece to its first: the decoder meets the first symbol first.
    for symbols, table in reversed(streams):
        model = _model(library, table) if len(symbols) else None
        if model is None:
            continue
        # In pieces, so that int32 copies of a large tensor are not all there at once.
        for first in range((len(symbols) - 1) // PIECE * PIECE, -1, -PIECE):
            coder.encode_reverse(symbols[first : first + PIECE].astype(np.int32), model)
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return words


class Decoder:
    """Takes symbols out of what `encode` returned, in the order in which they were put in.

    Any bytes decode to some symbols, so that damage is not seen here; no more is held than is asked for.
    """

    def __init__(self, data: bytes) -> None:
        self._library = optional("constriction", "compress", "compress")
        # ANS never leaves a leading zero word: one there was put there by somebody.
        if len(data) % 4 or data[-4:] == b"\0\0\0\0":
            raise CheckpointError(
                "decompress", f"coded symbols must be whole words, the last not 0, got {len(data)} bytes"
            )
        words = np.frombuffer(data, dtype="<u4").astype(np.uint32)
        self._coder = self._library.stream.stack.AnsCoder(words)

    def model(self, table: bytes) -> Any:
        """Return what `take` needs to know of a stream."""
        return _model(self._library, table)

    def take(self, count: int, model: Any) -> NDArray[np.int32]:
        """Return the next `count` symbols of a stream, int32."""
        # One symbol only: it is known without a bit.
        if model is None:
            return np.zeros(count, dtype=np.int32)
        symbols: NDArray[np.int32] = self._coder.decode(model, count)
        return symbols

    def is_empty(self) -> bool:
        """Return whether nothing is left, as it must be at the end."""
        return bool(self._coder.is_empty())


def _model(library: Any, table: bytes) -> Any:
    """Return the distribution of a table; None where there is but one symbol, which takes no bits."""
    if len(table) < 2:
        return None
    weights = [_EIGHTHS[(byte - 1) % 8] * 2.0 ** ((byte - 1) // 8) if byte else 0.0 for byte in table]
    if not any(weights):
        raise CheckpointError(
            "decompress", "table of symbols must hold one that occurs, got none", "the file is damaged"
        )
    # perfect=False is the library's stable way of rounding: sums and products of float64, the same on every machine
    return library.stream.model.Categorical(np.array(weights), perfect=False)


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
    # prepend -1: the zeros before the first weight are places[0] - (-1) - 1.
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
    # The relative index of Deep Compression (Han et al. 2016, arXiv:1510.00149, figure 2): a run of at least 2^b - 1
    # zeros is told by fillers, each 2^b - 1 zeros without a weight, and a last symbol. runs // filler + 1 symbols a
    # run.
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
    # A symbol s < filler passes s zeros and its weight; a filler passes 2^b - 1 zeros.
    after = start + np.cumsum(symbols.astype(np.int64) + has_weight)
    return after[has_weight] - 1, int(after[-1]) if len(after) else start


def smallest_width(runs: Ints) -> tuple[int, float]:
    """Return the bits of a gap that give the fewest coded bits, the table of the symbols included, and those bits.

    Example:
        >>> smallest_width(np.full(1000, 2))[0]
        2
    """
    # Few widths, so each is counted: the best one depends on the whole distribution of runs.
    cost = {bits: _gap_bits(runs, bits) for bits in WIDTHS}
    best = min(cost, key=lambda bits: cost[bits])
    return best, cost[best]


def _gap_bits(runs: Ints, bits: int) -> float:
    filler = 2**bits - 1
    # As `gap_symbols` would give, counted without making them.
    counts = np.bincount(runs % filler, minlength=filler + 1)
    counts[filler] = int((runs // filler).sum())
    return coded_bits(counts)
