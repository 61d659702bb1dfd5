"""Compute masks by rank in groups of neighbors, and pack and unpack masks at eight elements per byte."""

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
