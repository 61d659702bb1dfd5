"""The hot operations of pruning: zeroing what is pruned after every step, and finding a threshold exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eff_kernels._triton.launch import compiles_for, runs_in_one_launch
from eff_kernels.top_k import kth_smallest_key

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# torch widens a bool operand into a temporary of the other's type; in pieces of 2 MiB that stays in cache
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
    """Set every element whose mask is False to exactly `fill`, in place, and leave every other bit as it is.

    The bit pattern b becomes ``(b - f)·m + f`` as an integer, with that of `fill`, which of +0.0 is 0, and m of 0 or 1:
    unlike a floating-point product this turns NaN, infinity and negative numbers into +0.0 too, and it is several times
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
    # of one tensor torch's product is as fast
    if not fill and len(pairs) > 1 and runs_in_one_launch(tensors, masks) and fit_masks(tensors, masks):
        store_zeros_([tensor.detach() for tensor in tensors], list(masks))
    else:
        _apply_masks(pairs, fill)


def _apply_masks(pairs: Iterable[tuple[Tensor, Tensor]], fill: float = 0.0) -> None:
    for tensor, mask in pairs:
        # As integers: a product of floats would keep the sign of -0.0 and turn inf * 0 into NaN.
        bits = tensor.detach().view(_BITS[tensor.element_size()])
        filled = int(torch.tensor(fill, dtype=tensor.dtype).view(bits.dtype)) if fill else 0
        if _numpy_is_faster(bits, mask):
            _multiply_in_pieces_(bits.view(-1).numpy(), mask.view(-1).numpy(), filled)
            # numpy writes behind autograd's back: a graph that saved this tensor must notice.
            torch.autograd.graph.increment_version(bits)
        elif filled:
            bits.sub_(filled).mul_(mask).add_(filled)
        else:
            bits.mul_(mask)


def _multiply_in_pieces_(bits: _Array, mask: _Array, filled: int) -> None:
    """Do so in pieces that stay in cache, of the mask too, which numpy multiplies by once it is of the bits' type."""
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
    """Return True if a product by bool is large: there torch (2.13) widens all of it into a temporary in memory."""
    is_eager = type(bits) is Tensor and not torch.compiler.is_compiling()
    return bits.numel() > _NUMPY_FROM and is_eager and _lie_alike(bits, mask)


def _lie_alike(bits: Tensor, mask: Tensor) -> bool:
    return bits.is_cpu and bits.shape == mask.shape and bits.is_contiguous() and mask.is_contiguous()


