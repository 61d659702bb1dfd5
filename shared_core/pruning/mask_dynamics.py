"""Mask policies under which pruned weights may come back.

RigL moves connections to where gradients are large (Evci et al. 2020). Straight-through masks act only in forward and
backward, and masked weights keep learning (movement pruning, recompute, SR-STE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import part_of, whole, whole_of
from shared_core.engine.technique import Context
from shared_core.modules.matching import StackedExperts, matrices
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.masks import MaskPolicy, clear_moments_
from shared_core.pruning.scorers import Scorer
from shared_core.pruning.selection import count_kept, lowest_pruned
from shared_core.pruning.targets import Targets


def rigl_drop_share(step: int, *, begin: int, end: int, alpha: float) -> float:
    """Return the share of a tensor's live weights that move at `step`: ``α/2·(1 + cos(π·t/T_end))``."""
    if step >= end:
        return 0.0
    return alpha / 2 * (1 + math.cos(math.pi * max(0, step - begin) / (end - begin)))


@torch.no_grad()
def rigl_mask(scores: Tensor, gradient: Tensor, mask: Tensor, drop_share: float, num_live: int | None = None) -> Tensor:
    """Return the mask after dropping the lowest live weights and growing as many where gradients are large.

    ``k = round(drop_share·live)``, limited by the number of pruned weights. The k live weights with the lowest scores
    are dropped. Then, of all pruned weights including the dropped ones, the k with the largest ``|gradient|`` grow. Of
    equal values the lowest index wins (Evci et al. 2020, arXiv:1911.11134, algorithm 1).

    Args:
        scores: Score of each weight, same shape as the weight.
        gradient: Dense gradient of the step, before masks, same shape.
        mask: bool, True = live, same shape.
        drop_share: Share of the live weights to move, in [0, 1].
        num_live: Number of live weights, if known, to avoid reading it from a GPU.

    Returns:
        bool of the same shape with exactly as many live weights as `mask`.
    """
    num_live = count_kept([mask])[0] if num_live is None else num_live
    # As many grow as are dropped, so at most the number of pruned weights.
    moved = min(round(drop_share * num_live), mask.numel() - num_live)
    if moved == 0:
        return mask.clone()
    # Elements that do not take part rank above all others, so their number need not be read from the GPU.
    stay = lowest_pruned(torch.where(mask, scores, torch.inf), moved) & mask
    return stay | lowest_pruned(torch.where(stay, -torch.inf, gradient.abs()), mask.numel() - moved)


