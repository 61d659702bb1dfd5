"""The hot operations of pruning: zero pruned weights after every step, and find a threshold exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eff_kernels._triton.launch import compiles_for, runs_in_one_launch
from eff_kernels.masks import kth_smallest_key

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# torch converts a bool operand to a temporary of the other's type. In pieces of 2 MiB that stays in cache.
_PIECE = 1 << 19
_NUMPY_FROM = 1 << 16
_NUMPY_PIECE = 1 << 15
_HISTOGRAM_PIECE = 1 << 18
_Array = np.ndarray[Any, Any]
_DIGIT = 16
_SIGN = 1 << (_DIGIT - 1)
_SAMPLE = 1 << 16


@torch.no_grad()
def apply_mask_(tensors: Sequence[Tensor], masks: Sequence[Tensor], fill: float = 0.0) -> None:
    """Set every element whose mask is False to exactly `fill`, in place. All other bits stay.

    The bit pattern b becomes ``(b - f)·m + f`` as an integer, with f the bits of `fill` (0 for +0.0) and m 0 or 1.
    Unlike a floating-point product this also turns NaN, infinity and negative numbers into +0.0, and is several times
    faster on CPU than ``masked_fill_`` or ``where``.

    Args:
        tensors: Floating point, any shape and device; parameters too. A stride of 0 is not allowed.
        masks: bool, True = keep, each broadcastable to its tensor and on its device.
        fill: A number of the tensors' format.

    Raises:
        ValueError: If the two lists differ in length.

    Example:
        >>> weight = torch.tensor([1.5, -2.0, float("nan")])
        >>> apply_mask_([weight], [torch.tensor([True, False, False])])
        >>> weight
        tensor([1.5000, 0.0000, 0.0000])
    """
    pairs = list(zip(tensors, masks, strict=True))
    # for one tensor torch's product is as fast
    if not fill and len(pairs) > 1 and runs_in_one_launch(tensors, masks) and fit_masks(tensors, masks):
        store_zeros_([tensor.detach() for tensor in tensors], list(masks))
    else:
        _apply_masks(pairs, fill)


def _apply_masks(pairs: Iterable[tuple[Tensor, Tensor]], fill: float = 0.0) -> None:
    for tensor, mask in pairs:
        # As integers, because a product of floats would keep the sign of -0.0 and turn inf * 0 into NaN.
        bits = tensor.detach().view(_BITS[tensor.element_size()])
        filled = int(torch.tensor(fill, dtype=tensor.dtype).view(bits.dtype)) if fill else 0
        if _numpy_is_faster(bits, mask):
            _multiply_in_pieces_(bits.view(-1).numpy(), mask.view(-1).numpy(), filled)
            # autograd does not see numpy's writes, but a graph that saved this tensor must notice.
            torch.autograd.graph.increment_version(bits)
        elif filled:
            bits.sub_(filled).mul_(mask).add_(filled)
        else:
            bits.mul_(mask)


def _multiply_in_pieces_(bits: _Array, mask: _Array, filled: int) -> None:
    """Multiply in pieces that stay in cache, including the mask, which numpy first converts to the type of the bits."""
    wide, offset = np.empty(_NUMPY_PIECE, bits.dtype), bits.dtype.type(filled)
    for start in range(0, len(bits), _NUMPY_PIECE):
        piece = bits[start : start + _NUMPY_PIECE]
        factors = wide[: len(piece)]
        np.copyto(factors, mask[start : start + _NUMPY_PIECE])
        if filled:
            np.subtract(piece, offset, out=piece)
        np.multiply(piece, factors, out=piece)
        if filled:
            np.add(piece, offset, out=piece)


def _numpy_is_faster(bits: Tensor, mask: Tensor) -> bool:
    """Return True for large products by bool, for which torch (2.13) converts the whole mask to a temporary."""
    is_eager = type(bits) is Tensor and not torch.compiler.is_compiling()
    return bits.numel() > _NUMPY_FROM and is_eager and _lie_alike(bits, mask)


def _lie_alike(bits: Tensor, mask: Tensor) -> bool:
    return bits.is_cpu and bits.shape == mask.shape and bits.is_contiguous() and mask.is_contiguous()


def fit_masks(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> bool:
    """Return True if masks can be read in the order of their tensors: all are bool with the same strides.

    Example:
        >>> fit_masks([torch.ones(2, 3)], [torch.ones(3, 2, dtype=torch.bool).T])
        False
    """
    pairs = zip(tensors, masks, strict=True)
    return all(m.dtype == torch.bool and m.shape == t.shape and m.stride() == t.stride() for t, m in pairs)


@torch.library.custom_op("eff_kernels::store_zeros_", mutates_args={"tensors"})
def store_zeros_(tensors: list[Tensor], masks: list[Tensor]) -> None:
    """`apply_mask_` as one operator, for masks accepted by `fit_masks`."""
    if not tensors[0].is_cuda:
        _apply_masks(zip(tensors, masks, strict=True))
        return
    from eff_kernels._triton.pruning import apply_mask_triton_

    with torch.cuda.device(tensors[0].device):
        apply_mask_triton_([tensor.view(_BITS[tensor.element_size()]) for tensor in tensors], masks)


@store_zeros_.register_fake
def _(tensors: list[Tensor], masks: list[Tensor]) -> None:
    pass


@torch.no_grad()
def rank_below_(scores: Tensor, mask: Tensor) -> Tensor:
    """Set every score whose mask is False to -inf, in place, and return the scores.

    Args:
        scores: float32 or float64, any shape.
        mask: bool of the same shape, True = keep.

    Example:
        >>> rank_below_(torch.tensor([1.0, 0.0]), torch.tensor([True, False]))
        tensor([1., -inf])
    """
    if not scores.is_cpu:
        return torch.where(mask, scores, scores.new_full((), -math.inf), out=scores)
    apply_mask_([scores], [mask])
    # -1 shifted past the mantissa sets sign and exponent bits: -inf, three times as fast as masked_fill_
    kind = _BITS[scores.element_size()]
    exponent = 1 << round(-math.log2(torch.finfo(scores.dtype).eps))
    for bits, kept in _pieces(scores.view(kind), mask):
        # kept is 1 or 0, so kept - 1 is 0 or -1. Added times 2^mantissa it keeps live scores and makes zeros -inf.
        bits.add_(kept.to(kind).sub_(1), alpha=exponent)
    return scores


def _pieces(bits: Tensor, mask: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if bits.numel() > _PIECE and _lie_alike(bits, mask):
        return zip(torch.split(bits.view(-1), _PIECE), torch.split(mask.view(-1), _PIECE), strict=True)
    return [(bits, mask)]


@torch.no_grad()
def keep_largest_(masks: Sequence[Tensor], part: Callable[[int, slice], Tensor], num_pruned: int) -> float | None:
    """Set each mask to False for the `num_pruned` smallest scores of all; return the largest of these.

    A strided sample brackets the threshold. One pass in pieces that stay in cache then marks scores above the
    bracket and collects the few inside it, which are ranked exactly. If the bracket misses, None is returned
    and the masks are undefined. `kth_smallest` finds the threshold for any distribution.

    Args:
        masks: bool, contiguous, on CPU, one per tensor of scores; overwritten.
        part: ``part(i, where)`` returns a slice of tensor i's flattened scores, float32 or float64.
        num_pruned: Scores to prune, at least 1. Of equal scores the earlier tensor, then the lower index stays.

    Raises:
        ValueError: If a score is NaN.

    Example:
        >>> scores, mask = torch.tensor([3.0, 1.0, 2.0, 1.0]), torch.empty(4, dtype=torch.bool)
        >>> keep_largest_([mask], lambda i, where: scores[where], 1), mask
        (1.0, tensor([ True,  True,  True, False]))
    """
    numel = sum(mask.numel() for mask in masks)
    # Floyd and Rivest's idea: a sample shows between which two scores the threshold lies, 6 standard deviations of a
    # binomial rank on either side. One pass then counts scores below, keeps those above, and collects the few
    # between.
    stride = max(1, numel // _SAMPLE) | 1  # odd: row lengths are powers of two
    sample = np.concatenate([part(i, slice(None, None, stride)).numpy() for i in range(len(masks))])
    sample.sort()
    share = num_pruned / numel
    # The threshold's rank in the sample.
    at = share * (len(sample) - 1)
    margin = 6 * math.sqrt(len(sample) * share * (1 - share)) + 2
    # already pruned scores are -inf and lie below every bracket, so they need not be collected
    low = max(sample[max(0, math.floor(at - margin))], np.finfo(sample.dtype).min)
    # many equal scores at its edge (zeros, if pruned weights may grow back) are only counted
    num_ties = np.searchsorted(sample, low, "right") - np.searchsorted(sample, low, "left")
    above = np.greater if num_ties > max(16, margin) else np.greater_equal
    high = sample[min(len(sample) - 1, math.ceil(at + margin))]
    if at + margin >= len(sample) - 1:
        high = np.inf

    num_below = 0
    inside: list[np.ndarray] = []
    places: list[tuple[np.ndarray, np.ndarray]] = []
    for i, mask in enumerate(masks):
        flat = mask.view(-1).numpy()
        for start in range(0, flat.size, _PIECE):
            piece = part(i, slice(start, start + _PIECE)).numpy()
            kept = flat[start : start + piece.size]
            np.greater(piece, high, out=kept)
            reached = above(piece, low)
            num_reached = int(np.count_nonzero(reached))
            # NaN compares as false and so counts as below. Check for it only if something was below.
            num_below += piece.size - num_reached
            if num_reached < piece.size and np.isnan(piece.min()):
                raise ValueError(f"keep_largest_: scores must not be NaN, got one in tensor {i}")
            reached ^= kept
            index = np.flatnonzero(reached)
            inside.append(piece[index])
            places.append((kept, index))
    # The threshold's rank among the collected scores. The selection is exact from here on.
    rank = num_pruned - num_below
    values = np.concatenate(inside)
    # All scores between stay, and some of those equal to `low`, which need a second pass, because they were not
    # collected.
    if rank <= 0 and above is np.greater:
        for kept, index in places:
            kept[index] = True
        return float(low) if _keep_first_(masks, part, low, -rank) else None
    if not 0 < rank <= values.size:
        return None
    threshold = np.partition(values, rank - 1)[rank - 1]
    # Ties at the threshold go to the lowest index.
    ties_to_keep = int(np.count_nonzero(values <= threshold)) - rank
    for (kept, index), found in zip(places, inside, strict=True):
        kept[index[found > threshold]] = True
        if ties_to_keep:
            ties = index[found == threshold][:ties_to_keep]
            kept[ties] = True
            ties_to_keep -= ties.size
    return float(threshold)


def _keep_first_(masks: Sequence[Tensor], part: Callable[[int, slice], Tensor], score: float, number: int) -> bool:
    """Set the masks of the first `number` equal scores; return True if there are that many."""
    for i, mask in enumerate(masks):
        flat = mask.view(-1).numpy()
        for start in range(0, flat.size if number else 0, _PIECE):
            index = np.flatnonzero(part(i, slice(start, start + _PIECE)).numpy() == score)[:number]
            flat[start + index] = True
            number -= index.size
    return not number


def kth_smallest(scores: Sequence[Tensor], k: int, *, dtype: torch.dtype = torch.float32) -> float:
    """Return the k-th smallest (1-based) of all scores together, exactly and without sorting.

    A histogram of the order-preserving bit patterns, 16 bits per pass. It takes a few MB for any number of scores,
    and the same time for any distribution (numpy's ``partition`` is faster on some processors and distributions
    and ten times slower on others).

    Args:
        scores: Tensors without NaN. Read by index, possibly several times, so they may be computed on access.
        k: From 1 to the number of scores.
        dtype: Type for comparisons: float32, or float64 if any tensor is float64.

    Raises:
        ValueError: If `k` is out of range.

    Example:
        >>> kth_smallest([torch.tensor([4.0, 1.0]), torch.tensor([[3.0], [2.0]])], 3)
        3.0
    """
    rank, prefix = k, 0
    # Radix selection: find the digits of the k-th smallest from the top, 16 bits per pass, by a histogram of the
    # scores that share the digits found so far. It is exact, and its memory does not grow with the number of scores.
    for shift in range(8 * dtype.itemsize - _DIGIT, -1, -_DIGIT):
        counts = np.zeros(1 << _DIGIT, dtype=np.int64)
        is_first = shift + _DIGIT == 8 * dtype.itemsize
        found = None if is_first else (prefix, *_bounds(prefix, shift + _DIGIT, dtype))
        for i in range(len(scores)):
            flat = scores[i].detach().reshape(-1)
            piece = flat
            for piece in torch.split(flat, _HISTOGRAM_PIECE):
                counts += _histogram(piece, shift, found, dtype).cpu().numpy()
            del flat, piece  # before the next scores are computed, to hold only one tensor's scores at a time
        cumulative = counts.cumsum()
        if not 1 <= rank <= cumulative[-1]:
            raise ValueError(f"kth_smallest: k must be in [1, {cumulative[-1]}], got {k}")
        # The first digit whose cumulative count reaches the rank. Below it are cumulative - counts scores.
        digit = int(np.searchsorted(cumulative, rank))
        rank -= int(cumulative[digit] - counts[digit])
        prefix = digit - _SIGN if is_first else (prefix << _DIGIT) | digit
    return _from_key(prefix, dtype)


def _histogram(values: Tensor, shift: int, found: tuple[int, float, float] | None, dtype: torch.dtype) -> Tensor:
    """Return how often each digit occurs `shift` bits before the end of keys."""
    # `found`: the digits before it, and the lowest and highest number with them. None for the first digit, which
    # has the sign: `_SIGN` is added, so that digits start at 0.
    if found and values.is_cpu and values.dtype == dtype:
        # few scores share the digits found so far; numpy selects them several times faster than torch
        array = values.numpy()
        values = torch.from_numpy(array[(array >= found[1]) & (array <= found[2])])
    kind = _BITS[dtype.itemsize]
    bits = (values.to(dtype) + 0.0).view(kind)  # + 0.0: -0.0 equals +0.0
    # The key is an integer in the order of the floats. Positive floats already have it. Negative ones are reversed in
    # two's complement, so all their bits except the sign are flipped.
    key = bits ^ ((bits >> (8 * dtype.itemsize - 1)) & torch.iinfo(kind).max)
    if found:
        key = key[(key >> (shift + _DIGIT)) == found[0]]
    digits = (key >> shift) & ((1 << _DIGIT) - 1) if found else (key >> shift) + _SIGN
    return torch.bincount(digits, minlength=1 << _DIGIT)


def kth_smallest_there(scores: Sequence[Tensor], k: int) -> Tensor | None:
    """Return `kth_smallest` in float32 as a scalar tensor, without waiting for the device.

    Args:
        scores: As in `kth_smallest`. If computed on access, a list ``tensors`` as attribute shows the devices.
        k: From 1 to the number of scores, which is not checked.

    Returns:
        None if the scores are not all on one GPU.
    """
    device = _one_gpu(getattr(scores, "tensors", scores))
    if device is None:
        return None
    key = (kth_smallest_key(scores, k, device)[0] - (1 << 31)).to(torch.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _one_gpu(tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the GPU that holds all tensors, else None."""
    devices = {tensor.device for tensor in tensors} if isinstance(tensors, list | tuple) else set()
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" and compiles_for(device) else None


def _from_key(key: int, dtype: torch.dtype) -> float:
    """Return the number with this key, its bits as an integer in the order of the floats."""
    kind = _BITS[dtype.itemsize]
    bits = torch.tensor(key, dtype=kind)
    return float((bits ^ ((bits >> (8 * dtype.itemsize - 1)) & torch.iinfo(kind).max)).view(dtype))


def _bounds(prefix: int, shift: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the lowest and highest number whose keys start with `prefix`, `shift` bits before their end."""
    low, high = _from_key(prefix << shift, dtype), _from_key((prefix << shift) | ((1 << shift) - 1), dtype)
    # beyond the infinities lie only NaN
    return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
