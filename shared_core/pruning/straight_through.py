"""Masks in the forward pass alone: weights under the mask go on learning (movement pruning, SR-STE)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StraightThrough:
    """What lies under the masks while forward and backward see zeros.

    A parameter holds ``mask·w`` whenever the model runs; gradients with respect to it are those of the dense weight
    (straight-through). For the optimizer step the dense weight is put together, ``mask·w + (1 - mask)·w``, each element
    being in one of the two terms only, so exactly; afterwards it is taken apart again. No module is changed, and a
    checkpoint saved between two steps holds the masked weights.
    """

    def __init__(self) -> None:
        self.hidden: dict[str, Tensor] = {}
        """By name what the masks hide, zero elsewhere."""
        self.is_shown = False

    def show(self, weights: Mapping[str, Tensor]) -> None:
        """Put the dense weights into the parameters, for the optimizer."""
        if self.is_shown:
            return
        for name, hidden in self.hidden.items():
            # one of the two is all zero bits: a sum would turn -0.0 into +0.0
            bits = _BITS[hidden.element_size()]
            weights[name].detach().view(bits).bitwise_or_(hidden.view(bits))
        self.is_shown = True

    def hide(self, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        """Take the parameters apart along the masks; they must hold the dense weights, as after `show`."""
        self.hidden = {}
        for name, mask in masks.items():
            weight = weights[name].detach()
            hidden = weight.clone()
            apply_mask_([hidden], [~mask])
            apply_mask_([weight], [mask])
            self.hidden[name] = hidden
        self.is_shown = False

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
