"""Which weights a scope and a granularity prune, given what each is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from eff_kernels.pruning import rank_below_
from torch import Tensor, nn

from shared_core.pruning.axes import input_axis
from shared_core.pruning.blocks import block_scores, expand_blocks
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.criteria import below_threshold_mask
from shared_core.pruning.distribution import erdos_renyi_sparsities
from shared_core.pruning.layer_limits import layer_limits
from shared_core.pruning.masks import prune_mask, prune_masks
from shared_core.pruning.n_m import nm_mask_of_scores
from shared_core.pruning.scorers import Scorer, from_output_rows, output_rows
from shared_core.sharded import whole


class RankedScores(Sequence[Tensor]):
    """The scores of several weights, computed on access, with what is pruned already below everything.

    Args:
        weights: By name, in the order in which ties are broken; whole.
        masks: The whole masks so far; empty where pruned weights compete again.
        scorer: What computes scores.
    """

    def __init__(self, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], scorer: Scorer) -> None:
        self.names = list(weights)
        self.tensors = list(weights.values())
        """What the scores are of: their shapes and devices, without computing a score."""
        self._weights, self._masks, self._scorer = weights, masks, scorer
        sharded = any(hasattr(weight, "device_mesh") for weight in self.tensors)
        # others compute the whole tensor for every slice, and a sharded one is gathered whole
        streams = scorer.criterion in ("magnitude", "random", "taylor", "fisher", "movement") and not sharded
        self.part: Callable[[int, slice], Tensor] | None = self._part if streams else None
        self.floor: float | None = 0.0 if masks and scorer.zero_is_lowest else None
        """What pruned weights score where `part` does not rank them lower; None while nothing is pruned."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        name = self.names[index]
        scores = self._scorer.scores(name, whole(self._weights[name]))
        if name in self._masks:
            scores = rank_below_(scores.contiguous(), self._masks[name].to(scores.device))
        return scores

    def _part(self, index: int, where: slice) -> Tensor:
        """Return a slice of one tensor's flattened scores.

        A pruned weight's is what its value of 0 scores, where that is the lowest score there is: ranking it below live
        zeros is left to ``self[index]``, which is slower. Where it is not the lowest it is ranked below all here.
        """
        name = self.names[index]
        scores = self._scorer.part(name, self._weights[name], where)
        if name not in self._masks or self._scorer.zero_is_lowest:
            return scores
        return rank_below_(scores.contiguous(), self._masks[name].reshape(-1)[where].to(scores.device))


def new_masks(
    config: PruneConfig,
    modules: Mapping[str, nn.Module],
    weights: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    scorer: Scorer,
    sparsity: float,
) -> dict[str, Tensor]:
    """Return the next masks of weights; one that there is nothing to score by keeps the mask that it has, or all of it.

    Args:
        config: Criterion, granularity and scope.
        modules: By weight name, the module that holds it.
        weights: All within reach.
        masks: The whole masks so far.
        scorer: What computes scores.
        sparsity: Share to prune, in [0, 1).
    """
    scored = {name: weight for name, weight in weights.items() if not scorer.ready or scorer.has_seen(name)}
    kept = {
        name: masks[name] if name in masks else torch.ones_like(weight, dtype=torch.bool)
        for name, weight in weights.items()
        if name not in scored
    }
    scores = RankedScores(scored, {} if config.straight_through else masks, scorer)
    return kept | select_weights(config, modules, scores, sparsity)


def select_weights(
    config: PruneConfig, modules: Mapping[str, nn.Module], scores: RankedScores, sparsity: float
) -> dict[str, Tensor]:
    """Return by name which elements to keep, for the granularities of weights (not of units).

    Args:
        config: Criterion, granularity and scope.
        modules: By the names of the scores, the module whose ``weight`` each is.
        scores: Of all weights within reach.
        sparsity: Share to prune, in [0, 1).
    """
    names = scores.names
    if config.granularity == "n_m":
        kept, of = config.kept_of
        found = (nm_mask_of_scores(scores[i], kept, of, axis=input_axis(modules[name])) for i, name in enumerate(names))
        return dict(zip(names, found, strict=True))
    if config.criterion == "wanda":
        return {name: row_mask(modules[name], scores[i], sparsity) for i, name in enumerate(names)}
    if config.granularity == "block":
        tiles = [block_scores(scores[i], config.block_size) for i in range(len(names))]
        masks = _by_scope(config, tiles, sparsity)
        shapes = [tensor.shape for tensor in scores.tensors]
        masks = [expand_blocks(*pair, config.block_size) for pair in zip(masks, shapes, strict=True)]
    else:
        masks = _by_scope(config, scores, sparsity)
    if config.threshold is not None:
        above = [below_threshold_mask(whole(weight), config.threshold) for weight in scores.tensors]
        masks = [mask | kept for mask, kept in zip(masks, above, strict=True)]
    return dict(zip(names, masks, strict=True))


def _by_scope(config: PruneConfig, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    shapes = [tensor.shape for tensor in getattr(scores, "tensors", scores)]
    if config.resolved_scope == "global":
        # of the sparsity at the end: what a layer may lose is the same at every update
        sizes = [shape.numel() for shape in shapes]
        return prune_masks(scores, sparsity, layer_limits(config.most_of_a_layer, config.sparsity, sizes))
    if config.resolved_scope == "local":
        shares = [sparsity] * len(scores)
    else:
        kernel = config.resolved_scope == "erdos_renyi_kernel"
        shares = erdos_renyi_sparsities(shapes, sparsity, kernel=kernel, most=config.most_of_a_layer)
    return [prune_masks([scores[i]], share)[0] for i, share in enumerate(shares)]


@torch.no_grad()
def row_mask(module: nn.Module, scores: Tensor, sparsity: float) -> Tensor:
    """Return which elements to keep when those of one output compete among themselves, as Wanda's do.

    Exactly ``n - round(sparsity·n)`` of each output's n stay, at least one; ties by lowest index (Sun et al. 2023,
    arXiv:2306.11695).

    Args:
        module: The layer whose ``weight`` is scored.
        scores: Of its shape.
        sparsity: Share to prune, in [0, 1].

    Example:
        >>> row_mask(nn.Linear(2, 2), torch.tensor([[1.0, 2.0], [9.0, 8.0]]), 0.5)
        tensor([[False,  True],
                [ True, False]])
    """
    rows = output_rows(module, scores)
    kept = max(1, rows.shape[1] - round(sparsity * rows.shape[1]))
    mask = nm_mask_of_scores(rows, kept, rows.shape[1], axis=1)
    return from_output_rows(module, mask, scores.shape)


def select_units(config: PruneConfig, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Return which units of each group to keep.

    With scope local or global every group keeps at least its best unit, with global at least what `layer_limits` leaves
    it; with granularity layer a group is one layer, and all of them compete.

    Args:
        config: Granularity and scope.
        scores: One float vector a group.
        sparsity: Share of the units to prune, in [0, 1).
    """
    if config.granularity == "layer":
        keep = prune_mask(torch.cat(list(scores)), sparsity)
        return list(torch.split(keep, [len(each) for each in scores]))
    return _by_scope(config, scores, sparsity)
