"""What an optimizer remembers of a weight is forgotten when the weight is pruned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor

from shared_core.distributed.collectives import local_part

SLOW_ON_ZEROS = (
    "efftrain: prune: on a CPU Adam's step takes about twice as long when half of the gradients are zeros, as those of "
    "pruned weights are where gradients are clipped or an optimizer mixes their elements; pass fused=True to the "
    "optimizer, whose step does not"
)


def is_slow_on_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer takes the square root of second moments by a kernel that is slow on zeros.

    That is Adam on a CPU unless ``fused=True``: torch 2.13's ``sqrt`` takes five times as long on zeros, so that a step
    with the masked gradients of a half pruned model takes more than twice as long.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> [is_slow_on_zeros(torch.optim.AdamW([weight], fused=fused)) for fused in (None, True)]
        [True, False]
    """
    return isinstance(optimizer, torch.optim.Adam) and any(
        not group["fused"] and any(parameter.is_cpu for parameter in group["params"])
        for group in optimizer.param_groups
    )


@torch.no_grad()
def clear_moments_(
    optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> None:
    """Zero, in place, what the optimizers' states hold for weights that are not kept.

    That is every floating-point state tensor whose last dimensions are the weight's (moments, momentum,
    their maxima), and bitsandbytes' 8-bit codes, where zero is the position of 0.0 in the code book
    ``qmap<i>`` beside ``state<i>`` (127 in the signed one, 0 in the unsigned) and the scale of a block need
    not change.

    Args:
        optimizers: Their ``state`` is looked up by parameter.
        weights: Parameters by name.
        masks: bool by the same names, True = keep.
    """
    for optimizer in optimizers:
        for name, weight in weights.items():
            if weight not in optimizer.state:
                continue
            state, mask = optimizer.state[weight], masks[name]
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.shape[-weight.ndim :] != weight.shape:
                    continue
                value = local_part(value)
                if type(value) is not Tensor:
                    continue
                if value.is_floating_point():
                    apply_mask_([value], [mask.to(value.device)])
                elif value.dtype == torch.uint8 and key.replace("state", "qmap") in state:
                    zero = int(state[key.replace("state", "qmap")].abs().argmin())
                    value.masked_fill_(~mask.to(value.device), zero)
