"""Shapley values of a model's own units: what each adds to keeping the outputs of a micro-batch as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.model_calls import evaluated
from shared_core.pruning.removal.groups import ChannelGroup
from shared_core.pruning.scorers import shapley_values
from shared_core.pruning.units import masks_of_units
from shared_core.ranks import broadcast_

VALUE = "minus the squared change of the model's outputs on one micro-batch, relative to their square"


@torch.no_grad()
def shapley_of_units(
    model: nn.Module,
    groups: Sequence[ChannelGroup],
    live: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    replay: Callable[[], Any],
    *,
    permutations: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Return one score a unit, a vector a group; 0 for units that are not live.

    The value of a set of units is ``-Σ(y - y_all)² / Σ y_all²`` with y the floating-point outputs when all others are
    masked (a set that changes nothing is worth 0), in eval mode. With several processes it is rank 0's micro-batch.

    Args:
        model: Runs ``permutations·units`` times.
        groups: Whose units play.
        live: One bool vector a group: which units are not pruned yet.
        tensors: By name what masks reach; restored bit for bit.
        replay: Runs the micro-batch and returns its outputs.
        permutations: Orders to draw, at least 2.
        generator: The same on every process.
    """
    sizes = [group.units for group in groups]
    players = torch.cat(list(live)).nonzero().view(-1)
    with evaluated(model):
        reference = _outputs(replay())
        square = sum(float(output.double().square().sum()) for output in reference) or 1.0

        def value(kept: Tensor) -> float:
            keep = torch.cat(list(live))
            keep[players] = kept
            masks = masks_of_units(groups, torch.split(keep, sizes), tensors)
            before = {name: tensors[name].detach().clone() for name in masks}
            try:
                apply_mask_([tensors[name] for name in masks], list(masks.values()))
                found = _outputs(replay())
            finally:
                for name, saved in before.items():
                    tensors[name].detach().copy_(saved)
            pairs = zip(found, reference, strict=True)
            return -sum(float((output.double() - whole.double()).square().sum()) for output, whole in pairs) / square

        values, _ = shapley_values(value, len(players), permutations=permutations, generator=generator)
    scores = torch.zeros(sum(sizes), dtype=torch.float64)
    scores[players] = values
    return list(torch.split(broadcast_(scores), sizes))


def _outputs(out: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output: of a mapping with logits, those alone."""
    if isinstance(out, list) and out and all(hasattr(each, "logits") for each in out):
        out = [each.logits for each in out]
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
