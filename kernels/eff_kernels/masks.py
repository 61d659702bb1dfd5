"""Masks by rank, of all scores or in groups of neighbors, and masks packed at eight elements per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eff_kernels._triton.launch import runs_in_one_launch

COMPARED = 16
"""The largest group that is ranked by comparing all pairs."""
_RANKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def n_of_m_mask(scores: Tensor, n: int, m: int, axis: int) -> Tensor:
    """Return a mask of the `n` largest scores of every `m` neighbors along an axis. Ties go to the lowest index.

    Small groups are ranked by comparing pairs, with 6 comparisons for 2:4, which is several times faster than a
    stable sort of rows of 4.

    Args:
        scores: Floating point, any shape; `m` divides the axis.
        n: Number of scores to keep per group, from 1 to `m`.
        m: Size of a group.
        axis: Axis of the neighbors.

    Returns:
        bool of the same shape, contiguous, True = keep. Each group keeps exactly `n`.

    Raises:
        ValueError: If a score is NaN.

    Example:
        >>> n_of_m_mask(torch.tensor([[0.1, 2.0, 2.0, 2.0]]), 2, 4, 1)
        tensor([[False,  True,  True, False]])
    """
    mask, has_nan = ranked_n_of_m(scores, n, m, axis)
    if has_nan:
        raise ValueError("n_of_m_mask: scores must not be NaN")
    return mask


@torch.no_grad()
def ranked_n_of_m(scores: Tensor, n: int, m: int, axis: int, *, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
    """Return `n_of_m_mask` and a flag, bool of one element, which is True if a score was NaN.

    Args:
        scores: As in `n_of_m_mask`.
        n: As in `n_of_m_mask`.
        m: As in `n_of_m_mask`.
        axis: As in `n_of_m_mask`.
        magnitudes: Rank by magnitude, without the sign.
    """
    axis %= scores.ndim
    if m <= COMPARED and scores.is_contiguous() and scores.dtype in _RANKED and runs_in_one_launch([scores]):
        mask, has_nan = rank_groups(scores.detach(), n, m, axis, magnitudes)
        return mask, has_nan
    scores = scores.abs() if magnitudes else scores
    return _rank_groups(scores, n, m, axis), _has_nan(scores)


@torch.library.custom_op("eff_kernels::rank_groups", mutates_args=())
def rank_groups(scores: Tensor, n: int, m: int, axis: int, magnitudes: bool) -> tuple[Tensor, Tensor]:
    """Return `ranked_n_of_m` as one operator, the flag as bool ``[1]``."""
    if not scores.is_cuda:
        scores = scores.abs() if magnitudes else scores
        return _rank_groups(scores, n, m, axis), _has_nan(scores).view(1)
    from eff_kernels._triton.masks import rank_groups_triton

    with torch.cuda.device(scores.device):
        return rank_groups_triton(scores, n, m, math.prod(scores.shape[axis + 1 :]), magnitudes)


@rank_groups.register_fake
def _(scores: Tensor, n: int, m: int, axis: int, magnitudes: bool) -> tuple[Tensor, Tensor]:
    mask = scores.new_empty(scores.shape, dtype=torch.bool)
    return mask, mask.new_empty(1)


def _has_nan(scores: Tensor) -> Tensor:
    # the maximum is NaN if any score is; on a CPU this is twenty times faster than checking each (torch 2.13)
    return scores.amax().isnan() if scores.numel() else scores.new_zeros((), dtype=torch.bool)


def _rank_groups(scores: Tensor, n: int, m: int, axis: int) -> Tensor:
    last = scores.movedim(axis, -1)
    groups = last.reshape(-1, m)
    if m <= COMPARED:
        columns = groups.unbind(1)
        # before[i]: how many of the group come before i. Start as if every later one did. Then one comparison per pair
        # corrects both.
        before = [columns[0].new_full(columns[0].shape, m - 1 - i, dtype=torch.int8) for i in range(m)]
        for i in range(m):
            for j in range(i + 1, m):
                # >= puts the earlier of two equal ones first.
                first = (columns[i] >= columns[j]).view(torch.int8)
                before[j].add_(first)
                before[i].sub_(first)
        kept = torch.empty_like(groups, dtype=torch.bool)
        for count, column in zip(before, kept.unbind(1), strict=True):
            torch.lt(count, n, out=column)
        return kept.view(last.shape).movedim(-1, axis).contiguous()
    # Groups too long for m² comparisons are sorted.
    mask = torch.zeros_like(groups, dtype=torch.bool)
    order = groups.argsort(dim=1, descending=True, stable=True)[:, :n]
    mask.scatter_(1, order, True)
    return mask.view(last.shape).movedim(-1, axis).contiguous()


def pack_bits(mask: Tensor) -> Tensor:
    """Return a mask with eight elements per byte, on its device, the first in the highest bit, like `numpy.packbits`.

    Args:
        mask: bool, any shape.

    Returns:
        uint8 ``[⌈numel/8⌉]``; the last byte is padded with zeros.

    Example:
        >>> pack_bits(torch.tensor([True, False, True]))
        tensor([160], dtype=torch.uint8)
    """
    if runs_in_one_launch([mask]):
        packed: Tensor = packed_bits(mask.contiguous())
        return packed
    return _pack_bits(mask)


def packed_size(shape: Sequence[int]) -> int:
    """Return the number of bytes of `pack_bits`.

    Args:
        shape: Shape of the mask.
    """
    return -(-math.prod(shape) // 8)


def _pack_bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1))).to(mask.device)


@torch.library.custom_op("eff_kernels::packed_bits", mutates_args=())
def packed_bits(mask: Tensor) -> Tensor:
    """Return `pack_bits` of a contiguous mask as one operator."""
    if not mask.is_cuda:
        return _pack_bits(mask)
    from eff_kernels._triton.masks import pack_bits_triton

    with torch.cuda.device(mask.device):
        return pack_bits_triton(mask)


@packed_bits.register_fake
def _(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `pack_bits`: return a mask of this shape on the device of the bytes.

    Args:
        packed: uint8 ``[⌈numel/8⌉]``.
        shape: Shape of the mask.

    Example:
        >>> unpack_bits(torch.tensor([160], dtype=torch.uint8), (3,))
        tensor([ True, False,  True])
    """
    if runs_in_one_launch([packed]):
        mask: Tensor = unpacked_bits(packed.contiguous(), list(shape))
        return mask
    return _unpack_bits(packed, shape)


