"""From scores to masks: one exact threshold, the same tie-breaking on every machine, and limits per layer.

The limits keep a layer from losing nearly everything while others stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from eff_kernels.masks import marked_largest
from eff_kernels.pruning import keep_largest_, kth_smallest, kth_smallest_there, rank_below_
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.distributed.sharded_tensors import whole
from shared_core.errors import ConfigError
from shared_core.modules.matching import StackedExperts
from shared_core.modules.weight_views import input_axis
from shared_core.numerics.deferred_checks import read_together, refuse
from shared_core.printing import listed
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.patterns import (
    block_scores,
    erdos_renyi_sparsities,
    expand_blocks,
    nm_mask_of_scores,
    row_mask,
)
from shared_core.pruning.scorers import Scorer
from shared_core.pruning.scorers.scorer import below_threshold_mask
from shared_core.pruning.targets import block_of, tower_names, tower_notes

# Piece size for the search for ties, and the largest number of scores kept in memory instead of computed twice.
_PIECE = 1 << 21
_HELD = 12_000_000


@torch.no_grad()
def prune_mask(scores: Tensor, sparsity: float) -> Tensor:
    """Return the mask that prunes the elements with the lowest scores. Exactly ``n - round(sparsity·n)`` are kept.

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
    return lowest_pruned(scores, round(_share(sparsity) * scores.numel()))


def lowest_pruned(scores: Tensor, number: int) -> Tensor:
    """Return `prune_mask` for a given number of elements to prune."""
    return _masks([scores], number)[0]


