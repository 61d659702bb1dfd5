"""RigL: a sparse network whose connections move to where the gradient asks for them (Evci et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shared_core.pruning.masks import prune_mask
from shared_core.sharded import whole, whole_of


def rigl_drop_share(step: int, *, begin: int, end: int, alpha: float) -> float:
    """Return the share of a tensor's live weights that move at `step`: ``α/2·(1 + cos(π·t/T_end))``.

    Args:
        step: Applied optimizer steps.
        begin: Step that counts as t = 0.
        end: Step that counts as T_end; from there on nothing moves.
        alpha: Share at `begin`, in (0, 1).

    Example:
        >>> rigl_drop_share(50, begin=0, end=100, alpha=0.3)
        0.15
    """
    if step >= end:
        return 0.0
    return alpha / 2 * (1 + math.cos(math.pi * max(0, step - begin) / (end - begin)))


@torch.no_grad()
def moved_masks(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], masks: Mapping[str, Tensor], drop_share: float
) -> dict[str, Tensor]:
    """Return `rigl_mask` of every weight, scored by magnitude; one without a gradient keeps its mask.

    Args:
        weights: By name; sharded ones are gathered one by one, and then every process must call it.
        gradients: Dense ones of the step, before masks: of a sharded weight this process's part.
        masks: Whole.
        drop_share: Share of the live weights to move, in [0, 1].
    """
    return {
        name: rigl_mask(whole(weight.detach()).abs(), whole_of(gradients[name], weight), masks[name], drop_share)
        if name in gradients
        else masks[name]
        for name, weight in weights.items()
    }


@torch.no_grad()
def rigl_mask(scores: Tensor, gradient: Tensor, mask: Tensor, drop_share: float) -> Tensor:
    """Return the mask after the lowest of the live weights were dropped and as many grown where the gradient is large.

    ``k = round(drop_share·live)``, at most as many as are pruned: the k live weights of the lowest score go; of all
    that are pruned then, the k with the largest ``|gradient|`` come, dropped ones too if their gradient says so. Ties
    go by lowest flat index (Evci et al. 2020, arXiv:1911.11134, algorithm 1).

    Args:
        scores: What each weight is worth, shape of the weight.
        gradient: Dense gradient of the step, before masks, same shape.
        mask: bool, True = live, same shape.
        drop_share: Share of the live weights to move, in [0, 1].

    Returns:
        bool of the same shape with exactly as many live weights as `mask`.

    Example:
        >>> rigl_mask(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 5.0]), torch.tensor([1, 1, 0]).bool(), 0.5)
        tensor([ True, False,  True])
    """
    num_live = int(mask.count_nonzero())
    moved = min(round(drop_share * num_live), mask.numel() - num_live)
    if moved == 0:
        return mask.clone()
    flat = mask.reshape(-1)
    live = flat.nonzero().view(-1)
    stay = torch.zeros_like(flat)
    stay[live] = prune_mask(scores.reshape(-1)[live], moved / num_live)
    pruned = (~stay).nonzero().view(-1)
    grow = prune_mask(gradient.reshape(-1)[pruned].abs(), 1 - moved / pruned.numel())
    stay[pruned[grow]] = True
    return stay.view(mask.shape)
