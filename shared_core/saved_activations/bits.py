"""Booleans as bits, on any device, without a pass that reads values on the host."""

from __future__ import annotations

import torch
from torch import Tensor

# byte i of eight booleans times 2^(63 - 9i) has its bit in the top byte, at 7 - i; no two terms overlap
_MAGIC = 0x8040201008040201 - (1 << 64)
_ONES = 0x0101010101010101


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
