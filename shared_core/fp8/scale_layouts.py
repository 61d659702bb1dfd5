"""Where torch's block-scaled matmul wants scales to lie in memory: rearrangements alone, no arithmetic.

Sources: cuBLAS documentation, "Scaling factors layouts"; the checks of torch's ``ScaledBlas.cpp``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from eff_kernels.fp8 import Scaled
from torch import Tensor

_ALIGNED = 4  # scales along K in one 16-byte unit of float32, and in one tile of e8m0
_TILE_ROWS, _GROUP = 128, 32


def whole_blocks(matrix: Scaled, multiple: int) -> Scaled:
    """Return a matrix with zeros appended to both axes up to a multiple; new blocks have the scale 1.

    Zeros add nothing to a product, and products of whole blocks are those that cuBLAS is known to do.

    Args:
        matrix: (R, K), with a scale a block of finite size.
        multiple: A multiple of both sides of its block.

    Example:
        >>> one = Scaled(torch.ones(16, 48).to(torch.float8_e4m3fn), torch.ones(16, 2), (1, 32))
        >>> padded = whole_blocks(one, 32)
        >>> padded.codes.shape, padded.scale.shape
        (torch.Size([32, 64]), torch.Size([32, 2]))
    """
    down, right = (-size % multiple for size in matrix.codes.shape)
    if not (down or right):
        return matrix
    # as bytes: not every device pads float8, and the code of zero is zero
    codes = F.pad(matrix.codes.view(torch.uint8), (0, right, 0, down)).view(matrix.codes.dtype)
    rows, columns = (size // side for size, side in zip(codes.shape, matrix.block, strict=True))
    below, beside = rows - matrix.scale.shape[0], columns - matrix.scale.shape[1]
    return Scaled(codes, F.pad(matrix.scale, (0, beside, 0, below), value=1.0), matrix.block)


def outer_major(scale: Tensor) -> Tensor:
    """Return scales of 1x128 blocks, (R, L), with rows next to each other in memory: strides (1, R).

    Example:
        >>> outer_major(torch.ones(3, 2)).stride()
        (1, 3)
    """
    rows, along = scale.shape
    # a new tensor: of one block along K, contiguous() would keep whatever stride there is
    return scale.new_empty(along, rows).copy_(scale.t()).t()


def inner_major(scale: Tensor) -> Tensor:
    """Return scales of 128x128 blocks, (T, L), as (L4, T) of strides (1, L4), L4 = L rounded up to a multiple of 4.

    Without the padding cuBLAS reads wrong scales and says nothing.

    Example:
        >>> at = inner_major(torch.ones(3, 5))
        >>> at.shape, at.stride()
        (torch.Size([8, 3]), (1, 8))
    """
    tiles, along = scale.shape
    padded = scale.new_ones(tiles, along + -along % _ALIGNED)
    padded[:, :along] = scale
    return padded.t()


def swizzled_e8m0(scale: Tensor) -> Tensor:
    """Return power-of-two scales of 1x32 blocks, (R, C), as e8m0 in the layout that is called 32x4x4.

    Tiles of 128 rows by 4 columns follow one another, row of tiles after row of tiles; in a tile, scale (r, c) is byte
    ``16·(r mod 32) + 4·⌊r/32⌋ + c``. What fills the last tiles is 2^-127.

    Args:
        scale: Powers of two from 2^-126 to 2^127, or NaN; float32.

    Returns:
        float8_e8m0fnu, one axis of 512·⌈R/128⌉·⌈C/4⌉.

    Example:
        >>> scale = torch.ones(40, 2)
        >>> scale[33, 1] = 2.0
        >>> swizzled_e8m0(scale).view(torch.uint8)[16 * 1 + 4 * 1 + 1].item()  # 2^(128 - 127)
        128
    """
    # e8m0 is float32's exponent field, its NaN too; float8 of that kind converts and copies on few devices
    codes = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    codes = F.pad(codes, (0, -scale.shape[1] % _ALIGNED, 0, -scale.shape[0] % _TILE_ROWS))
    tiles = codes.view(-1, _TILE_ROWS // _GROUP, _GROUP, codes.shape[1] // _ALIGNED, _ALIGNED)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)
