"""Block sparsity: tiles of a matrix are kept or pruned whole."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def block_scores(scores: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the mean score of every tile of ``block[0]`` outputs times ``block[1]`` inputs.

    Trailing dimensions (a kernel) belong to the inputs: a convolution's weight is the matrix
    ``(n_out, n_in·k_h·k_w)``. Tiles at the edge may be smaller; their mean is of what they hold.

    Args:
        scores: Two or more dimensions, floating point.
        block: Rows and columns of a tile, at least 1 each.

    Returns:
        Tensor of shape ``(ceil(rows/block[0]), ceil(columns/block[1]))``.

    Example:
        >>> block_scores(torch.tensor([[1.0, 3.0, 5.0]]), (1, 2))
        tensor([[2., 5.]])
    """
    matrix = scores.reshape(scores.shape[0], -1)
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    return tiles.sum((1, 3)) / _sizes(rows, block[0], scores)[:, None] / _sizes(columns, block[1], scores)


def _sizes(length: int, block: int, like: Tensor) -> Tensor:
    starts = torch.arange(0, length, block, device=like.device)
    return (length - starts).clamp(max=block).to(like.dtype)


@torch.no_grad()
def expand_blocks(mask: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Return the mask of elements that a mask of tiles means, of the weight's shape.

    Example:
        >>> expand_blocks(torch.tensor([[True, False]]), torch.Size([1, 3]), (1, 2))
        tensor([[ True,  True, False]])
    """
    columns = shape[1:].numel()
    full = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], :columns].reshape(shape)