class RigL(MaskPolicy):
    """Prunes to the full sparsity at `begin`, then moves live weights within each tensor at every update until `end`.

    An update uses the dense gradients of the step just before it (Evci et al. 2020, algorithm 1). They are copied
    before masks and penalties change them, and only for that step, because they need as much memory as the model.
    """

    def __init__(self, config: PruneConfig, targets: Targets, scorer: Scorer) -> None:
        super().__init__(config, targets, scorer)
        self._dense: dict[str, Tensor] = {}

    def observe(self, context: Context, gradients: Mapping[str, Tensor]) -> None:
        """Copy the dense gradients if masks are updated after this step."""
        super().observe(context, gradients)
        # Dense gradients are as large as the weights, so they are only kept for a step before an update.
        if self.schedule.is_due(context.step + 1) and context.step >= self.schedule.begin:
            # Copied: `shape_gradients` zeroes those of pruned weights right after, in place.
            self._dense = {name: local_part(gradient).clone() for name, gradient in gradients.items()}

    @torch.no_grad()
    def choose(self, context: Context, sparsity: float, own: Mapping[str, float]) -> dict[str, Tensor]:
        """Return `rigl_mask` of every weight, scored by magnitude. A weight without a gradient keeps its mask."""
        if not self.store:
            return super().choose(context, sparsity, own)
        begin, end = self.schedule.begin, self.schedule.end
        share = rigl_drop_share(context.step, begin=begin, end=end, alpha=self.config.drop_share)
        masks, gone = dict(self.store), self.store.num_pruned
        for name, gradient in self._dense.items():  # sharded ones are gathered one at a time, on every process
            weight = self.weights[name]
            module, scores = self.targets.modules[name], whole(weight.detach()).abs()
            each = (matrices(module, tensor) for tensor in (scores, whole_of(gradient, weight), masks[name]))
            is_stack = isinstance(module, StackedExperts)
            live = None if is_stack else masks[name].numel() - gone[name]
            moved = [rigl_mask(score, grad, mask, share, live) for score, grad, mask in zip(*each, strict=True)]
            masks[name] = torch.stack(moved) if is_stack else moved[0]
        return masks

    def end_step(self) -> None:
        """Forget the gradients."""
        super().end_step()
        self._dense = {}


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StraightThrough:
    """Stores the values under the masks, while forward and backward see zeros.

    A parameter holds ``mask·w`` whenever the model runs, and its gradient is that of the dense weight
    (straight-through). For the optimizer step the dense weight is restored as ``mask·w + (1 - mask)·w``. This is exact,
    because each element is in only one term. Afterwards it is split again. No module changes, and a checkpoint saved
    between two steps holds the masked weights. For weights sharded by FSDP2, each process stores its own part.
    """

    def __init__(self) -> None:
        self.hidden: dict[str, Tensor] = {}
        """Name → the values under the mask, zero elsewhere."""
        self.is_shown = False
        self._gathered: dict[str, Tensor] | None = None

    def show(self, weights: Mapping[str, Tensor]) -> None:
        """Put the dense weights into the parameters, for the optimizer."""
        if self.is_shown:
            return
        for name, hidden in self.hidden.items():
            # One of the two is all zero bits. A sum would turn -0.0 into +0.0.
            bits = _BITS[hidden.element_size()]
            local_part(weights[name].detach()).view(bits).bitwise_or_(hidden.view(bits))
        self.is_shown = True

    def hide(self, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        """Split the parameters by the masks. They must hold the dense weights, as after `show`."""
        self.hidden = {}
        for name, mask in masks.items():
            weight = local_part(weights[name].detach())
            # hidden + weight equals the original bit for bit: each element is in exactly one of the two.
            hidden = weight.clone()
            apply_mask_([hidden], [~mask])
            apply_mask_([weight], [mask])
            self.hidden[name] = hidden
        self.is_shown = False

    def gather(self, weights: Mapping[str, Tensor]) -> None:
        """Gather the hidden values until `release`. Every process must call it."""
        self._gathered = self.whole(weights)

    def release(self) -> None:
        """Undo `gather`."""
        self._gathered = None

    def whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole hidden values. For sharded weights that are not gathered, every process must call it."""
        if self._gathered is not None:
            return self._gathered
        return {name: whole_of(part, weights[name]) for name, part in self.hidden.items()}

    def load(self, hidden: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `whole`."""
        # Use the weight's dtype and device, which may differ from the file's.
        moved = {name: value.to(weights[name].device, weights[name].dtype) for name, value in hidden.items()}
        self.hidden = {name: part_of(value, weights[name]) for name, value in moved.items()}

    def drop(self) -> None:
        """Forget the hidden values, because the masks are final."""
        self.hidden = {}
        self.is_shown = False

    @torch.no_grad()
    def add_decay_(self, gradients: Mapping[str, Tensor], strength: float) -> None:
        """Add ``strength·(1 - mask)·w`` to the gradients (SR-STE, Zhou et al. 2021, arXiv:2102.04010, equation 9)."""
        for name, hidden in self.hidden.items():
            if name in gradients:
                gradients[name].add_(hidden.to(gradients[name].dtype), alpha=strength)


class StraightThroughMasks(MaskPolicy):
    """Weights under the masks keep learning until `freeze`, and may come back (movement, recompute, SR-STE)."""

    stays_pruned: ClassVar[bool] = False

    def __init__(self, config: PruneConfig, targets: Targets, scorer: Scorer) -> None:
        super().__init__(config, targets, scorer)
        self._under = StraightThrough()

    @property
    def _learns(self) -> bool:
        return bool(self.store) and not self.is_final

    def restore(self, state: Mapping[str, Any]) -> None:
        """Also restore the values under the masks."""
        super().restore(state)
        self._under.load(state.get("hidden", {}), self.weights)

    def observe(self, context: Context, gradients: Mapping[str, Tensor]) -> None:
        """Show the dense weights to scorer and optimizer, until `hold`, `take` or `end_step` hides them again."""
        if self._learns:
            self._under.show(self.weights)
        super().observe(context, gradients)
        if self._learns and self.config.criterion == "movement" and self.config.dynamic == "none":
            # Only m·w is trained: a masked weight gets no gradient, but its score does (arXiv:2005.07683, eq. 3).
            parts = self.store.parts
            under = [name for name in parts if name in gradients]
            apply_mask_([local_part(gradients[name]) for name in under], [parts[name] for name in under])

    def shape_gradients(self, context: Context) -> None:
        """Add SR-STE's decay. Weights that learn under the masks keep their gradients."""
        if not self._learns:
            super().shape_gradients(context)
        elif self.config.sr_ste:
            # In SR-STE the straight-through gradient reaches masked weights, and this decay pulls them to 0.
            found = {name: local_part(weight.grad) for name, weight in self.weights.items() if weight.grad is not None}
            self._under.add_decay_(found, self.config.sr_ste)

    def hold(self, context: Context) -> None:
        """Hide the values under the masks again."""
        if self._learns:
            self._under.hide(self.weights, self.store.parts)
        else:
            super().hold(context)

    def end_step(self) -> None:
        """Hide the dense weights again if the optimizer skipped the step."""
        super().end_step()
        self._hide()

    def lay_open(self) -> None:
        """Show the dense weights, because all of them compete again."""
        if self._learns:
            self._under.show(self.weights)
        else:
            super().lay_open()

    def take(self, context: Context, masks: Mapping[str, Tensor]) -> None:
        """Replace the masks. Optimizer moments of masked weights continue, like the weights."""
        if self.is_final:
            super().take(context, masks)
            return
        self._under.show(self.weights)
        self.store.set(masks)
        self._under.hide(self.weights, self.store.parts)

    def freeze(self, context: Context) -> None:
        """Drop the values under the masks, and their optimizer state."""
        super().freeze(context)
        if self.store:
            self._hide()
            self._under.drop()
            # Optimizer moments of weights that are now final zeros would move them.
            clear_moments_(context.optimizers, self.weights, self.store.parts)

    def _hide(self) -> None:
        if self._under.is_shown:
            self._under.hide(self.weights, self.store.parts)

    def gather(self) -> None:
        """Also gather the hidden values."""
        super().gather()
        self._under.gather(self.weights)

    def release(self) -> None:
        """Undo `gather`."""
        super().release()
        self._under.release()

    def state_dict(self) -> dict[str, Any]:
        """Also return the values under the masks."""
        return super().state_dict() | {"hidden": self._under.whole(self.weights)}
