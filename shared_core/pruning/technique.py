"""What pruning tells in the receipt.

Pruning during training: masks on a schedule, and weights that stay exactly zero once they are pruned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from eff_kernels.pruning import apply_mask_
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import is_sharded, reshard_, whole
from shared_core.engine.claims import Claim, Where, Zeros
from shared_core.engine.optimizer_kinds import refuse_lbfgs
from shared_core.engine.preview import Event, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.modules.packed_masks import unpack_mask
from shared_core.modules.peft_layers import refuse_adapters
from shared_core.pruning.config import UNITS, PruneConfig
from shared_core.pruning.cost_watch import CostWatch
from shared_core.pruning.mask_dynamics import StraightThrough, moved_masks, rigl_drop_share
from shared_core.pruning.masks import MaskStore, block_scores, check_saved, count_kept, refuse_sparse
from shared_core.pruning.optimizer_state import SLOW_ON_ZEROS, clear_moments_, is_slow_on_zeros
from shared_core.pruning.regularizers import Penalty
from shared_core.pruning.schedules import moments_told, resolve_moments, scheduled_sparsity, update_is_due
from shared_core.pruning.scorers import make_scorer
from shared_core.pruning.selection import at_limit, limit_notes, new_masks
from shared_core.pruning.structured import UnitPruning
from shared_core.pruning.targets import Targets, find_targets

NOTES = {
    "unstructured": "Unstructured sparsity makes compressed files smaller; dense matrix products do not get faster.",
    "n_m": "2:4 is faster on GPUs with sparse tensor cores once converted; other patterns make files smaller.",
    "layer": "Masked layers cost as much as before, and `eff shrink` keeps them: take them out of the model's code.",
    "block": "Blocks are faster in block-sparse kernels at high sparsity alone; dense matrix products are not.",
}
"""By granularity; of the others `UNITS_NOTE`."""
UNITS_NOTE = "Masked units cost as much as before; `eff shrink` removes them, and makes the model smaller and faster."


def weights_report(weights: Mapping[str, Tensor], counted: Mapping[str, int]) -> dict[str, Any]:
    """Return how many weights are zero, of each tensor and in all, counted in the weights.

    Args:
        weights: By name.
        counted: By name the zeros of sharded weights as they were last counted: gathering needs every process, and a
            receipt is written by one.
    """
    tensors: list[dict[str, Any]] = []
    for name, weight in weights.items():
        sharded = hasattr(weight, "device_mesh")
        pruned = counted.get(name, 0) if sharded else weight.numel() - int(weight.detach().count_nonzero())
        entry = {"name": name, "shape": list(weight.shape), "numel": weight.numel(), "pruned": pruned}
        tensors.append({**entry, "sparsity": pruned / weight.numel()})
    numel, pruned = sum(entry["numel"] for entry in tensors), sum(entry["pruned"] for entry in tensors)
    return {"tensors": tensors, "numel": numel, "pruned": pruned, "sparsity": pruned / numel if numel else 0.0}


def layers_report(config: PruneConfig, targets: Targets, store: MaskStore, units: UnitPruning | None) -> dict[str, Any]:
    """Return by which scope layers lost what they did, which of them could not give more, and what a user should know.

    Args:
        config: Granularity and scope.
        targets: The weights within reach, and those with a sparsity of their own.
        store: The masks.
        units: What is pruned where that is no weight.
    """
    capped: list[str] = []
    if config.layers_differ:
        layers = units.pruned(dict(store)) if units else {name: _pruned(config, store, name) for name in store}
        alone = units.own if units else targets.own
        others = {name: counts for name, counts in layers.items() if name not in alone}
        capped = at_limit(config.most_of_a_layer, config.sparsity, others)
    counts = {name: (store.weights[name].numel(), store.num_pruned[name]) for name in store if name in targets.modules}
    return {
        "scope": config.resolved_scope if config.layers_differ or config.granularity == "layer" else "local",
        "max_layer_sparsity": config.most_of_a_layer if config.layers_differ else None,
        "capped": capped,
        "overrides": dict(targets.sparsities),
        "notes": limit_notes(config.key, config.most_of_a_layer, capped, counts),
    }


def _pruned(config: PruneConfig, store: MaskStore, name: str) -> tuple[int, int]:
    """Return how many of what is pruned whole a weight has, and how many of them are gone."""
    if config.granularity != "block":
        return store.weights[name].numel(), store.num_pruned[name]
    tiles = block_scores(store[name].float(), config.block_size) > 0
    return tiles.numel(), tiles.numel() - count_kept(tiles)


class Pruning(Technique):
    """Prunes the weights of linear and convolutional layers as `PruneConfig` says.

    Masks are recomputed at the steps of the schedule; what is pruned stays pruned, unless `dynamic`, `sr_ste` or
    criterion ``movement`` let weights under the mask learn on until ``end``. After every optimizer step pruned weights
    are set to exactly +0.0, whatever momentum, weight decay or an 8-bit state would make of them.

    Args:
        config: The options.
    """

    key: ClassVar[str] = "prune"
    config: PruneConfig

    def __init__(self, config: PruneConfig) -> None:
        super().__init__(config)
        self._targets = Targets({}, {})
        self._weights: dict[str, nn.Parameter] = {}
        self._store = MaskStore()
        self._saved: Mapping[str, Any] = {}
        self._begin = self._end = 0
        self._last_update = -1
        self._sparsity = 0.0
        self._own: dict[str, float] = {}
        self._pruned_share = 0.0
        self._is_final = False
        self._straight_through = StraightThrough()
        self._dense_gradients: dict[str, Tensor] = {}
        self._counted: dict[str, int] = {}
        self._scorer = make_scorer("magnitude", {})
        self._costs = CostWatch("none", {})
        self._units: UnitPruning | None = None
        self._penalty: Penalty | None = None

    def attach(self, model: nn.Module, context: Context) -> None:
        """Find the weights to prune, and listen to what the criterion needs.

        Raises:
            MatchError: If there are none.
            CompatibilityError: If they are PEFT's adapters.
        """
        config = self.config
        self._targets = find_targets(model, config)
        modules = self._targets.modules
        refuse_adapters(
            "prune", model, modules, "merging would fill their zeros again", "merge, and prune the merged model"
        )
        self._scorer = make_scorer(config.weight_criterion, modules, generator=context.generator)
        if config.granularity in UNITS:
            self._units = UnitPruning(config, modules, self._targets.own)
        self._costs = CostWatch(config.cost, modules)
        if config.cost != "none":
            self._scorer.costs = self._costs.costs
        if config.regularizer != "none":
            self._penalty = Penalty(config.regularizer, config.regularizer_strength, model, modules)
        self._scorer.attach()

    def holds(self) -> Mapping[str, Tensor]:
        """Return the weights."""
        return self._weights

    def touched(self, model: nn.Module) -> Touched:
        """Return the weights to prune."""
        return self._targets.touched()

    def timeline(self, context: Context) -> list[Event]:
        """Return when masks are made."""
        self._begin, self._end = resolve_moments(self.config, context)
        return moments_told(self.config, self._begin, self._end, self._targets.own)

    def unreached(self, context: Context) -> str | None:
        """Return how sparse the weights are, until they are as sparse as asked."""
        short = [name for name, share in self._targets.own.items() if self._own.get(name, 0.0) < share]
        if self._last_update >= 0 and self._sparsity >= self.config.sparsity and not short:
            return None
        told = [f"sparsity {self._sparsity:.4g} of {self.config.sparsity:.4g}"]
        told += [f"{name} {self._own.get(name, 0.0):.4g} of {self._targets.own[name]:.4g}" for name in short]
        return f"{', '.join(told)}, complete at step {self._end}"

    def begin(self, context: Context) -> None:
        """Resolve the schedule; put saved masks back, or make the first ones if they are due."""
        self.timeline(context)
        refuse_lbfgs(context.optimizers, "prune", "whose line search trains pruned weights within a step")
        self._weights = self._targets.weights()
        self._refuse_sharded()
        self._store.weights = self._units.tensors(context.model) if self._units else self._weights
        self._restore(context)
        if not self._is_final:
            self._costs.watch()
            if self._units:
                self._units.listen(context.model)
        if self.config.criterion != "shapley":
            context.done_with(self.forward)
        if context.gradients_mix and any(map(is_slow_on_zeros, context.optimizers)):
            context.services.say(SLOW_ON_ZEROS)
        if self._last_update < 0 and context.step >= self._begin and not self.config.needs_a_step:
            self._update(context)

    def forward(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Look at the last micro-batch of a step, which a run stopped inside of it comes to as well."""
        if self._units:
            self._units.end_step()
        return contextlib.nullcontext()

    def before_optimizer_step(self, context: Context) -> None:
        """Read what the criterion needs of the gradients; then dead ones must not move live weights."""
        self._find(context)
        if not self._is_final:
            gradients = {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}
            refuse_sparse(gradients.values())
            self._observe(context, gradients)
        if self._store and not self._learns_under_masks and context.gradients_mix:
            self._store.apply_to_gradients()

    def _find(self, context: Context) -> None:
        """Read what the first micro-batches have shown: which units there are, and what each layer costs."""
        if self._units:
            self._units.find(context.model)
        self._costs.end_step()

    def _observe(self, context: Context, gradients: dict[str, Tensor]) -> None:
        config = self.config
        if self._learns_under_masks:
            self._straight_through.show(self._weights)
        if self._scorer.needs:
            self._scorer.observe_step(self._weights, gradients)
        if config.criterion == "movement" or config.dynamic == "rigl" or config.sr_ste:
            gradients = {name: local_part(gradient) for name, gradient in gradients.items()}
        if self._units:
            self._units.observe_step()
        if self._learns_under_masks and config.criterion == "movement" and config.dynamic == "none":
            # m·w is what is trained: under a mask the weight gets no gradient, its score does (arXiv:2005.07683, eq. 3)
            under = [name for name in self._store.parts if name in gradients]
            apply_mask_([gradients[name] for name in under], [self._store.parts[name] for name in under])
        if config.dynamic == "rigl" and self._is_due(context.step + 1) and context.step >= self._begin:
            self._dense_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        if self._penalty and context.step < self._end:
            self._penalty.add_(context.optimizers)
        if config.sr_ste:
            self._straight_through.add_decay_(gradients, config.sr_ste)

    def after_optimizer_step(self, context: Context) -> None:
        """Recompute the masks if the schedule says so, and set every pruned weight to +0.0."""
        if self._penalty:
            self._penalty.decay_()
        if self._is_due(context.step) and context.step != self._last_update:
            self._update(context)
        elif self._learns_under_masks:
            self._straight_through.hide(self._weights, self._store.parts)
        elif self._store:
            self._store.apply()
        self._dense_gradients = {}
        if self._units:
            self._units.end_step()
        self._scorer.discard_step()  # a probe may have run another backward through the hooks

    def skipped_optimizer_step(self, context: Context) -> None:
        """Hide again what was shown to the optimizer, and forget what the step showed."""
        self._dense_gradients = {}
        if self._units:
            self._units.end_step()
        self._scorer.discard_step()
        if self._penalty:
            self._penalty.forget_step()
        if self._straight_through.is_shown:
            self._straight_through.hide(self._weights, self._store.parts)

    @contextlib.contextmanager
    def saving(self, context: Context, baked: bool) -> Iterator[None]:
        """Hold what is kept in parts in whole, so that saving needs no other process."""
        self._scorer.gather()
        self._straight_through.gather(self._weights)
        try:
            yield
        finally:
            self._scorer.release()
            self._straight_through.release()

    def constrain(self, values: Mapping[Tensor, Tensor]) -> None:
        """Prune other values for the weights by the masks there are."""
        self._store.apply(values)

    def weights_replaced(self, context: Context) -> None:
        """Prune the new weights by the masks there are."""
        self._store.apply()

    def finish(self, model: nn.Module, context: Context) -> None:
        """Bake the zeros that there are: no weight is pruned here that no step followed. Masks stay until `detach`."""
        reshard_(model)
        self._finalise(context)
        for note in self._layers()["notes"]:
            context.note(note)
        self._store.apply()
        self._counted = {
            name: weight.numel() - int(whole(weight.detach()).count_nonzero())
            for name, weight in self._weights.items()
            if is_sharded(weight)
        }

    def claims(self, context: Context, report: Mapping[str, Any]) -> Mapping[str, Claim]:
        """Return that what the masks prune is 0, of biases and norms of pruned units too."""
        counted = {entry["name"]: entry["pruned"] for entry in report["tensors"]}
        packed = self._store.packed().items()
        return {name: Zeros(mask, counted.get(name), holds=Where.TRAINED) for name, mask in packed}

    def detach(self, model: nn.Module) -> None:
        """Release the masks; the state stays readable."""
        # cut short, the processes that hold the other parts may be gone
        if self._store and (self._is_final or not any(map(is_sharded, self._weights.values()))):
            self._saved = self.state_dict()
        if self._units:
            self._units.close()
        self._costs.close()
        self._scorer.detach()
        self._weights, self._store = {}, MaskStore()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, eight weights to a byte, what lies under them, what was gathered, and how far it is."""
        if self._saved and not self._store:
            return dict(self._saved)
        return {
            "masks": self._store.packed(),
            "hidden": self._straight_through.whole(self._weights),
            "scorer": self._scorer.state_dict(),
            "costs": dict(self._costs.costs),
            "units": self._units.state_dict() if self._units else {},
            "last_update": self._last_update,
            "sparsity": self._sparsity,
            "own": dict(self._own),
            "is_final": self._is_final,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the masks are put on the weights' devices in `begin`.

        Raises:
            CheckpointError: If the state belongs to other weights.
        """
        check_saved(dict(state["masks"]), self._targets.weights(), of_units=self._units is not None)
        self._saved = dict(state)
        self._last_update = int(state["last_update"])
        self._sparsity = float(state["sparsity"])
        self._own = {name: float(share) for name, share in state.get("own", {}).items()}
        self._is_final = bool(state.get("is_final", False))
        if state.get("scorer"):
            self._scorer.load_state_dict(state["scorer"])
        self._costs.costs.update(state.get("costs", {}))

    def window_state(self) -> dict[str, Any]:
        """Return what criterion and costs have gathered in this window."""
        found = {"scorer": self._scorer.window_state(), "costs": self._costs.window_state()}
        return {name: state for name, state in found.items() if state}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        for name, gathering in (("scorer", self._scorer), ("costs", self._costs)):
            if name in state:
                gathering.load_window_state(state[name])

    def metrics(self) -> dict[str, float]:
        """Return ``prune/sparsity``, the share of the weights within reach that the masks prune."""
        return {"prune/sparsity": self._pruned_share}

    def report(self) -> dict[str, Any]:
        """Return per tensor how many weights are zero, counted in the weights, and what was left dense."""
        return {
            **weights_report(self._targets.weights(), {**self._store.num_pruned, **self._counted}),
            "begin_step": self._begin,
            "end_step": self._end,
            "last_update_step": self._last_update,
            "left_out": dict(self._targets.left_out),
            **self._layers(),
            **self._scorer.report(),
            **(self._units.report(self._store) if self._units else {}),
            "note": NOTES.get(self.config.granularity, UNITS_NOTE),
        }

    def _layers(self) -> dict[str, Any]:
        return layers_report(self.config, self._targets, self._store, self._units)

    def _refuse_sharded(self) -> None:
        sharded = next((name for name, weight in self._weights.items() if is_sharded(weight)), None)
        if sharded and (reason := self.config.why_not_sharded):
            raise CompatibilityError(f"prune: {sharded} must be a plain tensor, got a sharded one: {reason}")

    def _restore(self, context: Context) -> None:
        if not self._saved:
            return
        weights = self._store.weights
        strange = sorted(set(self._saved["masks"]) - set(weights))
        if strange:
            raise CheckpointError(f"prune: saved masks must be those of this model, got one of {strange[0]}")
        if self._units:
            self._units.load_state_dict(self._saved.get("units", {}))
        packed = self._saved["masks"].items()
        self._set_masks({name: unpack_mask(mask, weights[name].shape, weights[name].device) for name, mask in packed})
        self._straight_through.load(self._saved.get("hidden", {}), self._weights)
        self._saved = {}
        self._store.apply()
        if self._is_final:
            self._scorer.detach()

    @property
    def _learns_under_masks(self) -> bool:
        return self.config.straight_through and bool(self._store) and not self._is_final

    def _is_due(self, step: int) -> bool:
        return update_is_due(step, begin=self._begin, end=self._end, every=self.config.every)

    def _scheduled(self, step: int, final: float, reached: float) -> float:
        config = self.config
        sparsity = scheduled_sparsity(
            config.schedule, step, begin=self._begin, end=self._end, initial=min(config.initial_sparsity, final),
            final=final, every=config.every,
        )  # fmt: skip
        # a run resumed with more steps stretches a schedule given in fractions: then it waits for the schedule
        return max(sparsity, reached)

    def _update(self, context: Context) -> None:
        self._last_update = context.step
        self._sparsity = self._scheduled(context.step, self.config.sparsity, self._sparsity)
        self._own = {
            name: self._scheduled(context.step, share, self._own.get(name, 0.0))
            for name, share in self._targets.own.items()
        }
        if self._sparsity > 0 or any(self._own.values()):
            try:
                masks = self._new_masks(context, self._sparsity)
            except (ConfigError, TrainingError) as error:
                name = next((name for name, weight in self._weights.items() if whole(weight).isnan().any()), None)
                if name is None:
                    raise
                raise TrainingError(
                    f"prune: weights must be numbers, got NaN in {name} at step {context.step}; training has "
                    "diverged: lower the learning rate, or clip gradients"
                ) from error
            self._take(context, masks)
            context.constraint_changes += 1
        self._scorer.reset()
        if context.step >= self._end:
            self._finalise(context)

    def _new_masks(self, context: Context, sparsity: float) -> dict[str, Tensor]:
        config, store = self.config, self._store
        self._scorer.reduce()
        if self._learns_under_masks:
            self._straight_through.show(self._weights)
        else:
            store.apply()  # the step may have moved what is pruned: it scores as 0, and begins there if RigL revives it
        if self._units:
            return self._units.masks(context, self._scorer, store, sparsity, self._own)
        if config.dynamic == "rigl" and store:
            share = rigl_drop_share(context.step, begin=self._begin, end=self._end, alpha=config.drop_share)
            return moved_masks(self._weights, self._dense_gradients, store, share)
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        count = round(sparsity * sum(size for name, size in sizes.items() if name not in self._own))
        count += sum(round(share * sizes[name]) for name, share in self._own.items())
        stays = bool(store) and not config.straight_through
        if config.resolved_scope == "global" and stays and sum(store.num_pruned.values()) == count:
            return dict(store)
        return new_masks(config, self._targets.modules, self._weights, store, self._scorer, sparsity, self._own)

    def _take(self, context: Context, masks: dict[str, Tensor]) -> None:
        if self.config.straight_through and not self._is_final:
            self._straight_through.show(self._weights)
            self._set_masks(masks)
            self._straight_through.hide(self._weights, self._store.parts)
            return
        before = dict(self._store.parts)
        self._set_masks(masks)
        # Of those that changed alone: moments that grew again under older zeros reach no live weight, and AdamW's
        # square root is several times slower on zeros (torch 2.13, CPU). Grown again, a weight starts without moments.
        for name, part in self._store.parts.items():  # one by one: few more than the masks are held at a time
            live = before.pop(name).eq(part) if name in before else part
            clear_moments_(context.optimizers, {name: self._store.weights[name]}, {name: live})
        self._store.apply()

    def _finalise(self, context: Context) -> None:
        """What is pruned now stays pruned: nothing learns under the masks any more, and nothing is gathered."""
        if self._is_final:
            return
        self._is_final = True
        if missing := [name for name in self._weights if not self._scorer.has_seen(name)]:
            context.services.say(f"efftrain: prune: {', '.join(missing[:5])} stay dense: no input has reached them")
        if self.config.straight_through and self._store:
            if self._straight_through.is_shown:
                self._straight_through.hide(self._weights, self._store.parts)
            self._straight_through.drop()
            clear_moments_(context.optimizers, self._weights, self._store.parts)
        self._scorer.detach()
        if self._units:
            self._units.close()
        self._costs.close()

    def _set_masks(self, masks: Mapping[str, Tensor]) -> None:
        self._store.set(masks)
        reached = {name: self._store.num_pruned[name] for name in masks if name in self._weights}
        numel = sum(self._weights[name].numel() for name in reached)
        self._pruned_share = sum(reached.values()) / numel if numel else 0.0
