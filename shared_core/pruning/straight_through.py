"""Masks in the forward pass alone: weights under the mask go on learning (movement pruning, SR-STE)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor

from shared_core.ranks import local_part
from shared_core.sharded import part_of, whole_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StraightThrough:
    """What lies under the masks while forward and backward see zeros.

    A parameter holds ``mask·w`` whenever the model runs; gradients with respect to it are those of the dense weight
    (straight-through). For the optimizer step the dense weight is put together, ``mask·w + (1 - mask)·w``, each element
    being in one of the two terms only, so exactly; afterwards it is taken apart again. No module is changed, and a
    checkpoint saved between two steps holds the masked weights. Of what FSDP2 shards a process has its part here.
    """

    def __init__(self) -> None:
        self.hidden: dict[str, Tensor] = {}
        """By name what the masks hide, zero elsewhere."""
        self.is_shown = False
        self._gathered: dict[str, Tensor] | None = None

    def show(self, weights: Mapping[str, Tensor]) -> None:
        """Put the dense weights into the parameters, for the optimizer."""
        if self.is_shown:
            return
        for name, hidden in self.hidden.items():
            # one of the two is all zero bits: a sum would turn -0.0 into +0.0
            bits = _BITS[hidden.element_size()]
            local_part(weights[name].detach()).view(bits).bitwise_or_(hidden.view(bits))
        self.is_shown = True

    def hide(self, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        """Take the parameters apart along the masks; they must hold the dense weights, as after `show`."""
        self.hidden = {}
        for name, mask in masks.items():
            weight = local_part(weights[name].detach())
            hidden = weight.clone()
            apply_mask_([hidden], [~mask])
            apply_mask_([weight], [mask])
            self.hidden[name] = hidden
        self.is_shown = False

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Hold whole what is hidden, until `let_go`; every process must call it."""
        self._gathered = self.whole(weights)

    def let_go(self) -> None:
        """Undo `gather`."""
        self._gathered = None

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is hidden, whole; of sharded weights that is gathered, or every process must call it."""
        if self._gathered is not None:
            return self._gathered
        return {name: whole_of(part, weights[name]) for name, part in self.hidden.items()}

    def load(self, hidden: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Take back what `whole` returned."""
        moved = {name: value.to(weights[name].device, weights[name].dtype) for name, value in hidden.items()}
        self.hidden = {name: part_of(value, weights[name]) for name, value in moved.items()}

    def drop(self) -> None:
        """Forget what is hidden: the masks are final."""
        self.hidden = {}
        self.is_shown = False

    @torch.no_grad()
    def add_decay_(self, gradients: Mapping[str, Tensor], strength: float) -> None:
        """Add ``strength·(1 - mask)·w`` to the gradients (SR-STE, Zhou et al. 2021, arXiv:2102.04010, equation 9)."""
        for name, hidden in self.hidden.items():
            if name in gradients:
                gradients[name].add_(hidden.to(gradients[name].dtype), alpha=strength)
