"""Which weights a scope and a granularity prune, given their scores, and how sparse each tensor becomes.

A limit per layer keeps one layer from losing nearly everything while others stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from eff_kernels.pruning import rank_below_
from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import whole
from shared_core.errors import ConfigError
from shared_core.modules.weight_views import from_output_rows, input_axis, output_rows
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.masks import block_scores, expand_blocks, nm_mask_of_scores, prune_mask, prune_masks, some
from shared_core.pruning.scorers import Scorer
from shared_core.pruning.scorers.weight_scorers import below_threshold_mask


def erdos_renyi_sparsities(
    shapes: Sequence[Sequence[int]], sparsity: float, *, kernel: bool = False, most: float = 1.0
) -> list[float]:
    """Return a sparsity for each tensor, so that large ones are sparser and all together reach `sparsity`.

    Density is ``ε·(n_in + n_out)/(n_in·n_out)``, with `kernel` ``ε·(n_in + n_out + k_h + k_w)/numel``, and 1 where that
    is more, ``1 - most`` where it is less; ε is solved again for the others until it holds (Mocanu et al. 2018,
    arXiv:1707.04780; Evci et al. 2020, arXiv:1911.11134).

    Args:
        shapes: Of two or more dimensions, ``(n_out, n_in, *kernel)``.
        sparsity: Share of all elements to prune, in [0, 1].
        kernel: Whether kernel sizes count (Erdős–Rényi kernel), or a convolution's kernel is part of its size only.
        most: The largest sparsity of one tensor, at least `sparsity`.

    Raises:
        ConfigError: If `sparsity` is not in [0, 1], or a shape has fewer than two dimensions or no elements.

    Example:
        >>> [round(share, 4) for share in erdos_renyi_sparsities([(4, 4), (64, 64)], 0.9)]
        [0.0, 0.9035]
    """
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"erdos_renyi_sparsities: sparsity must be in [0, 1], got {sparsity!r}")
    numels, shares = [], []
    for shape in shapes:
        if len(shape) < 2:
            raise ConfigError(f"erdos_renyi_sparsities: shapes must have two dimensions or more, got {tuple(shape)}")
        numel = math.prod(shape)
        if not numel:
            raise ConfigError(f"erdos_renyi_sparsities: shapes must not be empty, got {tuple(shape)}, no weights")
        numels.append(numel)
        # without the kernel's sizes a convolution is a matrix n_out x n_in of kernels
        shares.append(sum(shape) / numel if kernel else sum(shape[:2]) / (shape[0] * shape[1]))
    fixed: dict[int, float] = {}  # densities
    kept = (1 - sparsity) * sum(numels)
    while True:
        open_ = [i for i in range(len(numels)) if i not in fixed]
        weight = sum(shares[i] * numels[i] for i in open_)
        epsilon = (kept - sum(density * numels[i] for i, density in fixed.items())) / weight if weight else 0.0
        over = {i: 1.0 for i in open_ if epsilon * shares[i] > 1}
        under = {i: 1 - most for i in open_ if epsilon * shares[i] < 1 - most}
        if not over and not under:
            return [1 - fixed.get(i, max(0.0, epsilon) * shares[i]) for i in range(len(numels))]
        # what those over may not keep raises ε for the others, what those under must keep lowers it: where more is to
        # be handed out than taken back those over stay over, whatever becomes of the others
        surplus = sum((epsilon * shares[i] - density) * numels[i] for i, density in (over | under).items())
        fixed |= (over if surplus >= 0 else {}) | (under if surplus <= 0 else {})


_NAMED = 5
NEARLY_EMPTY = 0.99
"""From this share on a layer is named."""
# of products such as 0.29 * 100, which lies below 29
_ROUNDING = 1e-6


def layer_limits(most: float, sparsity: float, sizes: Sequence[int]) -> list[int]:
    """Return how many elements of each layer may go.

    Of n elements ``floor(most·n)``, but never the last one. Where rounding keeps all together from reaching `sparsity`
    (that of a few heads, or `most` equal to it) ``ceil(sparsity·n)`` of each.

    Args:
        most: Largest share of one layer, at least `sparsity`.
        sparsity: Share of all elements that is asked for.
        sizes: Of the layers, in weights, tiles or units.

    Example:
        >>> layer_limits(0.9, 0.5, [64, 10, 4, 1])
        [57, 9, 3, 0]
        >>> layer_limits(0.5, 0.5, [5, 5])
        [3, 3]
    """
    limits = [max(min(math.floor(most * size + _ROUNDING), size - 1), 0) for size in sizes]
    if sum(limits) >= round(sparsity * sum(sizes)):
        return limits
    rounded_up = (min(math.ceil(sparsity * size - _ROUNDING), size - 1) for size in sizes)
    return [max(pair) for pair in zip(limits, rounded_up, strict=True)]


def at_limit(most: float, sparsity: float, layers: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the names of the layers that have given all that they may.

    Args:
        most: As in `layer_limits`.
        sparsity: As there.
        layers: By name how many elements it has, and how many of them are gone.

    Example:
        >>> at_limit(0.9, 0.5, {"first": (10, 1), "last": (10, 9)})
        ['last']
    """
    limits = layer_limits(most, sparsity, [size for size, _ in layers.values()])
    pairs = zip(layers.items(), limits, strict=True)
    return [name for (name, (_, gone)), limit in pairs if 0 < limit <= gone]


