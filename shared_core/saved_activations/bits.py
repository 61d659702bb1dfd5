"""Booleans as bits, and the values that they choose, on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# byte i of eight booleans times 2^(63 - 9i) has its bit in the top byte, at 7 - i; no two terms overlap
_MAGIC = 0x8040201008040201 - (1 << 64)
_ONES = 0x0101010101010101
_CHUNK = 1 << 18  # bounds the 64-bit indices that are needed for a moment


def pack_bits(mask: Tensor) -> Tensor:
    """Return booleans as bits, the first in the highest bit of the first byte.

    Args:
        mask: (n,) bool, contiguous.

    Returns:
        (⌈n/8⌉,) uint8, the last byte filled up with zeros.

    Example:
        >>> pack_bits(torch.tensor([True, False, True]))
        tensor([160], dtype=torch.uint8)
    """
    if mask.numel() % 8 or mask.storage_offset() % 8:
        whole = mask.new_zeros(mask.numel() + -mask.numel() % 8)
        whole[: mask.numel()] = mask
        mask = whole
    return ((mask.view(torch.int64) * _MAGIC) >> 56).to(torch.uint8)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """Return the first `count` booleans that `pack_bits` packed.

    Example:
        >>> unpack_bits(torch.tensor([160], dtype=torch.uint8), 3)
        tensor([ True, False,  True])
    """
    return (((bits.to(torch.int64) * _MAGIC) >> 7) & _ONES).view(torch.bool)[:count]


def take(flat: Tensor, mask: Tensor) -> Tensor:
    """Return the values where `mask` is true, in order.

    Args:
        flat: (n,) of any dtype.
        mask: (n,) bool.

    Example:
        >>> take(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([True, False, True]))
        tensor([5., 7.])
    """
    if flat.device.type != "cpu":
        return flat[mask]
    return torch.cat([part.gather(0, _places(m)) for part, m in zip(_chunks(flat), _chunks(mask), strict=True)])


def put(values: Tensor, mask: Tensor) -> Tensor:
    """Return zeros with the values, in order, where `mask` is true: what `take` took.

    Example:
        >>> put(torch.tensor([5.0, 7.0]), torch.tensor([True, False, True]))
        tensor([5., 0., 7.])
    """
    flat = values.new_zeros(mask.numel())
    if flat.device.type != "cpu":
        return flat.masked_scatter_(mask, values)
    start = 0
    for part, m in zip(_chunks(flat), _chunks(mask), strict=True):
        places = _places(m)
        part.scatter_(0, places, values[start : start + len(places)])
        start += len(places)
    return flat


def _places(mask: Tensor) -> Tensor:
    # torch's own nonzero, and with it masks as indices, take some ten times longer on a CPU (torch 2.13)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = flat.split(_CHUNK)  # type: ignore[no-untyped-call]
    return parts
