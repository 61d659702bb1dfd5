"""The k-th smallest of scores on a GPU, and masks of the largest, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eff_kernels._triton.launch import runs_in_one_launch

_WIDTH = 32
_DIGITS = (8, 8, 16)
"""Bits per pass, from the top. Few scores share the first 16, so that counts of the last 16 rarely collide."""


def kth_smallest_key(scores: Sequence[Tensor], k: int, device: torch.device) -> Tensor:
    """Return the key of the k-th smallest score, int64 ``[1]`` on the device.

    A key is the float32's bits as an integer in the order of the floats, from 0 to 2^32 − 1.

    Args:
        scores: float16, bfloat16 or float32 on the device, without NaN; read by index once per pass.
        k: From 1 to the number of scores, which is not checked.
        device: Device of the scores.

    Example:
        >>> hex(kth_smallest_key([torch.tensor([4.0, -0.0, 0.0])], 2, torch.device("cpu")).item())
        '0x80000000'
    """
    rank = torch.full((1,), k, dtype=torch.int64, device=device)
    prefix = torch.zeros_like(rank)
    # Rank and prefix stay tensors, so that each pass gets the digit of the previous one without a host read.
    shift = _WIDTH
    for bits in _DIGITS:
        shift -= bits
        counts = torch.zeros(1 << bits, dtype=torch.int64, device=device)
        for i in range(len(scores)):
            count_digits_(counts, scores[i].detach().contiguous(), prefix, shift)
        cumulative = counts.cumsum(0)
        # clamp: a k beyond the count has no digit
        digit = torch.searchsorted(cumulative, rank).clamp_(max=len(counts) - 1)
        rank = rank - (cumulative - counts).gather(0, digit)
        prefix = prefix << bits | digit
    return prefix


@torch.library.custom_op("eff_kernels::count_digits_", mutates_args={"counts"})
def count_digits_(counts: Tensor, values: Tensor, prefix: Tensor, shift: int) -> None:
    """Add to `counts` how often each digit occurs in keys that begin with a prefix.

    Args:
        counts: int64 ``[2^bits]``.
        values: float16, bfloat16 or float32, contiguous.
        prefix: int64 ``[1]``, the bits of the keys above ``shift + bits``.
        shift: Number of bits below the digit.
    """
    if values.is_cuda:
        from eff_kernels._triton.pruning import count_digits_triton_

        with torch.cuda.device(values.device):
            count_digits_triton_(counts, values, prefix, shift)
        return
    bits = len(counts).bit_length() - 1
    # Keys: int32 bits of a float in the order of floats, negative ones flipped, then shifted to start at 0.
    patterns = (values.reshape(-1).float() + 0.0).view(torch.int32)  # + 0.0: -0.0 equals +0.0
    keys = (patterns ^ ((patterns >> 31) & 0x7FFFFFFF)).long() + (1 << 31)
    takes_part = keys >> (shift + bits) == prefix
    counts += torch.bincount((keys[takes_part] >> shift) & (len(counts) - 1), minlength=len(counts))


@count_digits_.register_fake
def _(counts: Tensor, values: Tensor, prefix: Tensor, shift: int) -> None:
    pass


_MARKED = (torch.float16, torch.bfloat16, torch.float32)


def marked_largest(scores: Sequence[Tensor], num_pruned: int) -> tuple[list[Tensor], Tensor] | None:
    """Return masks and the result of `mark_largest_`, without waiting for the device; None if Triton cannot run.

    Args:
        scores: Tensors of any shapes.
        num_pruned: Number of scores to prune, of all.
    """
    if not 0 < num_pruned <= sum(score.numel() for score in scores) or not runs_in_one_launch(scores):
        return None
    if not all(score.dtype in _MARKED and score.is_contiguous() for score in scores):
        return None
    masks = [torch.empty_like(score, dtype=torch.bool) for score in scores]
    told: Tensor = mark_largest_(masks, [score.detach() for score in scores], num_pruned)
    return masks, told


@torch.library.custom_op("eff_kernels::mark_largest_", mutates_args={"masks"})
def mark_largest_(masks: list[Tensor], scores: list[Tensor], num_pruned: int) -> Tensor:
    """Set each mask to False for the `num_pruned` smallest scores of all, else True.

    Of equal scores the earlier tensor, then the lowest flat index is kept.

    Args:
        masks: bool, contiguous, one per tensor of scores; overwritten.
        scores: float16, bfloat16 or float32, contiguous, on one device.
        num_pruned: Number of scores to prune, from 1 to the number of scores.

    Returns:
        int64 ``[n, 2]``: per tensor the number of kept scores, and nonzero if a score is NaN: masks are then undefined.
    """
    if scores[0].is_cuda:
        from eff_kernels._triton.pruning import mark_largest_triton_

        with torch.cuda.device(scores[0].device):
            return mark_largest_triton_(masks, scores, num_pruned)
    flat = torch.cat([score.reshape(-1).float() for score in scores])
    # from the end, so that of equal ones the last goes first
    order = flat.flip(0).argsort(stable=True)[:num_pruned]
    kept = torch.ones_like(flat, dtype=torch.bool)
    kept[len(flat) - 1 - order] = False
    for mask, part in zip(masks, torch.split(kept, [mask.numel() for mask in masks]), strict=True):
        mask.copy_(part.view(mask.shape))
    told = [[int(mask.count_nonzero()), int(score.isnan().any())] for mask, score in zip(masks, scores, strict=True)]
    return torch.tensor(told)


@mark_largest_.register_fake
def _(masks: list[Tensor], scores: list[Tensor], num_pruned: int) -> Tensor:
    return masks[0].new_empty(len(masks), 2, dtype=torch.int64)