def _unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    bits = np.unpackbits(packed.cpu().numpy(), count=math.prod(shape)).view(bool)
    return torch.from_numpy(bits).view(tuple(shape)).to(packed.device)


@torch.library.custom_op("eff_kernels::unpacked_bits", mutates_args=())
def unpacked_bits(packed: Tensor, shape: list[int]) -> Tensor:
    """Return `unpack_bits` of contiguous bytes as one operator."""
    if not packed.is_cuda:
        return _unpack_bits(packed, shape)
    from eff_kernels._triton.masks import unpack_bits_triton

    with torch.cuda.device(packed.device):
        return unpack_bits_triton(packed, shape)


@unpacked_bits.register_fake
def _(packed: Tensor, shape: list[int]) -> Tensor:
    return packed.new_empty(shape, dtype=torch.bool)


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
    kept_and_nan: Tensor = mark_largest_(masks, [score.detach() for score in scores], num_pruned)
    return masks, kept_and_nan


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
    lines = [[int(mask.count_nonzero()), int(score.isnan().any())] for mask, score in zip(masks, scores, strict=True)]
    return torch.tensor(lines)


@mark_largest_.register_fake
def _(masks: list[Tensor], scores: list[Tensor], num_pruned: int) -> Tensor:
    return masks[0].new_empty(len(masks), 2, dtype=torch.int64)
