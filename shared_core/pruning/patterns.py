"""Masks with a fixed pattern (tiles, N:M, rows), and Erdős–Rényi sparsities.

N:M keeps N of every M neighbors along the input axis. Blocks keep or prune whole tiles of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from eff_kernels.masks import ranked_n_of_m
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.errors import ConfigError
from shared_core.modules.weight_views import from_output_rows, output_rows
from shared_core.numerics.deferred_checks import refuse


def erdos_renyi_sparsities(
    shapes: Sequence[Sequence[int]], sparsity: float, *, kernel: bool = False, most: float = 1.0
) -> list[float]:
    """Return a sparsity for each tensor, higher for larger ones, so that all together reach `sparsity`.

    Density is ``ε·(n_in + n_out)/(n_in·n_out)``, or with `kernel` ``ε·(n_in + n_out + k_h + k_w)/numel``, clipped to
    [``1 - most``, 1]. After clipping, ε is solved again for the other tensors (Mocanu et al. 2018, arXiv:1707.04780;
    Evci et al. 2020, arXiv:1911.11134).

    Args:
        shapes: Of two or more dimensions, ``(n_out, n_in, *kernel)``.
        sparsity: Share of all elements to prune, in [0, 1].
        kernel: If True, include kernel sizes (Erdős–Rényi kernel).
        most: The largest sparsity of one tensor, at least `sparsity`.

    Raises:
        ConfigError: If `sparsity` is not in [0, 1], or a shape has fewer than two dimensions or no elements.

    Example:
        >>> [round(share, 4) for share in erdos_renyi_sparsities([(4, 4), (64, 64)], 0.9)]
        [0.0, 0.9035]
    """
    checked(sparsity, float, "erdos_renyi_sparsities", "sparsity", low=0, high=1)
    numels, shares = [], []
    for shape in shapes:
        numel = math.prod(shape)
        if len(shape) < 2 or not numel:
            rule = f"shapes must have two dimensions or more and hold weights, got {tuple(shape)}"
            raise ConfigError("erdos_renyi_sparsities", rule)
        numels.append(numel)
        # Without kernel sizes a convolution counts as an n_out x n_in matrix of kernels.
        shares.append(sum(shape) / numel if kernel else sum(shape[:2]) / (shape[0] * shape[1]))
    fixed: dict[int, float] = {}  # densities
    kept = (1 - sparsity) * sum(numels)
    # Density ε · share, clipped to [1 - most, 1]. Clipped tensors are fixed and ε is found again for the others,
    # until none is clipped: at most one round for each tensor.
    while True:
        open_ = [i for i in range(len(numels)) if i not in fixed]
        weight = sum(shares[i] * numels[i] for i in open_)
        # ε follows from Σ ε share_i n_i = the number of weights that the open tensors must keep.
        epsilon = (kept - sum(density * numels[i] for i, density in fixed.items())) / weight if weight else 0.0
        over = {i: 1.0 for i in open_ if epsilon * shares[i] > 1}
        under = {i: 1 - most for i in open_ if epsilon * shares[i] < 1 - most}
        if not over and not under:
            return [1 - fixed.get(i, max(0.0, epsilon) * shares[i]) for i in range(len(numels))]
        # Clipping at 1 raises ε for the others, clipping at 1 - most lowers it. Fix only the side that dominates: its
        # tensors stay clipped whatever happens to the others.
        surplus = sum((epsilon * shares[i] - density) * numels[i] for i, density in (over | under).items())
        fixed |= (over if surplus >= 0 else {}) | (under if surplus <= 0 else {})


@torch.no_grad()
def block_scores(scores: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the mean score of every tile of ``block[0]`` outputs times ``block[1]`` inputs.

    Trailing dimensions (a kernel) belong to the inputs: a convolution's weight is the matrix
    ``(n_out, n_in·k_h·k_w)``. Tiles at the edge may be smaller; their mean covers only the elements they have.

    Returns:
        Tensor of shape ``(ceil(rows/block[0]), ceil(columns/block[1]))``.
    """
    matrix = scores.reshape(scores.shape[0], -1)
    rows, columns = matrix.shape
    # A tile at the border is padded with zeros and divided by its own number of elements.
    padded = torch.nn.functional.pad(matrix, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    return tiles.sum((1, 3)) / _sizes(rows, block[0], scores)[:, None] / _sizes(columns, block[1], scores)


def _sizes(length: int, block: int, like: Tensor) -> Tensor:
    starts = torch.arange(0, length, block, device=like.device)
    return (length - starts).clamp(max=block).to(like.dtype)


@torch.no_grad()
def expand_blocks(mask: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Expand a mask of tiles to a mask of elements with the weight's shape."""
    columns = shape[1:].numel()
    full = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], :columns].reshape(shape)


