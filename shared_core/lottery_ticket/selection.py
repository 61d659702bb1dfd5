"""Which weights a round prunes: a share of the remaining ones, smallest first. Also the random masks of controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import fill_, whole
from shared_core.lottery_ticket.config import LotteryConfig
from shared_core.modules.matching import match_modules
from shared_core.modules.weight_views import CONVOLUTIONS
from shared_core.pruning.config import MOST_OF_WEIGHTS
from shared_core.pruning.scorers import Magnitude
from shared_core.pruning.selection import RankedScores, count_kept, layer_limits, prune_mask, prune_masks
from shared_core.pruning.targets import prunable_types


def layer_rates(model: nn.Module, modules: Mapping[str, nn.Module], config: LotteryConfig) -> dict[str, float]:
    """Return the share of its remaining weights that each tensor loses in a round, for scope local.

    The output layer is the last linear or convolutional one in registration order, like ``last`` in `skip`. It loses
    `output_rate`, half of `rate` by default (Frankle and Carbin 2019, section 2). Convolutions lose `conv_rate`.
    """
    output = match_modules(model, prunable_types(model), where="lottery", include=["last"])[0].module
    # Frankle and Carbin prune the output layer at half the rate of the others.
    half = config.rate / 2 if config.output_rate is None else config.output_rate
    conv = config.rate if config.conv_rate is None else config.conv_rate
    return {
        name: half if module is output else conv if isinstance(module, CONVOLUTIONS) else config.rate
        for name, module in modules.items()
    }


class _Magnitude(Magnitude):
    zero_is_lowest: ClassVar[bool] = False  # a masked weight may have any value


@torch.no_grad()
def next_masks(
    weights: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    rates: Mapping[str, float] | float,
    most: float | None = None,
) -> dict[str, Tensor]:
    """Return the masks after pruning a share of the remaining weights, smallest magnitudes first.

    Of m remaining weights ``round(rate·m)`` are pruned (Python's rounding, halves to even), but never a tensor's last
    one. Among equal magnitudes the lowest flat index is kept. So r rounds of one rate leave ``(1 - rate)^r`` of the
    weights, except for rounding.

    Args:
        weights: The trained weights, any shapes and devices. If FSDP2 shards them, every process must call this.
        masks: Name → whole bool mask, True = kept. Empty means that all are kept.
        rates: Name → rate in [0, 1), for each tensor separately. Or one number, with one threshold for all.
        most: With one threshold, the largest share of one tensor that may be pruned in total. By default 0.98, or the
            overall share if that is higher.

    Returns:
        Name → bool mask, True = keep.

    Source: Frankle and Carbin 2019, arXiv:1803.03635.

    Example:
        >>> weight = {"w": torch.tensor([4.0, -1.0, 3.0, 2.0])}
        >>> first = next_masks(weight, {}, {"w": 0.25})
        >>> next_masks(weight, first, {"w": 0.4})["w"].tolist()
        [True, False, True, False]
    """
    scores = RankedScores(weights, masks, _Magnitude({}))
    held = dict(zip(masks, count_kept([*masks.values()]), strict=True))
    left = [held.get(name, weights[name].numel()) for name in scores.owners]
    if isinstance(rates, Mapping):
        found = {}
        for index, (name, count) in enumerate(zip(scores.owners, left, strict=True)):
            # Rates refer to the remaining weights, but `prune_mask` takes a share of all. Keep at least one weight.
            keep = max(count - round(rates[name] * count), min(count, 1))
            numel = weights[name].numel()
            found[name] = prune_mask(scores[index], (numel - keep) / max(numel, 1))
        return found
    numel = sum(tensor.numel() for tensor in scores.tensors)
    # Already pruned, plus the rate of the rest: the sparsity of all tensors together.
    sparsity = (numel - sum(left) + round(rates * sum(left))) / numel
    limits = layer_limits(most_of_a_tensor(most, sparsity), sparsity, [tensor.numel() for tensor in scores.tensors])
    return dict(zip(scores.owners, prune_masks(scores, sparsity, limits), strict=True))


def most_of_a_tensor(most: float | None, sparsity: float) -> float:
    """Return the largest share of one tensor that may be pruned for an overall `sparsity`. None selects the default."""
    return max(MOST_OF_WEIGHTS, sparsity) if most is None else most


def random_masks(masks: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return random masks that keep as many weights of every tensor as the given ones.

    Example:
        >>> masks = {"w": torch.tensor([True, False, False, True])}
        >>> int(random_masks(masks, torch.Generator().manual_seed(0))["w"].sum())
        2
    """
    drawn = {}
    for name, mask in masks.items():
        chosen = torch.randperm(mask.numel(), generator=generator)[: int(mask.count_nonzero())]
        drawn[name] = torch.zeros(mask.numel(), dtype=torch.bool).index_fill_(0, chosen, True).view(mask.shape)
    return drawn


@torch.no_grad()
def redraw_(parameters: Sequence[Tensor], generator: torch.Generator) -> None:
    """Shuffle the values of every parameter in place.

    If the model's code drew each element independently, the result follows the same distribution, without knowing it.
    Constants (zero biases, the ones of a norm) stay. If elements depend on each other (orthogonal initialization,
    pretrained weights), that structure is lost.

    Example:
        >>> weight = torch.tensor([1.0, 2.0, 3.0])
        >>> redraw_([weight], torch.Generator().manual_seed(1))
        >>> weight.sort().values
        tensor([1., 2., 3.])
    """
    for parameter in parameters:
        # A permutation of the initial values has exactly their distribution, for any initializer.
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        fill_(parameter, whole(parameter).reshape(-1)[order].view(parameter.shape))
