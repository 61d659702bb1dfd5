"""The product of signs packed into bits: XNOR and popcount, on CPUs, without a compiler.

torch has no popcount, so numpy counts: with the processor's instruction from numpy 2.0 on, before that with a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_PART = 1 << 16  # words of a part, which stay in cache with their counts
_WORDS = 3  # whose counts of up to 64 fit into 8 bits
_COUNTS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def pack_signs(x: Tensor) -> Tensor:
    """Return the signs along the last axis as bits, 8 per byte: 1 for negative values, 0 for others, zero and padding.

    Args:
        x: Any shape, on a CPU.

    Returns:
        uint8, (..., ceil(width / 8)).

    Example:
        >>> pack_signs(torch.tensor([[-1.0, 1.0, 0.0, -2.0, 1.0, 1.0, 1.0, 1.0, -3.0]])).tolist()
        [[144, 128]]
    """
    return torch.from_numpy(np.packbits((x < 0).numpy(), axis=-1))


def unpack_signs(bits: Tensor, width: int) -> Tensor:
    """Undo `pack_signs`: return the signs as int8, −1 and 1.

    Args:
        bits: From `pack_signs`, (..., bytes), on any device.
        width: Number of signs along the last axis.

    Example:
        >>> unpack_signs(torch.tensor([[144, 128]], dtype=torch.uint8), 9).tolist()
        [[-1, 1, 1, -1, 1, 1, 1, 1, -1]]
    """
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    found = bits.unsqueeze(-1).bitwise_right_shift(places).bitwise_and_(1).flatten(-2)[..., :width]
    return 1 - 2 * found.to(torch.int8)


def product_words(weight: Tensor) -> Tensor:
    """Return a weight's packed signs in the layout of `xnor_product`: int64, (words, outputs).

    Args:
        weight: From `pack_signs`, (outputs, bytes), on a CPU.

    Example:
        >>> product_words(pack_signs(torch.ones(3, 200))).shape
        torch.Size([4, 3])
    """
    return torch.from_numpy(np.ascontiguousarray(_words(weight).T).view(np.int64))


def xnor_product(x: Tensor, weight: Tensor, width: int) -> Tensor:
    """Return the products of rows of signs as int32, (rows, outputs): ``width − 2·popcount(x xor w)``.

    Args:
        x: Packed signs, (rows, bytes), on a CPU.
        weight: From `product_words`.
        width: Number of signs in a row. Bits beyond it are 0 in both.

    Source: Rastegari et al. 2016, arXiv:1603.05279, section 3.2.

    Example:
        >>> rows = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
        >>> xnor_product(pack_signs(rows), product_words(pack_signs(rows)), 3).tolist()
        [[3, -1], [-1, 3]]
    """
    rows, columns = _words(x), weight.numpy().view(np.uint64)
    turned = len(rows) > columns.shape[1]  # numpy is fast along the longer axis
    if turned:
        rows, columns = columns.T, np.ascontiguousarray(rows.T)
    found = np.empty((len(rows), columns.shape[1]), np.int32)
    step = max(1, _PART // max(1, columns.shape[1]))
    for begin in range(0, len(rows), step):
        found[begin : begin + step] = _differing(rows[begin : begin + step], columns)
    np.subtract(width, 2 * found, out=found)
    return torch.from_numpy(found.T if turned else found)


def _words(packed: Tensor) -> Any:
    """Return bytes as words of 64 bits, filled up with 0."""
    values = np.ascontiguousarray(packed.numpy())
    if missing := -values.shape[1] % 8:
        values = np.concatenate([values, np.zeros((len(values), missing), np.uint8)], 1)
    return values.view(np.uint64)


def _differing(rows: Any, columns: Any) -> Any:
    """Return how many bits of each row and column differ."""
    shape = len(rows), columns.shape[1]
    total, some = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
    words, counts = np.empty(shape, np.uint64), np.empty(shape, np.uint8)
    for place, column in enumerate(columns):
        np.bitwise_xor(rows[:, place, None], column, out=words)
        some += _popcount(words, counts)
        if place % _WORDS == _WORDS - 1 or place == len(columns) - 1:
            total += some
            some.fill(0)
    return total


def _popcount(words: Any, out: Any) -> Any:
    """Return the number of ones in each word, in `out` if numpy counts them itself."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words, out=out)
    return _COUNTS[words.view(np.uint8)].reshape(*words.shape, 8).sum(-1, dtype=np.uint8)
