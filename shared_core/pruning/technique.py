"""Pruning during training: masks on a schedule, and weights that stay exactly zero once they are pruned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from eff_kernels.pruning import apply_mask_
from torch import Tensor, nn

from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.criteria import WeightScores
from shared_core.pruning.masks import prune_masks
from shared_core.pruning.optimizer_state import clear_moments_
from shared_core.pruning.schedules import SCHEDULES, update_is_due
from shared_core.pruning.targets import Targets, find_targets
from shared_core.technique import Context, Technique

NOTE = "Unstructured sparsity makes compressed files smaller; dense matrix products do not get faster."


class Pruning(Technique):
    """Prunes the weights of linear and convolutional layers as `PruneConfig` says.

    Masks are recomputed from the weights at the steps of the schedule; what is pruned stays pruned. After
    every optimizer step pruned weights are set to exactly +0.0, whatever momentum, weight decay or an 8-bit
    state would make of them.

    Args:
        config: The options.
    """

    key: ClassVar[str] = "prune"
    config: PruneConfig

    def __init__(self, config: PruneConfig) -> None:
        super().__init__(config)
        self._targets = Targets({}, {})
        self._weights: dict[str, nn.Parameter] = {}
        self._masks: dict[str, Tensor] = {}
        self._packed: dict[str, Tensor] = {}
        self._num_pruned: dict[str, int] = {}
        self._begin = self._end = 0
        self._last_update = -1
        self._sparsity = 0.0
        self._pruned_share = 0.0

    def attach(self, model: nn.Module, context: Context) -> None:
        """Find the weights to prune.

        Raises:
            MatchError: If there are none.
        """
        self._targets = find_targets(model, self.config)

    def begin(self, context: Context) -> None:
        """Resolve the schedule; put saved masks back, or make the first ones if they are due."""
        config = self.config
        end = config.begin if config.schedule == "one_shot" else config.end
        self._begin, self._end = context.resolve_range(config.begin, end, "prune")
        # a checkpoint from before the end is less sparse than what the run promises: no ingredient for a soup
        context.first_usable_step = max(context.first_usable_step, self._end)
        for optimizer in context.optimizers:
            if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
                raise CompatibilityError(
                    "prune: optimizer must not be LBFGS, whose line search trains pruned weights within "
                    "a step; use SGD or AdamW"
                )
        self._weights = self._targets.weights()
        for name, weight in self._weights.items():
            if hasattr(weight, "to_local"):
                raise CompatibilityError(
                    f"prune: {name} must be a plain tensor, got a sharded one (DTensor); use DDP instead"
                )
        self._set_masks({name: _unpack(packed, self._weights[name]) for name, packed in self._packed.items()})
        self._packed = {}
        self._apply()
        if self._last_update < 0 and context.step >= self._begin:
            self._update(context, self._scheduled(context.step))

    def before_optimizer_step(self, context: Context) -> None:
        """Zero the gradients of pruned weights if the trainer clips by norm: they must not enter the norm."""
        if not (context.clips_gradients and self._masks):
            return
        pairs = [(weight.grad, self._masks[name]) for name, weight in self._weights.items() if weight.grad is not None]
        for gradient, _ in pairs:
            if gradient.layout != torch.strided:
                raise CompatibilityError("prune: gradients must be dense, got a sparse one; use sparse=False")
        apply_mask_([gradient for gradient, _ in pairs], [mask for _, mask in pairs])

    def after_optimizer_step(self, context: Context) -> None:
        """Recompute the masks if the schedule says so, and set every pruned weight to +0.0."""
        step = context.step
        due = update_is_due(step, begin=self._begin, end=self._end, every=self.config.every)
        if due and step != self._last_update:
            self._update(context, self._scheduled(step))
        else:
            self._apply()

    def weights_replaced(self, context: Context) -> None:
        """Prune the new weights by the masks there are."""
        self._apply()

    def finish(self, model: nn.Module, context: Context) -> None:
        """Take the last update if the schedule was cut short. Masks stay until `detach`: soups need them."""
        if self._weights and (self._last_update < 0 or self._sparsity < self.config.sparsity):
            self._update(context, self.config.sparsity)
        self._apply()

    def detach(self, model: nn.Module) -> None:
        """Let go of the masks; the state stays readable."""
        if self._masks:
            self._packed = self.state_dict()["masks"]
        self._weights, self._masks = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, eight weights to a byte, and how far the schedule is."""
        masks = {name: _pack(mask) for name, mask in self._masks.items()} or dict(self._packed)
        return {"masks": masks, "last_update": self._last_update, "sparsity": self._sparsity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a saved state; the masks are put on the weights' devices in `begin`.

        Raises:
            CheckpointError: If the state belongs to other weights.
        """
        masks = dict(state["masks"])
        weights = self._targets.weights()
        if masks and set(masks) != set(weights):
            name = sorted(set(masks) ^ set(weights))[0]
            raise CheckpointError(
                f"prune: saved masks must be those of this model's weights, got a difference at {name}; "
                "resume with the model and recipe that wrote the checkpoint"
            )
        for name, packed in masks.items():
            num_bytes = -(-weights[name].numel() // 8)
            if packed.dtype != torch.uint8 or packed.numel() != num_bytes:
                raise CheckpointError(
                    f"prune: saved mask of {name} must be {num_bytes} bytes, got {packed.numel()} of "
                    f"{packed.dtype}; resume with the model that wrote the checkpoint"
                )
        self._packed = masks
        self._last_update = int(state["last_update"])
        self._sparsity = float(state["sparsity"])

    def metrics(self) -> dict[str, float]:
        """Return ``prune/sparsity``, the share of the weights within reach that the masks prune."""
        return {"prune/sparsity": self._pruned_share}

    def report(self) -> dict[str, Any]:
        """Return per tensor how many weights are zero, counted in the weights, and what was left dense."""
        tensors: list[dict[str, Any]] = []
        for name, weight in self._targets.weights().items():
            pruned = weight.numel() - int(weight.detach().count_nonzero())
            entry = {"name": name, "shape": list(weight.shape), "numel": weight.numel(), "pruned": pruned}
            tensors.append({**entry, "sparsity": pruned / weight.numel()})
        numel, pruned = sum(entry["numel"] for entry in tensors), sum(entry["pruned"] for entry in tensors)
        return {
            "tensors": tensors,
            "numel": numel,
            "pruned": pruned,
            "sparsity": pruned / numel if numel else 0.0,
            "begin_step": self._begin,
            "end_step": self._end,
            "last_update_step": self._last_update,
            "left_out": dict(self._targets.left_out),
            "note": NOTE,
        }

    def _scheduled(self, step: int) -> float:
        config = self.config
        sparsity = SCHEDULES[config.schedule](
            step, begin=self._begin, end=self._end, initial=config.initial_sparsity, final=config.sparsity
        )
        # a run resumed with more steps stretches a schedule given in fractions: then it waits for the
        # schedule
        return max(sparsity, self._sparsity)

    def _update(self, context: Context, sparsity: float) -> None:
        self._last_update, self._sparsity = context.step, sparsity
        if sparsity == 0:
            return
        names = list(self._weights)
        groups = [names] if self.config.scope == "global" else [[name] for name in names]
        masks: dict[str, Tensor] = {}
        for group in groups:
            weights = {name: self._weights[name] for name in group}
            numel = sum(weight.numel() for weight in weights.values())
            pruned = sum(self._num_pruned.get(name, 0) for name in group)
            if pruned == round(sparsity * numel):
                masks.update({name: self._masks[name] for name in group if name in self._masks})
                continue
            scores = WeightScores(weights, self._masks, self.config.criterion)
            try:
                masks.update(zip(group, prune_masks(scores, sparsity), strict=True))
            except ConfigError as error:
                name = next((name for name, weight in weights.items() if weight.isnan().any()), group[0])
                raise TrainingError(
                    f"prune: weights must be numbers, got NaN in {name} at step {context.step}; training has "
                    "diverged: lower the learning rate, or clip gradients"
                ) from error
        # Of the newly pruned alone: moments that grew again under older zeros reach no live weight, and AdamW's square
        # root is several times slower on zeros (torch 2.13, CPU).
        live = {name: self._masks[name].eq(mask) if name in self._masks else mask for name, mask in masks.items()}
        self._set_masks(masks)
        clear_moments_(context.optimizers, self._weights, live)
        del live
        self._apply()

    def _set_masks(self, masks: dict[str, Tensor]) -> None:
        self._masks = masks
        self._num_pruned = {name: mask.numel() - int(mask.count_nonzero()) for name, mask in masks.items()}
        numel = sum(mask.numel() for mask in masks.values())
        self._pruned_share = sum(self._num_pruned.values()) / numel if numel else 0.0

    def _apply(self) -> None:
        if self._masks:
            apply_mask_(list(self._weights.values()), list(self._masks.values()))


def _pack(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def _unpack(packed: Tensor, weight: Tensor) -> Tensor:
    bits = np.unpackbits(packed.cpu().numpy(), count=weight.numel()).view(bool)
    return torch.from_numpy(bits).view(weight.shape).to(weight.device)