def limit_notes(where: str, most: float, capped: Sequence[str], weights: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return what a user should know of layers that lost most of what they had, a line each.

    Args:
        where: The technique that tells it.
        most: Largest share of one layer that may go.
        capped: Layers that reached it.
        weights: By name how many weights it has, and how many of them are gone.

    Example:
        >>> limit_notes("prune", 0.98, ["fc.weight"], {"fc.weight": (6400, 6272), "out.weight": (6400, 6399)})[1]
        'prune: more than 99 % of these layers is gone: out.weight (6,399 of 6,400)'
    """
    notes = []
    if capped:
        notes.append(
            f"{where}: {_listed(capped)} reached {100 * most:.4g} %, the most that one layer may lose "
            "(max_layer_sparsity); others gave what was missing"
        )
    nearly = {name: counts for name, counts in weights.items() if counts[1] > NEARLY_EMPTY * counts[0]}
    if nearly:
        named = [f"{name} ({gone:,} of {size:,})" for name, (size, gone) in nearly.items()]
        notes.append(f"{where}: more than {100 * NEARLY_EMPTY:g} % of these layers is gone: {_listed(named)}")
    return notes


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


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


def select_weights(
    config: PruneConfig,
    modules: Mapping[str, nn.Module],
    scores: RankedScores,
    sparsity: float,
    own: Mapping[str, float],
) -> dict[str, Tensor]:
    """Return by name which elements to keep, for the granularities of weights (not of units).

    Args:
        config: Criterion, granularity and scope.
        modules: By the names of the scores, the module whose ``weight`` each is.
        scores: Of all weights within reach.
        sparsity: Share to prune, in [0, 1).
        own: By name the share of those weights that are pruned by themselves.
    """
    names = scores.names
    alone = [own.get(name) for name in names]
    if config.granularity == "n_m":
        kept, of = config.kept_of
        found = (nm_mask_of_scores(scores[i], kept, of, axis=input_axis(modules[name])) for i, name in enumerate(names))
        return dict(zip(names, found, strict=True))
    if config.criterion == "wanda":
        return {name: row_mask(modules[name], scores[i], own.get(name, sparsity)) for i, name in enumerate(names)}
    if config.granularity == "block":
        tiles = [block_scores(scores[i], config.block_size) for i in range(len(names))]
        masks = _by_scope(config, tiles, sparsity, alone)
        shapes = [tensor.shape for tensor in scores.tensors]
        masks = [expand_blocks(*pair, config.block_size) for pair in zip(masks, shapes, strict=True)]
    else:
        masks = _by_scope(config, scores, sparsity, alone)
    if config.threshold is not None:
        above = [below_threshold_mask(whole(weight), config.threshold) for weight in scores.tensors]
        masks = [mask | kept for mask, kept in zip(masks, above, strict=True)]
    return dict(zip(names, masks, strict=True))


def _by_scope(
    config: PruneConfig, scores: Sequence[Tensor], sparsity: float, alone: Sequence[float | None]
) -> list[Tensor]:
    """Return the masks of those with a share of their own, each by itself, and of the others as the scope says."""
    rest = [i for i, share in enumerate(alone) if share is None]
    masks = dict(zip(rest, _together(config, some(scores, rest), sparsity), strict=True))
    return [masks[i] if share is None else prune_masks([scores[i]], share)[0] for i, share in enumerate(alone)]


def _together(config: PruneConfig, scores: Sequence[Tensor], sparsity: float) -> list[Tensor]:
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


def select_units(
    config: PruneConfig, scores: Sequence[Tensor], sparsity: float, alone: Sequence[float | None]
) -> list[Tensor]:
    """Return which units of each group to keep.

    With scope local or global every group keeps at least its best unit, with global at least what `layer_limits` leaves
    it; with granularity layer a group is one layer, and all of them compete.

    Args:
        config: Granularity and scope.
        scores: One float vector a group.
        sparsity: Share of the units to prune, in [0, 1).
        alone: Of each group the share that it loses by itself, None of those that `sparsity` is for.
    """
    if config.granularity == "layer":
        keep = prune_mask(torch.cat(list(scores)), sparsity)
        return list(torch.split(keep, [len(each) for each in scores]))
    return _by_scope(config, scores, sparsity, alone)