@torch.no_grad()
def nm_mask(weight: Tensor, n: int, m: int, *, axis: int = 1) -> Tensor:
    """Return the mask that keeps, of every `m` neighbors along the input axis, the `n` of largest magnitude.

    Among equal magnitudes the lowest index is kept (Mishra et al. 2021, arXiv:2104.08378: 2:4).

    Args:
        weight: Floating point scores or weights, two or more dimensions, without NaN.
        n: How many of each group are kept, from 1 to `m`.
        m: Group size, at least 1. It must divide the input axis.
        axis: The input axis: 1 for `torch.nn.Linear` and convolutions, 0 for transposed ones.

    Returns:
        bool tensor of the same shape and device, True = keep; each group holds exactly `n`.

    Raises:
        ConfigError: If `n` or `m` is out of range, `m` does not divide the axis, or an element is NaN.

    Example:
        >>> nm_mask(torch.tensor([[0.1, -3.0, 2.0, 2.0]]), 2, 4)
        tensor([[False,  True,  True, False]])
    """
    rule = ""
    if not (isinstance(n, int) and isinstance(m, int) and 1 <= n <= m):
        rule = f"n must be in [1, m], both whole numbers, got n = {n!r}, m = {m!r}"
    elif weight.ndim < 2 or not -weight.ndim <= axis < weight.ndim or weight.shape[axis] % m:
        rule = f"the input axis must be a multiple of m = {m}, got axis {axis} of shape {tuple(weight.shape)}"
    if rule:
        raise ConfigError("nm_mask", rule)
    return nm_mask_of_scores(weight.detach(), n, m, axis=axis, magnitudes=True)


@torch.no_grad()
def nm_mask_of_scores(scores: Tensor, n: int, m: int, *, axis: int, magnitudes: bool = False) -> Tensor:
    """Return `nm_mask` of scores: the `n` largest of each group are kept, by magnitude if `magnitudes`."""
    mask, has_nan = ranked_n_of_m(scores, n, m, axis, magnitudes=magnitudes)
    refuse(has_nan, lambda: ConfigError("nm_mask", "scores must not be NaN"))
    return mask


@torch.no_grad()
def row_mask(module: nn.Module, scores: Tensor, sparsity: float) -> Tensor:
    """Return the mask when the weights of one output compete with each other, as in Wanda.

    Of n weights per output exactly ``n - round(sparsity·n)`` are kept, at least one. Of equal scores the lowest index
    is kept (Sun et al. 2023, arXiv:2306.11695).

    Args:
        module: The layer whose ``weight`` is scored.
        scores: Scores with the shape of the weight.
        sparsity: Share to prune, in [0, 1].
    """
    rows = output_rows(module, scores)
    # A row's ranking is n of m with m = the row length.
    kept = max(1, rows.shape[1] - round(sparsity * rows.shape[1]))
    mask = nm_mask_of_scores(rows, kept, rows.shape[1], axis=1)
    return from_output_rows(module, mask, scores.shape)