@torch.no_grad()
def prune_masks(scores: Sequence[Tensor], sparsity: float, most: Sequence[int] | None = None) -> list[Tensor]:
    """Return the masks of several tensors whose elements all compete under one threshold.

    ``round(sparsity·n)`` of all n elements are pruned, lowest scores first. Among equal scores the earlier tensor, then
    the lowest flat index is kept. Each tensor keeps at least its best element and loses at most `most`; the others make
    up for it. The count is exact unless these limits make it impossible.

    Args:
        scores: Floating point, any shapes. Read by index several times, so they may be computed on access.
        sparsity: Share of all elements to prune, in [0, 1].
        most: Limit for each tensor. Scores of -inf, which are pruned already, do not count.

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
    # Each tensor keeps at least one weight, whatever its limit.
    limits = [max(min(size - 1, limit), 0) for size, limit in zip(sizes, most or sizes, strict=True)]
    left = min(round(_share(sparsity) * sum(sizes)), sum(limits))
    masks: dict[int, Tensor] = {}
    # Water-filling: rank all, fix the tensors over their limit at it, and let the others compete for the rest. Each
    # round fixes at least one tensor.
    competing = list(range(len(sizes)))
    while competing:
        found, counts = _counted_masks(some(scores, competing), left)
        masks |= zip(competing, found, strict=True)
        over = [i for i, count in zip(competing, counts, strict=True) if sizes[i] - count > limits[i]]
        if not over:
            break
        # Fixing one tensor takes more from the others, so a tensor over its limit now stays over it.
        gone = read_together([scores[i].eq(-torch.inf).count_nonzero() for i in over])
        for i, count in zip(over, gone, strict=True):
            limits[i] = max(limits[i], min(count, sizes[i] - 1))
            masks[i] = _masks([scores[i]], limits[i])[0]
            left = max(left - limits[i], 0)  # more may be pruned already than the target
        competing = [i for i in competing if i not in over]
    return [masks[i] for i in range(len(sizes))]


def count_kept(masks: Sequence[Tensor]) -> list[int]:
    """Return the number of True elements of each mask. A GPU is read once."""
    if all(mask.is_cpu for mask in masks):
        # On a CPU, numpy counts bool thirty times as fast as torch 2.13.
        return [int(np.count_nonzero(mask.numpy())) for mask in masks]
    return read_together([mask.count_nonzero() for mask in masks])


def some(scores: Sequence[Tensor], chosen: list[int]) -> Sequence[Tensor]:
    """Return the chosen scores. Scores computed on access stay lazy."""
    if len(chosen) == len(scores):
        return scores
    return [scores[i] for i in chosen] if isinstance(scores, list | tuple) else _Some(scores, chosen)


class _Some(Sequence[Tensor]):
    """A selection of scores that are computed on access."""

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


def _share(sparsity: float) -> float:
    return float(checked(sparsity, float, "prune_mask", "sparsity", low=0, high=1))


def _comparable(scores: Tensor) -> Tensor:
    scores = scores.detach()
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def _refuse_nan(scores: Tensor, index: int) -> None:
    flat = scores.reshape(-1)
    if not flat.numel():
        return
    peak = int(flat.numpy().argmax()) if flat.is_cpu else None  # a NaN counts as largest
    refuse(flat.max().isnan() if peak is None else flat[peak].isnan(), lambda: _nan_in(index, peak))


def _masks(scores: Sequence[Tensor], num_pruned: int) -> list[Tensor]:
    if (marked := _marked(scores, num_pruned)) is not None:
        masks, counts = marked
        for index, nan in enumerate(counts[:, 1].bool().unbind()):
            refuse(nan, partial(_nan_in, index))
        return masks
    # Sampling returns None where it cannot be exact. The histogram always is.
    return _masks_by_sample(scores, num_pruned) or _masks_by_histogram(scores, num_pruned)


def _counted_masks(scores: Sequence[Tensor], num_pruned: int) -> tuple[list[Tensor], list[int]]:
    """Return the masks, and the number of elements each keeps. A GPU is read once."""
    if (marked := _marked(scores, num_pruned)) is None:
        masks = _masks(scores, num_pruned)
        return masks, count_kept(masks)
    kept, nan = marked[1].T.tolist()
    if any(nan):
        raise _nan_in(next(index for index, found in enumerate(nan) if found))
    return marked[0], kept


def _marked(scores: Sequence[Tensor], num_pruned: int) -> tuple[list[Tensor], Tensor] | None:
    """Return `marked_largest` of the scores on a GPU if they fit in memory, else None."""
    like: Sequence[Tensor] = getattr(scores, "tensors", scores)
    if not like or not like[0].is_cuda or (sum(tensor.numel() for tensor in like) > _HELD and scores is not like):
        return None
    return marked_largest([scores[index] for index in range(len(scores))], num_pruned)


def _nan_in(index: int, place: int | None = None) -> ConfigError:
    where = "" if place is None else f" at flat index {place}"
    return ConfigError("prune_mask", f"scores must not be NaN, got one in tensor {index}{where}")


def _masks_by_sample(scores: Sequence[Tensor], num_pruned: int) -> list[Tensor] | None:
    """Return the masks with one pass over the scores, on a CPU, or None if that is not possible."""
    like: Sequence[Tensor] = getattr(scores, "tensors", scores)
    numel = sum(tensor.numel() for tensor in like)
    # One dtype and the CPU: the kernel compares pieces in numpy.
    if not 0 < num_pruned < numel or len({(tensor.dtype, tensor.device.type) for tensor in like}) > 1:
        return None
    if like[0].device.type != "cpu" or not like[0].is_floating_point():
        return None

    part = getattr(scores, "part", None)
    if part is None:
        if not isinstance(scores, list | tuple):
            return None  # scores computed on access would be computed in full for every slice

        def part(index: int, where: slice) -> Tensor:
            return _comparable(scores[index].reshape(-1)[where])

    masks = [torch.empty(tensor.shape, dtype=torch.bool) for tensor in like]
    try:
        threshold = keep_largest_(masks, part, num_pruned)
    except ValueError:
        return None  # the histogram finds the position of the NaN
    floor: float | None = getattr(scores, "floor", None)
    # At or below the score of pruned weights, a live one may tie with them.
    return None if threshold is None or (floor is not None and threshold <= floor) else masks


def _masks_by_histogram(scores: Sequence[Tensor], num_pruned: int) -> list[Tensor]:
    masks: list[Tensor] = []
    held: list[Tensor] = []
    dtype = torch.float32
    numel = 0
    for i in range(len(scores)):
        score = scores[i]
        numel += score.numel()
        # Few scores are computed once and kept, many are held one tensor at a time.
        held = [*held, score] if numel <= _HELD else []
        if not score.is_floating_point():
            raise ConfigError("prune_mask", f"scores must be floating point, got {score.dtype} in tensor {i}")
        dtype = torch.float64 if score.dtype == torch.float64 else dtype
        _refuse_nan(_comparable(score), i)
        masks.append(torch.ones(score.shape, dtype=torch.bool, device=score.device))
        del score
    scores = held if numel <= _HELD else scores
    if not num_pruned:
        return masks
    threshold = kth_smallest_there(scores, num_pruned) if dtype == torch.float32 else None
    if threshold is None:
        threshold = torch.tensor(kth_smallest(scores, num_pruned, dtype=dtype), dtype=dtype)
    _keep_above_(masks, scores, threshold, numel - num_pruned)
    return masks


def _keep_above_(masks: Sequence[Tensor], scores: Sequence[Tensor], threshold: Tensor, count: int) -> None:
    """Keep everything above the threshold, then the first elements equal to it, `count` in total, without GPU syncs."""
    # Ties are broken in the order of tensors and elements, so that every process agrees.
    left = torch.full((), count, dtype=torch.int64, device=threshold.device)
    for i, mask in enumerate(masks):
        torch.gt(_comparable(scores[i]), threshold.to(mask.device), out=mask)
        left = left.to(mask.device) - mask.count_nonzero()
    for i, mask in enumerate(masks):
        flat, left = _comparable(scores[i]).reshape(-1), left.to(mask.device)
        for piece, score in zip(torch.split(mask.view(-1), _PIECE), torch.split(flat, _PIECE), strict=True):
            ties = score == threshold.to(mask.device)
            if mask.is_cpu and not ties.any():
                continue
            ties &= ties.cumsum(0) <= left
            piece |= ties
            left = left - ties.count_nonzero()


NEARLY_EMPTY = 0.99
"""Layers with at least this share pruned are named in a note."""
# Floating-point tolerance: 0.29 * 100 is slightly less than 29.
_ROUNDING = 1e-6


def layer_limits(most: float, sparsity: float, sizes: Sequence[int]) -> list[int]:
    """Return how many elements of each layer may be pruned.

    That is ``floor(most·n)`` of n elements, but never all. If rounding makes `sparsity` unreachable in total (with few
    heads, or `most` equal to `sparsity`), layers may lose ``ceil(sparsity·n)``.

    Example:
        >>> layer_limits(0.9, 0.5, [64, 10, 4, 1])
        [57, 9, 3, 0]
        >>> layer_limits(0.5, 0.5, [5, 5])
        [3, 3]
    """
    limits = [max(min(math.floor(most * size + _ROUNDING), size - 1), 0) for size in sizes]
    if sum(limits) >= round(sparsity * sum(sizes)):
        return limits
    # Limits must not make the sparsity unreachable. If rounding down would, every layer may lose its share rounded up.
    rounded_up = (min(math.ceil(sparsity * size - _ROUNDING), size - 1) for size in sizes)
    return [max(pair) for pair in zip(limits, rounded_up, strict=True)]


def at_limit(most: float, sparsity: float, layers: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the names of the layers that reached their limit."""
    limits = layer_limits(most, sparsity, [size for size, _ in layers.values()])
    pairs = zip(layers.items(), limits, strict=True)
    return [name for (name, (_, gone)), limit in pairs if 0 < limit <= gone]


