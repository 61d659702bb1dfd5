"""Masks as they are saved: eight weights to a byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from eff_kernels.masks import pack_bits, unpack_bits
from torch import Tensor


def pack_mask(mask: Tensor) -> Tensor:
    """Return a mask, eight weights to a byte, as uint8 on CPU.

    Example:
        >>> pack_mask(torch.tensor([True, False, True]))
        tensor([160], dtype=torch.uint8)
    """
    return pack_bits(mask).cpu()


def packed_size(shape: Sequence[int]) -> int:
    """Return how many bytes `pack_mask` makes of a mask of this shape."""
    return -(-math.prod(shape) // 8)


def unpack_mask(packed: Tensor, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return what `pack_mask` packed, of this shape, on a device; the bytes travel there packed.

    Example:
        >>> unpack_mask(torch.tensor([160], dtype=torch.uint8), (3,))
        tensor([ True, False,  True])
    """
    return unpack_bits(packed.to(device), shape)
