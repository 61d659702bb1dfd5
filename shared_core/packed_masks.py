"""Masks as they are saved: eight weights to a byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pack_mask(mask: Tensor) -> Tensor:
    """Return a mask, eight weights to a byte, as uint8 on CPU.

    Example:
        >>> pack_mask(torch.tensor([True, False, True]))
        tensor([160], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def packed_size(shape: Sequence[int]) -> int:
    """Return how many bytes `pack_mask` makes of a mask of this shape."""
    return -(-int(np.prod(shape)) // 8)


def unpack_mask(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what `pack_mask` packed, of this shape, on CPU.

    Example:
        >>> unpack_mask(torch.tensor([160], dtype=torch.uint8), (3,))
        tensor([ True, False,  True])
    """
    bits = np.unpackbits(packed.cpu().numpy(), count=int(np.prod(shape))).view(bool)
    return torch.from_numpy(bits).view(tuple(shape))
