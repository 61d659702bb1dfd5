"""From scores to masks: exact counts, ties broken the same way on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from eff_kernels.pruning import keep_largest_, kth_smallest
from torch import Tensor

from shared_core.errors import ConfigError

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
    return _masks([scores], _checked(sparsity), protect=False)[0]


@torch.no_grad()
def prune_masks(scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Return which elements of several tensors to keep when all compete under one threshold.

    ``round(sparsity·n)`` of all n elements go, lowest scores first; among equal scores the earlier tensor,
    then the lowest flat index is kept. Each tensor keeps at least its best element, so that none is ever
    emptied; the count is still exact, unless it would leave fewer elements than there are tensors: then each
    keeps one.

    Args:
        scores: Floating point, any shapes. Read by index, several times: may be computed on access.
        sparsity: Share of all elements to prune, in [0, 1].

    Returns:
        bool tensors of the same shapes and devices, True = keep.

    Raises:
        ConfigError: If `sparsity` is not in [0, 1], or a score is NaN or not floating point.

    Example:
        >>> prune_masks([torch.tensor([9.0, 1.0, 8.0]), torch.tensor([0.1])], 0.5)
        [tensor([ True, False, False]), tensor([True])]
    """
    return _masks(scores, _checked(sparsity), protect=True)


def _checked(sparsity: float) -> float:
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"prune_mask: sparsity must be in [0, 1], got {sparsity!r}")
    return float(sparsity)


def _comparable(scores: Tensor) -> Tensor:
    scores = scores.detach()
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def _peak(scores: Tensor, index: int) -> int:
    """Return the flat index of the first largest score; a NaN counts as largest, so one pass finds it too."""
    flat = scores.reshape(-1)
    peak = int(flat.numpy().argmax()) if flat.is_cpu else int(flat.argmax())
    if flat[peak].isnan():
        raise ConfigError(f"prune_mask: scores must not be NaN, got one in tensor {index} at flat index {peak}")
    return peak


def _masks(scores: Sequence[Tensor], sparsity: float, protect: bool) -> list[Tensor]:
    return _masks_by_sample(scores, sparsity, protect) or _masks_by_histogram(scores, sparsity, protect)


def _masks_by_sample(scores: Sequence[Tensor], sparsity: float, protect: bool) -> list[Tensor] | None:
    """Return the masks in one pass over the scores, on CPU; None where that cannot be."""
    like: Sequence[Tensor] = getattr(scores, "tensors", scores)
    numel = sum(tensor.numel() for tensor in like)
    num_pruned = round(sparsity * numel)
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
    if protect and not all(mask.numpy().any() for mask in masks if mask.numel()):  # numpy's stops at the first
        return None
    return masks


def _masks_by_histogram(scores: Sequence[Tensor], sparsity: float, protect: bool) -> list[Tensor]:
    peaks: list[int] = []
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
        peaks.append(_peak(_comparable(score), i) if score.numel() else -1)
        masks.append(torch.ones(score.shape, dtype=torch.bool, device=score.device))
        del score
    protected = [peak if protect else -1 for peak in peaks]
    scores = held if numel <= _HELD else scores
    num_kept = max(numel - round(sparsity * numel), sum(peak >= 0 for peak in protected))
    if num_kept == numel:
        return masks
    threshold = kth_smallest(scores, numel - num_kept, dtype=dtype, leave_out=protected)
    ties_to_keep = num_kept
    for i, (mask, peak) in enumerate(zip(masks, protected, strict=True)):
        torch.gt(_comparable(scores[i]), threshold, out=mask)
        if peak >= 0:
            mask.view(-1)[peak] = True
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