def limit_notes(where: str, most: float, capped: Sequence[str], weights: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a warning for each kind of layer or tower that lost most of its weights."""
    notes = []
    if capped:
        notes.append(
            f"{where}: {listed(capped)} reached {100 * most:.4g} %, the most that one layer may lose "
            "(max_layer_sparsity), so other layers lost more"
        )
    nearly = {name: counts for name, counts in weights.items() if counts[1] > NEARLY_EMPTY * counts[0]}
    if nearly:
        named = [f"{name} ({gone:,} of {size:,})" for name, (size, gone) in nearly.items()]
        notes.append(f"{where}: more than {100 * NEARLY_EMPTY:g} % of these layers is pruned: {listed(named)}")
    return notes + tower_notes(where, weights)


class RankedScores(Sequence[Tensor]):
    """The scores of several weights, computed on access. Pruned weights rank below all others.

    Each expert's matrix of stacked experts is a separate entry: `owners` says which weight it belongs to.
    """

    def __init__(self, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], scorer: Scorer) -> None:
        modules = scorer.modules
        stacked = {name for name in weights if isinstance(modules.get(name), StackedExperts)}
        parts = {name: len(weight) if name in stacked else 0 for name, weight in weights.items()}
        self.owners = [name for name, num in parts.items() for _ in range(num or 1)]
        """The weight that each matrix belongs to, in tie-breaking order."""
        self._experts = [expert for num in parts.values() for expert in (range(num) if num else [None])]
        self.tensors = [_like(weights[n], expert) for n, expert in zip(self.owners, self._experts, strict=True)]
        """The matrices to score: shapes and devices, without computing a score."""
        self._weights, self._masks, self._scorer = weights, masks, scorer
        self._last: tuple[str, Tensor] | None = None  # stacked experts, whose matrices are requested one by one
        sharded = any(hasattr(weight, "device_mesh") for weight in weights.values())
        # Others compute the whole tensor for every slice, and a sharded one is gathered as a whole.
        streams = scorer.criterion in ("magnitude", "random", "taylor", "fisher", "movement") and not sharded
        self.part: Callable[[int, slice], Tensor] | None = self._part if streams else None
        self.floor: float | None = 0.0 if masks and scorer.zero_is_lowest else None
        """Score of pruned weights if `part` does not rank them lower. None while nothing is pruned."""

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        name, expert = self.owners[index], self._experts[index]
        if expert is None:
            return self._of(name)
        if self._last is None or self._last[0] != name:
            self._last = name, self._of(name)
        return self._last[1][expert]

    def _of(self, name: str) -> Tensor:
        scores = self._scorer.scores(name, whole(self._weights[name]))
        if name in self._masks:
            # -inf instead of 0: live scores may be negative (movement) or 0.
            scores = rank_below_(scores.contiguous(), self._masks[name].to(scores.device))
        return scores

    def _part(self, index: int, where: slice) -> Tensor:
        """Return a slice of one tensor's flattened scores."""
        # If 0 is the lowest score, pruned weights have it without a mask. Ranking them below live zeros is left to the
        # slower `self[index]`.
        name, expert = self.owners[index], self._experts[index]
        if expert is not None:
            start, stop, _ = where.indices(numel := self.tensors[index].numel())
            where = slice(expert * numel + start, expert * numel + stop)
        scores = self._scorer.part(name, self._weights[name], where)
        # Their scores are already 0, the lowest score, so no mask is needed.
        if name not in self._masks or self._scorer.zero_is_lowest:
            return scores
        return rank_below_(scores.contiguous(), self._masks[name].reshape(-1)[where].to(scores.device))

    def joined(self, masks: Sequence[Tensor]) -> dict[str, Tensor]:
        """Join the masks of matrices to one mask per weight."""
        found: dict[str, list[Tensor]] = {}
        for name, mask in zip(self.owners, masks, strict=True):
            found.setdefault(name, []).append(mask)
        stacked = {name for name, expert in zip(self.owners, self._experts, strict=True) if expert is not None}
        return {name: torch.stack(parts) if name in stacked else parts[0] for name, parts in found.items()}


def _like(weight: Tensor, expert: int | None) -> Tensor:
    """Return an empty tensor shaped like one matrix of a weight. Indexing a sharded weight would gather it."""
    return weight if expert is None else weight.new_empty(()).expand(weight.shape[1:])


def select_weights(
    config: PruneConfig,
    modules: Mapping[str, nn.Module],
    weights: Mapping[str, Tensor],
    scores: RankedScores,
    sparsity: float,
    own: Mapping[str, float],
) -> dict[str, Tensor]:
    """Return the mask of each weight, for granularities that prune weights instead of units."""
    owners = scores.owners
    alone = [own.get(name) for name in owners]
    if config.granularity == "n_m":
        kept, of = config.kept_of
        # Counted from the end: a matrix of stacked experts has one axis less than the parameter.
        axes = [input_axis(modules[name]) - weights[name].ndim for name in owners]
        return scores.joined([nm_mask_of_scores(scores[i], kept, of, axis=axis) for i, axis in enumerate(axes)])
    if config.criterion == "wanda":
        # Each output row separately: all rows lose the same share, so scope does not matter.
        return {name: row_mask(modules[name], scores[i], own.get(name, sparsity)) for i, name in enumerate(owners)}
    if config.granularity == "block":
        blocks = [block_of(config, modules[name]) for name in owners]
        tiles = [block_scores(scores[i], block) for i, block in enumerate(blocks)]
        masks = _by_scope(config, tiles, sparsity, alone, owners)
        shapes = [tensor.shape for tensor in scores.tensors]
        masks = [expand_blocks(*each) for each in zip(masks, shapes, blocks, strict=True)]
    else:
        masks = _by_scope(config, scores, sparsity, alone, owners)
    found = scores.joined(masks)
    if config.threshold is not None:
        # Weights with |w| at or above the threshold stay, even if the sparsity is then not reached.
        for name, mask in found.items():
            mask |= below_threshold_mask(whole(weights[name]), config.threshold)
    return found


def _by_scope(
    config: PruneConfig,
    scores: Sequence[Tensor],
    sparsity: float,
    alone: Sequence[float | None],
    names: Sequence[str] = (),
) -> list[Tensor]:
    """Return the masks: tensors with their own share each separately, the others according to the scope."""
    rest = [i for i, share in enumerate(alone) if share is None]
    masks: dict[int, Tensor] = {}
    towers = tower_names([names[i] for i in rest]) if config.resolved_scope == "tower" else [""] * len(rest)
    for tower in dict.fromkeys(towers):
        inside = [i for i, place in zip(rest, towers, strict=True) if place == tower]
        masks |= zip(inside, _together(config, some(scores, inside), sparsity), strict=True)
    return [masks[i] if share is None else prune_masks([scores[i]], share)[0] for i, share in enumerate(alone)]


def _together(config: PruneConfig, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    shapes = [tensor.shape for tensor in getattr(scores, "tensors", scores)]
    if config.resolved_scope in ("global", "tower"):
        # Of the final sparsity, so that limits are the same at every update.
        sizes = [shape.numel() for shape in shapes]
        return prune_masks(scores, sparsity, layer_limits(config.most_of_a_layer, config.sparsity, sizes))
    if config.resolved_scope == "local":
        shares = [sparsity] * len(scores)
    else:
        kernel = config.resolved_scope == "erdos_renyi_kernel"
        shares = erdos_renyi_sparsities(shapes, sparsity, kernel=kernel, most=config.most_of_a_layer)
    return [prune_masks([scores[i]], share)[0] for i, share in enumerate(shares)]


def select_units(
    config: PruneConfig, scores: Sequence[Tensor], sparsity: float, alone: Sequence[float | None]
) -> list[Tensor]:
    """Return which units of each group to keep.

    With scope local or global every group keeps at least its best unit, and with global at least what `layer_limits`
    leaves. With granularity layer each group is one layer, and all layers compete.
    """
    if config.granularity == "layer":
        keep = prune_mask(torch.cat(list(scores)), sparsity)
        return list(torch.split(keep, [len(each) for each in scores]))
    return _by_scope(config, scores, sparsity, alone)
