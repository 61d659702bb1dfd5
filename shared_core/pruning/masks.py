"""From scores to masks: exact counts, ties broken the same way on every machine; single weights, N:M and blocks.

N:M keeps N of every M neighbours along the input axis; blocks keep or prune whole tiles of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from eff_kernels.masks import n_of_m_mask
from eff_kernels.pruning import keep_largest_, kth_smallest
from torch import Tensor

from shared_core.errors import ConfigError


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


_PIECE = 1 << 21
_HELD = 12_000_000


@torch.no_grad()
def prune_mask(scores: Tensor, sparsity: float) -> Tensor:
    """Return which elements to keep: the lowest scores go, exactly ``n - round(sparsity·n)`` stay.

    ``round`` is Python's (halves to even). Among equal scores the lowest flat index is kept.

    Args:
        scores: Floating point, any shape (also 0-d and empty) and device. Infinities are fine.
        sparsity: Share of elements to prune, in [0, 1].

    Returns:
        bool tensor of the same shape and device, True = keep.

    Raises:
        ConfigError: If `sparsity` is not in [0, 1], or a score is NaN or not floating point.

    Example:
        >>> prune_mask(torch.tensor([3.0, 1.0, 2.0, 1.0]), 0.25)
        tensor([ True,  True,  True, False])
    """
    return _masks([scores], round(_checked(sparsity) * scores.numel()))[0]


@torch.no_grad()
def prune_masks(scores: Sequence[Tensor], sparsity: float, most: Sequence[int] | None = None) -> list[Tensor]:
    """Return which elements of several tensors to keep when all compete under one threshold.

    ``round(sparsity·n)`` of all n elements go, lowest scores first; among equal scores the earlier tensor,
    then the lowest flat index is kept. Each tensor keeps at least its best element, so that none is ever
    emptied, and loses `most` elements at most: what it may not give, the others give. The count is exact, unless all
    together may not give as much.

    Args:
        scores: Floating point, any shapes. Read by index, several times: may be computed on access.
        sparsity: Share of all elements to prune, in [0, 1].
        most: How many elements of each tensor may go; its scores of -inf go beyond that, as they are pruned already.

    Returns:
        bool tensors of the same shapes and devices, True = keep.

    Raises:
        ConfigError: If `sparsity` is not in [0, 1], or a score is NaN or not floating point.

    Example:
        >>> prune_masks([torch.tensor([9.0, 1.0, 8.0]), torch.tensor([0.1])], 0.5)
        [tensor([ True, False, False]), tensor([True])]
        >>> prune_masks([torch.tensor([0.3, 0.1, 0.2]), torch.tensor([9.0, 8.0, 7.0])], 0.5, most=[1, 2])
        [tensor([ True, False,  True]), tensor([ True, False, False])]
    """
    sizes = [tensor.numel() for tensor in getattr(scores, "tensors", scores)]
    limits = [max(min(size - 1, limit), 0) for size, limit in zip(sizes, most or sizes, strict=True)]
    left = min(round(_checked(sparsity) * sum(sizes)), sum(limits))
    masks: dict[int, Tensor] = {}
    competing = list(range(len(sizes)))
    while competing:
        masks |= zip(competing, _masks(some(scores, competing), left), strict=True)
        over = [i for i in competing if sizes[i] - count_kept(masks[i]) > limits[i]]
        if not over:
            break
        # one that gives less makes the others give more, so that what is over its limit now is so in the end
        for i in over:
            limits[i] = max(limits[i], min(int(scores[i].eq(-torch.inf).count_nonzero()), sizes[i] - 1))
            masks[i] = _masks([scores[i]], limits[i])[0]
            left -= limits[i]
        competing = [i for i in competing if i not in over]
    return [masks[i] for i in range(len(sizes))]


def count_kept(mask: Tensor) -> int:
    """Return how many elements of a mask are True."""
    # numpy counts bool thirty times as fast as torch 2.13 does on a CPU
    return int(np.count_nonzero(mask.numpy()) if mask.is_cpu else mask.count_nonzero())


def some(scores: Sequence[Tensor], chosen: list[int]) -> Sequence[Tensor]:
    """Return the scores at some places; what is computed on access stays so."""
    if len(chosen) == len(scores):
        return scores
    return [scores[i] for i in chosen] if isinstance(scores, list | tuple) else _Some(scores, chosen)


class _Some(Sequence[Tensor]):
    """Some of the scores that are computed on access."""

    def __init__(self, scores: Any, chosen: list[int]) -> None:
        self._scores, self._chosen = scores, chosen
        self.tensors = [getattr(scores, "tensors", scores)[i] for i in chosen]
        part = getattr(scores, "part", None)
        self.part = part and (lambda i, where: part(chosen[i], where))
        self.floor = getattr(scores, "floor", None)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        found: Tensor = self._scores[self._chosen[index]]
        return found


def _checked(sparsity: float) -> float:
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"prune_mask: sparsity must be in [0, 1], got {sparsity!r}")
    return float(sparsity)


def _comparable(scores: Tensor) -> Tensor:
    scores = scores.detach()
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def _refuse_nan(scores: Tensor, index: int) -> None:
    flat = scores.reshape(-1)
    if not flat.numel():
        return
    peak = int(flat.numpy().argmax()) if flat.is_cpu else int(flat.argmax())  # a NaN counts as largest
    if flat[peak].isnan():
        raise ConfigError(f"prune_mask: scores must not be NaN, got one in tensor {index} at flat index {peak}")


def _masks(scores: Sequence[Tensor], num_pruned: int) -> list[Tensor]:
    return _masks_by_sample(scores, num_pruned) or _masks_by_histogram(scores, num_pruned)


def _masks_by_sample(scores: Sequence[Tensor], num_pruned: int) -> list[Tensor] | None:
    """Return the masks in one pass over the scores, on CPU; None where that cannot be."""
    like: Sequence[Tensor] = getattr(scores, "tensors", scores)
    numel = sum(tensor.numel() for tensor in like)
    if not 0 < num_pruned < numel or len({(tensor.dtype, tensor.device.type) for tensor in like}) > 1:
        return None
    if like[0].device.type != "cpu" or not like[0].is_floating_point():
        return None

    part = getattr(scores, "part", None)
    if part is None:
        if not isinstance(scores, list | tuple):
            return None  # scores computed on access would be computed whole for every slice

        def part(index: int, where: slice) -> Tensor:
            return _comparable(scores[index].reshape(-1)[where])

    masks = [torch.empty(tensor.shape, dtype=torch.bool) for tensor in like]
    try:
        threshold = keep_largest_(masks, part, num_pruned)
    except ValueError:
        return None  # the other way names the place of the NaN
    floor: float | None = getattr(scores, "floor", None)
    if threshold is None or (floor is not None and threshold <= floor):
        return None  # a live weight may tie with a pruned one
    return masks


def _masks_by_histogram(scores: Sequence[Tensor], num_pruned: int) -> list[Tensor]:
    masks: list[Tensor] = []
    held: list[Tensor] = []
    dtype = torch.float32
    numel = 0
    for i in range(len(scores)):
        score = scores[i]
        numel += score.numel()
        # few scores are computed once and held; of many only one tensor's at a time
        held = [*held, score] if numel <= _HELD else []
        if not score.is_floating_point():
            raise ConfigError(f"prune_mask: scores must be floating point, got {score.dtype} in tensor {i}")
        dtype = torch.float64 if score.dtype == torch.float64 else dtype
        _refuse_nan(_comparable(score), i)
        masks.append(torch.ones(score.shape, dtype=torch.bool, device=score.device))
        del score
    scores = held if numel <= _HELD else scores
    if not num_pruned:
        return masks
    threshold = kth_smallest(scores, num_pruned, dtype=dtype)
    ties_to_keep = numel - num_pruned
    for i, mask in enumerate(masks):
        torch.gt(_comparable(scores[i]), threshold, out=mask)
        ties_to_keep -= int(mask.count_nonzero())
    for i, mask in enumerate(masks):
        if not ties_to_keep:
            break
        ties_to_keep -= _keep_ties_(mask, _comparable(scores[i]), threshold, ties_to_keep)
    return masks


def _keep_ties_(mask: Tensor, scores: Tensor, threshold: float, count: int) -> int:
    """Keep the first `count` elements that equal the threshold; return how many there were to keep."""
    kept = 0
    for piece, score in zip(torch.split(mask.view(-1), _PIECE), torch.split(scores.reshape(-1), _PIECE), strict=True):
        ties = ((score == threshold) & ~piece).nonzero().view(-1)[: count - kept]
        piece[ties] = True
        kept += ties.numel()
    return kept


@torch.no_grad()
def nm_mask(weight: Tensor, n: int, m: int, *, axis: int = 1) -> Tensor:
    """Return which elements to keep: of every `m` neighbours along the input axis the `n` of largest magnitude.

    Among equal magnitudes the lowest index is kept (Mishra et al. 2021, arXiv:2104.08378: 2:4).

    Args:
        weight: Floating point scores or weights, two or more dimensions, without NaN.
        n: How many of each group stay, from 1 to `m`.
        m: Size of a group, at least 1; divides the input axis.
        axis: The input axis: 1 for `torch.nn.Linear` and convolutions, 0 for transposed ones.

    Returns:
        bool tensor of the same shape and device, True = keep; each group holds exactly `n`.

    Raises:
        ConfigError: If `n` or `m` is out of range, `m` does not divide the axis, or an element is NaN.

    Example:
        >>> nm_mask(torch.tensor([[0.1, -3.0, 2.0, 2.0]]), 2, 4)
        tensor([[False,  True,  True, False]])
    """
    if not (isinstance(n, int) and isinstance(m, int) and 1 <= n <= m):
        raise ConfigError(f"nm_mask: n must be in [1, m], both whole numbers, got n = {n!r}, m = {m!r}")
    if weight.ndim < 2 or not -weight.ndim <= axis < weight.ndim or weight.shape[axis] % m:
        raise ConfigError(
            f"nm_mask: the input axis must be a multiple of m = {m}, got axis {axis} of shape {tuple(weight.shape)}"
        )
    return nm_mask_of_scores(weight.detach().abs(), n, m, axis=axis)


@torch.no_grad()
def nm_mask_of_scores(scores: Tensor, n: int, m: int, *, axis: int) -> Tensor:
    """Return `nm_mask` of scores, whose sign counts: the `n` largest of each group stay."""
    try:
        return n_of_m_mask(scores, n, m, axis)
    except ValueError as error:
        raise ConfigError("nm_mask: scores must not be NaN") from error