def fit_masks(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> bool:
    """Return True if masks can be read in the order of their tensors: all are bool and of the same strides.

    Example:
        >>> fit_masks([torch.ones(2, 3)], [torch.ones(3, 2, dtype=torch.bool).T])
        False
    """
    pairs = zip(tensors, masks, strict=True)
    return all(m.dtype == torch.bool and m.shape == t.shape and m.stride() == t.stride() for t, m in pairs)


@torch.library.custom_op("eff_kernels::store_zeros_", mutates_args={"tensors"})
def store_zeros_(tensors: list[Tensor], masks: list[Tensor]) -> None:
    """Do as `apply_mask_` as one operator, of masks that `fit_masks`."""
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
        mask: bool of the same shape, True = leave.

    Example:
        >>> rank_below_(torch.tensor([1.0, 0.0]), torch.tensor([True, False]))
        tensor([1., -inf])
    """
    if not scores.is_cpu:
        return torch.where(mask, scores, scores.new_full((), -math.inf), out=scores)
    apply_mask_([scores], [mask])
    # -1 shifted past the mantissa is sign and exponent all ones: -inf, three times as fast as by masked_fill_
    kind = _BITS[scores.element_size()]
    exponent = 1 << round(-math.log2(torch.finfo(scores.dtype).eps))
    for bits, kept in _pieces(scores.view(kind), mask):
        # kept is 1 or 0, so kept - 1 is 0 or -1: added times 2^mantissa it leaves live scores, and makes zeros -inf.
        bits.add_(kept.to(kind).sub_(1), alpha=exponent)
    return scores


def _pieces(bits: Tensor, mask: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if bits.numel() > _PIECE and _lie_alike(bits, mask):
        return zip(torch.split(bits.view(-1), _PIECE), torch.split(mask.view(-1), _PIECE), strict=True)
    return [(bits, mask)]


@torch.no_grad()
def keep_largest_(masks: Sequence[Tensor], part: Callable[[int, slice], Tensor], num_pruned: int) -> float | None:
    """Set each mask to where the scores are not among the `num_pruned` smallest of all; return the largest of those.

    A strided sample brackets the threshold; one pass in pieces that stay in cache then marks what lies above the
    bracket and collects the few scores inside it, which are ranked exactly. Where the bracket misses, None is returned
    and the masks are undefined: `kth_smallest` finds the threshold whatever the distribution.

    Args:
        masks: bool, contiguous, on CPU, one a tensor of scores; overwritten.
        part: ``part(i, where)`` returns a slice of tensor i's flattened scores, float32 or float64.
        num_pruned: How many go, at least 1. Among equal scores the earlier tensor, then the lowest index is kept.

    Raises:
        ValueError: If a score is NaN.

    Example:
        >>> scores, mask = torch.tensor([3.0, 1.0, 2.0, 1.0]), torch.empty(4, dtype=torch.bool)
        >>> keep_largest_([mask], lambda i, where: scores[where], 1), mask
        (1.0, tensor([ True,  True,  True, False]))
    """
    numel = sum(mask.numel() for mask in masks)
    # Floyd and Rivest's idea: a sample tells between which two scores the threshold lies, 6 standard deviations of a
    # binomial rank on either side. One pass then counts what is below, keeps what is above, and collects the few
    # between.
    stride = max(1, numel // _SAMPLE) | 1  # odd: row lengths are powers of two
    sample = np.concatenate([part(i, slice(None, None, stride)).numpy() for i in range(len(masks))])
    sample.sort()
    share = num_pruned / numel
    # The threshold's rank in the sample.
    at = share * (len(sample) - 1)
    margin = 6 * math.sqrt(len(sample) * share * (1 - share)) + 2
    # what was pruned before ranks at -inf; it lies below every bracket, so that it need not be collected
    low = max(sample[max(0, math.floor(at - margin))], np.finfo(sample.dtype).min)
    # nor are many equal scores at its edge (zeros, where pruned weights may come back): they are only counted
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
            # NaN is not above or below anything, so it is counted as below: looked for only where something was.
            num_below += piece.size - num_reached
            if num_reached < piece.size and np.isnan(piece.min()):
                raise ValueError(f"keep_largest_: scores must not be NaN, got one in tensor {i}")
            reached ^= kept
            index = np.flatnonzero(reached)
            inside.append(piece[index])
            places.append((kept, index))
    # The threshold's rank among those collected; the selection is exact from here on.
    rank = num_pruned - num_below
    values = np.concatenate(inside)
    # Everything between has to stay, and of those equal to `low` some too: found in a second pass, as they were not
    # kept.
    if rank <= 0 and above is np.greater:
        for kept, index in places:
            kept[index] = True
        return float(low) if _keep_first_(masks, part, low, -rank) else None
    if not 0 < rank <= values.size:
        return None
    threshold = np.partition(values, rank - 1)[rank - 1]
    # Ties at the threshold go by lowest index: the first stay.
    ties_to_keep = int(np.count_nonzero(values <= threshold)) - rank
    for (kept, index), found in zip(places, inside, strict=True):
        kept[index[found > threshold]] = True
        if ties_to_keep:
            ties = index[found == threshold][:ties_to_keep]
            kept[ties] = True
            ties_to_keep -= ties.size
    return float(threshold)


def _keep_first_(masks: Sequence[Tensor], part: Callable[[int, slice], Tensor], score: float, number: int) -> bool:
    """Set the masks of the first so many equal scores; return whether there are so many."""
    for i, mask in enumerate(masks):
        flat = mask.view(-1).numpy()
        for start in range(0, flat.size if number else 0, _PIECE):
            index = np.flatnonzero(part(i, slice(start, start + _PIECE)).numpy() == score)[:number]
            flat[start + index] = True
            number -= index.size
    return not number


def kth_smallest(scores: Sequence[Tensor], k: int, *, dtype: torch.dtype = torch.float32) -> float:
    """Return the k-th smallest (1-based) of all scores together, exactly and without sorting.

    A histogram of the order-preserving bit patterns, 16 bits a pass: a few MB of memory whatever the number of scores,
    and the same time whatever their distribution (numpy's ``partition`` is faster on some processors and distributions
    and ten times slower on others).

    Args:
        scores: Tensors without NaN. Read by index, possibly several times, so they may be computed on access.
        k: From 1 to the number of scores.
        dtype: float32, or float64 if any of the tensors is: scores are compared in it.

    Raises:
        ValueError: If `k` is out of range.

    Example:
        >>> kth_smallest([torch.tensor([4.0, 1.0]), torch.tensor([[3.0], [2.0]])], 3)
        3.0
    """
    rank, prefix = k, 0
    # Radix selection: the digit of the k-th smallest is found from the top, 16 bits a pass, by a histogram of those
    # scores that share the digits found so far. Exact, and its memory does not grow with the number of scores.
    for shift in range(8 * dtype.itemsize - _DIGIT, -1, -_DIGIT):
        counts = np.zeros(1 << _DIGIT, dtype=np.int64)
        is_first = shift + _DIGIT == 8 * dtype.itemsize
        found = None if is_first else (prefix, *_bounds(prefix, shift + _DIGIT, dtype))
        for i in range(len(scores)):
            flat = scores[i].detach().reshape(-1)
            piece = flat
            for piece in torch.split(flat, _HISTOGRAM_PIECE):
                counts += _histogram(piece, shift, found, dtype).cpu().numpy()
            del flat, piece  # before the next scores are computed: never two tensors' scores at a time
        cumulative = counts.cumsum()
        if not 1 <= rank <= cumulative[-1]:
            raise ValueError(f"kth_smallest: k must be in [1, {cumulative[-1]}], got {k}")
        # The first digit whose cumulative count reaches the rank; below it lie cumulative - counts scores.
        digit = int(np.searchsorted(cumulative, rank))
        rank -= int(cumulative[digit] - counts[digit])
        prefix = digit - _SIGN if is_first else (prefix << _DIGIT) | digit
    return _from_key(prefix, dtype)


def _histogram(values: Tensor, shift: int, found: tuple[int, float, float] | None, dtype: torch.dtype) -> Tensor:
    """Return how often each digit occurs `shift` bits before the end of keys."""
    # `found`: the digits before it, and the lowest and highest number that has them. None for the first digit, which
    # carries the sign: it is moved up by `_SIGN`, so that digits count from 0.
    if found and values.is_cpu and values.dtype == dtype:
        # few share the digits found so far; numpy picks them out several times faster than torch
        array = values.numpy()
        values = torch.from_numpy(array[(array >= found[1]) & (array <= found[2])])
    kind = _BITS[dtype.itemsize]
    bits = (values.to(dtype) + 0.0).view(kind)  # + 0.0: -0.0 equals +0.0
    # The key is an integer in the order of the floats: two's complement has positive ones so already, and negative ones
    # reversed, of which all bits but the sign are flipped.
    key = bits ^ ((bits >> (8 * dtype.itemsize - 1)) & torch.iinfo(kind).max)
    if found:
        key = key[(key >> (shift + _DIGIT)) == found[0]]
    digits = (key >> shift) & ((1 << _DIGIT) - 1) if found else (key >> shift) + _SIGN
    return torch.bincount(digits, minlength=1 << _DIGIT)


def kth_smallest_there(scores: Sequence[Tensor], k: int) -> Tensor | None:
    """Return what `kth_smallest` does in float32 as a tensor without axes, for which nothing waits.

    Args:
        scores: As there; of those computed on access an attribute ``tensors``, a list, tells the devices.
        k: From 1 to the number of scores, which is not checked.

    Returns:
        None where the scores do not lie on one GPU.
    """
    device = _one_gpu(getattr(scores, "tensors", scores))
    if device is None:
        return None
    key = (kth_smallest_key(scores, k, device)[0] - (1 << 31)).to(torch.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _one_gpu(tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the GPU of tensors that are at hand, all on the same one; else None."""
    devices = {tensor.device for tensor in tensors} if isinstance(tensors, list | tuple) else set()
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" and compiles_for(device) else None


def _from_key(key: int, dtype: torch.dtype) -> float:
    """Return the number whose bits, as an integer in the order of the floats, are `key`."""
    kind = _BITS[dtype.itemsize]
    bits = torch.tensor(key, dtype=kind)
    return float((bits ^ ((bits >> (8 * dtype.itemsize - 1)) & torch.iinfo(kind).max)).view(dtype))


def _bounds(prefix: int, shift: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return between which numbers all keys lie that start with `prefix`, `shift` bits before their end."""
    low, high = _from_key(prefix << shift, dtype), _from_key((prefix << shift) | ((1 << shift) - 1), dtype)
    # beyond the infinities lie only NaN
    return -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
