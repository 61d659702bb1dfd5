"""How masks of single weights are chosen and held, and what the receipt tells of them.

The policy here is the plain one: what is pruned stays pruned. Others say in subclasses what differs: RigL, weights that
learn under their masks, whole units.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from eff_kernels.masks import unpack_bits
from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.mask_store import MaskStore, clear_moments_
from shared_core.pruning.patterns import block_scores
from shared_core.pruning.schedules import Schedule
from shared_core.pruning.scorers import Scorer
from shared_core.pruning.selection import RankedScores, at_limit, count_kept, limit_notes, select_weights
from shared_core.pruning.targets import Targets

NOTES = {
    "unstructured": "Unstructured sparsity makes compressed files smaller; dense matrix products do not get faster.",
    "n_m": "2:4 is faster on GPUs with sparse tensor cores once converted; other patterns make files smaller.",
    "layer": "Masked layers cost as much as before, and `eff shrink` keeps them: take them out of the model's code.",
    "block": "Blocks are faster in block-sparse kernels at high sparsity alone; dense matrix products are not.",
}
"""By granularity; of the others `UNITS_NOTE`."""
UNITS_NOTE = "Masked units cost as much as before; `eff shrink` removes them, and makes the model smaller and faster."


class MaskPolicy:
    """Masks of single weights that stay: a pruned weight is +0.0 after every step, and scores below every live one.

    A technique calls `begin`, then `observe`, `shape_gradients`, and `take` or `hold`, and `end_step` in every step,
    and `freeze` when the masks are final.

    Args:
        config: Criterion, granularity and scope.
        targets: The weights within reach, and those with a sparsity of their own.
        scorer: What computes scores.
    """

    stays_pruned: ClassVar[bool] = True
    """Whether a weight that is pruned once is pruned in every later mask."""

    def __init__(self, config: PruneConfig, targets: Targets, scorer: Scorer) -> None:
        self.config, self.targets, self.scorer = config, targets, scorer
        self.store = MaskStore()
        self.weights: Mapping[str, nn.Parameter] = {}
        self.schedule = Schedule(config)
        self.is_final = False
        """Whether no mask changes any more."""

    def begin(self, model: nn.Module, schedule: Schedule) -> None:
        """Take hold of the parameters that the modules hold now."""
        self.weights = self.store.weights = self.targets.weights()
        self.schedule = schedule

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put saved masks on the weights' devices, and apply them.

        Raises:
            CheckpointError: If one is of a tensor that there is not.
        """
        weights, packed = self.store.weights, state["masks"]
        if strange := sorted(set(packed) - set(weights)):
            raise CheckpointError(f"prune: saved masks must be those of this model, got one of {strange[0]}")
        there = {name: mask.to(weights[name].device) for name, mask in packed.items()}  # an eighth of the bytes travels
        self.store.set({name: unpack_bits(mask, weights[name].shape) for name, mask in there.items()})
        self.store.apply()
        if self.is_final:
            self.scorer.detach()

    def listen(self, model: nn.Module) -> None:
        """Watch what the run shows until `freeze`, beyond what the scorer's hooks see."""

    def new_micro_batch(self) -> None:
        """Forget what was watched of the micro-batch before."""

    def observe(self, context: Context, gradients: Mapping[str, Tensor]) -> None:
        """Take in the complete gradients of a step, before it is applied."""
        if self.scorer.needs:
            self.scorer.observe_step(self.weights, gradients)

    def shape_gradients(self, context: Context) -> None:
        """Zero the gradients of pruned weights where they would move live ones, by a norm or a mixing optimizer."""
        if self.store and context.gradients_mix:
            self.store.apply_to_gradients()

    def hold(self) -> None:
        """The step was applied and masks stay: undo what momentum and weight decay did under them."""
        self.store.apply()

    def end_step(self) -> None:
        """Forget what the step showed, whether it was applied or skipped."""
        self.scorer.discard_step()  # a probe may have run another backward through the hooks

    def next_masks(self, context: Context, sparsity: float, own: Mapping[str, float]) -> dict[str, Tensor]:
        """Return whole masks by what was observed; a weight that nothing has reached yet keeps what it has.

        Args:
            context: Of the session.
            sparsity: Share to prune, in [0, 1).
            own: By name the share of those weights that are pruned by themselves.
        """
        self.scorer.reduce()
        self.lay_open()
        unseen = [name for name in self.weights if self.scorer.ready and not self.scorer.has_seen(name)]
        return self.choose(context, sparsity, own, unseen)

    def lay_open(self) -> None:
        """Put the weights that are scored in place: what is pruned scores as 0, and begins there if it comes back."""
        self.store.apply()

    def choose(
        self, context: Context, sparsity: float, own: Mapping[str, float], unseen: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return whole masks by the weights and what is gathered now; arguments are those of `next_masks`.

        Args:
            context: Of the session.
            sparsity: Share to prune.
            own: Shares of single weights.
            unseen: Weights that there is nothing to score by.
        """
        store = self.store
        if store and self.stays_pruned and self.config.resolved_scope == "global":
            sizes = {name: weight.numel() for name, weight in self.weights.items()}
            count = round(sparsity * sum(size for name, size in sizes.items() if name not in own))
            if sum(store.num_pruned.values()) == count + sum(round(share * sizes[name]) for name, share in own.items()):
                return dict(store)
        kept = {
            name: store[name] if name in store else torch.ones_like(self.weights[name], dtype=torch.bool)
            for name in unseen
        }
        scored = {name: weight for name, weight in self.weights.items() if name not in kept}
        scores = RankedScores(scored, store if self.stays_pruned else {}, self.scorer)
        return kept | select_weights(self.config, self.targets.modules, scores, sparsity, own)

    def take(self, context: Context, masks: Mapping[str, Tensor]) -> None:
        """Put new masks in place of those there were."""
        before = dict(self.store.parts)
        self.store.set(masks)
        # Of those that changed alone: moments that grew again under older zeros reach no live weight, and AdamW's
        # square root is several times slower on zeros (torch 2.13, CPU). Grown again, a weight starts without moments.
        for name, part in self.store.parts.items():  # one by one: few more than the masks are held at a time
            live = before.pop(name).eq(part) if name in before else part
            clear_moments_(context.optimizers, {name: self.store.weights[name]}, {name: live})
        self.store.apply()

    def freeze(self, context: Context) -> None:
        """Make the masks final: nothing learns under them any more, and nothing is gathered."""
        self.is_final = True
        self.scorer.detach()

    def close(self) -> None:
        """Let go of the model."""
        self.scorer.detach()
        self.store.set({})
        self.weights, self.store.weights = {}, {}

    def gather(self) -> None:
        """Hold whole what is kept in parts, until `release`; every process must call it."""
        self.scorer.gather()

    def release(self) -> None:
        """Undo `gather`."""
        self.scorer.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, eight weights to a byte, what lies under them, and what was gathered."""
        return {"masks": self.store.packed(), "hidden": {}, "scorer": self.scorer.state_dict(), "units": {}}

    @property
    def own(self) -> Mapping[str, float]:
        """By layer the share that it loses by itself at the end."""
        return self.targets.own

    def layers(self) -> dict[str, tuple[int, int]]:
        """Return by layer how many there are of what is pruned whole, and how many of them are gone."""
        store = self.store
        if self.config.granularity != "block":
            return {name: (store.weights[name].numel(), store.num_pruned[name]) for name in store}
        tiles = {name: block_scores(mask.float(), self.config.block_size) > 0 for name, mask in store.items()}
        return {name: (kept.numel(), kept.numel() - count_kept(kept)) for name, kept in tiles.items()}

    def report(self) -> dict[str, Any]:
        """Return what the receipt tells of units."""
        return {}

    def layers_report(self) -> dict[str, Any]:
        """Return by which scope layers lost what they did, which could not give more, and what a user should know."""
        config, store = self.config, self.store
        capped: list[str] = []
        if config.layers_differ:
            alone = self.own
            others = {name: counts for name, counts in self.layers().items() if name not in alone}
            capped = at_limit(config.most_of_a_layer, config.sparsity, others)
        reached = [name for name in store if name in self.targets.modules]
        counts = {name: (store.weights[name].numel(), store.num_pruned[name]) for name in reached}
        return {
            "scope": config.resolved_scope if config.layers_differ or config.granularity == "layer" else "local",
            "max_layer_sparsity": config.most_of_a_layer if config.layers_differ else None,
            "capped": capped,
            "overrides": dict(self.targets.sparsities),
            "notes": limit_notes(config.key, config.most_of_a_layer, capped, counts),
            "note": NOTES.get(config.granularity, UNITS_NOTE),
        }


def weights_report(weights: Mapping[str, Tensor], counted: Mapping[str, int]) -> dict[str, Any]:
    """Return how many weights are zero, of each tensor and in all, counted in the weights.

    Args:
        weights: By name.
        counted: By name the zeros of sharded weights as they were last counted: gathering needs every process, and a
            receipt is written by one.
    """
    tensors: list[dict[str, Any]] = []
    for name, weight in weights.items():
        pruned = counted.get(name, 0) if is_sharded(weight) else weight.numel() - int(weight.detach().count_nonzero())
        entry = {"name": name, "shape": list(weight.shape), "numel": weight.numel(), "pruned": pruned}
        tensors.append({**entry, "sparsity": pruned / weight.numel()})
    numel, pruned = sum(entry["numel"] for entry in tensors), sum(entry["pruned"] for entry in tensors)
    return {"tensors": tensors, "numel": numel, "pruned": pruned, "sparsity": pruned / numel if numel else 0.0}
