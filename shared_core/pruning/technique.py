"""Pruning during training: masks on a schedule, and weights that stay exactly zero once they are pruned.

`Pruning` translates the session's verbs; which masks come next, and what weights do under them, is its `MaskPolicy`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import is_sharded, reshard_
from shared_core.engine.checks.claims import Claim, Where, Zeros
from shared_core.engine.checks.model_guards import refuse_lbfgs
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import ConfigError
from shared_core.numerics.deferred_checks import read_together
from shared_core.printing import amount, counted, listed, share_text
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.mask_dynamics import RigL, StraightThroughMasks
from shared_core.pruning.masks import MaskPolicy, naming_nan, refuse_sparse, weights_report, zeros_of_sharded
from shared_core.pruning.regularizers import Penalty
from shared_core.pruning.schedules import Schedule
from shared_core.pruning.scorers import CostWatch, Magnitude, make_scorer
from shared_core.pruning.structured import ShapleyPruning, UnitPruning
from shared_core.pruning.targets import Targets, find_targets, refuse_adapters, refuse_sharded

_CLEARLY = 0.05


def make_policy(config: PruneConfig, targets: Targets, generator: torch.Generator) -> MaskPolicy:
    """Return the masks that these options ask for: of units, or of weights that may come back or stay pruned."""
    policy: type[MaskPolicy] = MaskPolicy
    if config.prunes_units:
        policy = ShapleyPruning if config.criterion == "shapley" else UnitPruning
    elif config.straight_through:
        policy = StraightThroughMasks
    elif config.dynamic == "rigl":
        policy = RigL
    return policy(config, targets, make_scorer(config.weight_criterion, targets.modules, generator=generator))


class Pruning(Technique):
    """Prunes the weights of linear and convolutional layers as `PruneConfig` says.

    Masks are recomputed at the steps of the schedule; what is pruned stays pruned, unless `dynamic`, `sr_ste` or
    criterion ``movement`` let weights under the mask learn on until ``end``. After every optimizer step pruned weights
    are set to exactly +0.0, whatever momentum, weight decay or an 8-bit state would make of them.
    """

    key: ClassVar[str] = "prune"
    config: PruneConfig

    def __init__(self, config: PruneConfig) -> None:
        super().__init__(config)
        if config.criterion == "sparsegpt":
            rule = "criterion must be another in training, got 'sparsegpt', which changes all weights at once"
            raise ConfigError("prune", rule, "take wanda, or prune afterwards with eff prune")
        self._policy = MaskPolicy(config, Targets({}, {}), Magnitude({}))
        self._schedule = Schedule(config)
        self._costs: CostWatch | None = None
        self._penalty: Penalty | None = None
        self._saved: Mapping[str, Any] = {}
        self._last_update = -1
        self._has_trained = self._waits = False  # since the last update: a step had gradients; one was due and had none
        self._sparsity = self._pruned_share = 0.0
        self._own: dict[str, float] = {}
        self._counted: dict[str, int] = {}

    @property
    def _targets(self) -> Targets:
        return self._policy.targets

    def attach(self, context: Context) -> Touched:
        """Find the weights to prune, choose the policy, and listen to what the criterion needs."""
        model = context.model
        context.undo.callback(self._detach)
        targets = find_targets(model, self.config)
        refuse_adapters(
            "prune", model, targets.modules, "merging would fill their zeros again", "merge, and prune the merged model"
        )
        context.projections.append(self._project)
        self._take(targets, model, context)
        return targets.touched()

    def leave_unheld(self, context: Context) -> Touched:
        """Leave dense what no optimizer holds."""
        targets = self._targets.without(context.unheld, "prune")
        if targets.modules.keys() != self._targets.modules.keys():
            self._policy.scorer.detach()
            self._take(targets, context.model, context)
        return targets.touched()

    def _project(self, values: Mapping[Tensor, Tensor] | None = None) -> None:
        self._policy.store.apply(values)

    def _take(self, targets: Targets, model: nn.Module, context: Context) -> None:
        """Prune these weights, and listen to what the criterion needs of them."""
        config = self.config
        self._policy = make_policy(config, targets, context.generator)
        if config.cost != "none":
            context.windows["prune.costs"] = self._costs = CostWatch(config.cost, targets.modules)
            self._policy.take_costs(self._costs.costs)
        if config.regularizer != "none":
            strength, units = config.regularizer_strength, self._policy.units
            self._penalty = Penalty(config.regularizer, strength, model, targets.modules, config, units)
        self._policy.scorer.attach()
        context.windows["prune.scorer"] = self._policy.scorer

    def plan(self, context: Context) -> Plan:
        """Return when masks are made, and how sparse the weights are until they are as sparse as asked."""
        self._schedule = Schedule.resolve(self.config, context)
        return Plan(
            self._schedule.events(self._targets.own),
            self._missing,
            self._schedule.end,  # a checkpoint from before is less sparse than what the run promises
            guards=self._policy.weights,
            acts_on_gradients=self.config.acts_on_gradients,
        )

    def _missing(self) -> str:
        """Return how sparse the weights are, until they are as sparse as asked."""
        short = [name for name, share in self._targets.own.items() if self._own.get(name, 0.0) < share]
        if self._last_update >= 0 and self._sparsity >= self.config.sparsity and not short:
            if not self._policy.is_short(self.config.sparsity):
                return ""
            return (
                f"sparsity {self._pruned_share:.4g} of {self.config.sparsity:.4g}: "
                f"{self._policy.why_short}, and no further update of the masks is due"
            )
        told = [f"sparsity {self._sparsity:.4g} of {self.config.sparsity:.4g}"]
        told += [f"{name} {self._own.get(name, 0.0):.4g} of {self._targets.own[name]:.4g}" for name in short]
        return f"{', '.join(told)}, complete at step {self._schedule.end}"

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve the schedule; put saved masks back, or make the first ones if they are due."""
        if state is not None:
            self._restore(state)
        self.plan(context)
        # LBFGS evaluates many points within one step, between which no mask is applied.
        refuse_lbfgs(context.optimizers, "prune", "whose line search trains pruned weights within a step")
        policy = self._policy
        policy.begin(context.model, self._schedule)
        refuse_sharded(self.config, policy.weights)
        if state is not None:
            policy.restore(state)
            self._note_share()
        elif self._last_update < 0 and context.step == 0:
            self._tell_refilled(context)
        if not policy.is_final:
            policy.scorer.attach()  # masks that were final before an earlier state was loaded have taken its hooks off
            if self._costs:
                self._costs.watch()
            policy.listen(context.model)
        if self.config.criterion != "shapley":
            context.drop(self.forward)
        # What needs no step prunes at once, so that the very first forward is sparse.
        if self._last_update < 0 and context.step >= self._schedule.begin and not self.config.needs_batches:
            self._update(context)

    def _tell_refilled(self, context: Context) -> None:
        """Say that the model is sparse already, where the first masks hold fewer zeros than it has."""
        found = [weight.detach() for weight in self._policy.weights.values() if not is_sharded(weight)]
        filled = read_together([weight.count_nonzero() for weight in found])
        counts = [(weight.numel(), weight.numel() - kept) for weight, kept in zip(found, filled, strict=True)]
        # not those that begin as zeros, such as the last layer of a residual branch
        zeros = sum(zero for size, zero in counts if zero < size)
        size, config = sum(size for size, _ in counts), self.config
        waits = self._schedule.begin > 0 or bool(config.needs_batches)
        held = 0.0 if waits else self._schedule.sparsity(0, config.sparsity)
        if size and zeros / size > held + _CLEARLY:
            context.note(
                f"prune: {zeros:,} of the {size:,} weights within reach are zero already, and the masks hold "
                f"{held:.4g} of the weights at first: training fills the other zeros again. To keep them, take "
                f"schedule: one_shot, begin: 0 and sparsity: {zeros / size:.4g}, with criterion magnitude"
            )

    def forward(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Look at the last micro-batch of a step, which a run stopped inside of it comes to as well."""
        self._policy.new_micro_batch()
        return contextlib.nullcontext()

    def before_step(self, context: Context) -> None:
        """Read what the criterion needs of the gradients; then dead ones must not move live weights."""
        policy = self._policy
        self._has_trained |= context.has_gradients
        if not policy.is_final:
            gradients = {name: weight.grad for name, weight in policy.weights.items() if weight.grad is not None}
            refuse_sparse("prune", gradients.values())
            if self._costs:
                self._costs.end_step()
            # Scored on the task's own gradients: the penalty's must not tell what a weight is worth.
            policy.observe(context, gradients)
            if self._penalty and context.step < self._schedule.end:
                self._penalty.add_(context.optimizers)
        policy.shape_gradients(context)

    def after_step(self, context: Context, applied: bool) -> None:
        """Recompute the masks if the schedule says so, and set every pruned weight to +0.0."""
        if not applied:
            self._policy.end_step()
            if self._penalty:
                self._penalty.forget_step()
            return
        if self._penalty:
            self._penalty.decay_()
        # A resumed run comes to the step of its last update again.
        is_due = self._waits or (self._schedule.is_due(context.step) and context.step != self._last_update)
        if is_due:
            # Where every micro-batch since the last update was left out, the next step with gradients makes the masks.
            self._waits = not (self._has_trained or self._policy.is_ready)
        if is_due and not self._waits:
            self._update(context)
        else:
            self._policy.hold(context)
        self._policy.end_step()

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Hold what is kept in parts in whole, so that saving needs no other process."""
        if purpose == "evaluate":
            yield
            return
        # What is saved holds zeros, also after writes that torch does not count (``.data``). Where it does, nothing is
        # written: in the middle of a batch autograd may have kept these weights.
        if not self._policy.store.is_held():
            self._policy.store.apply()
        self._policy.gather()
        try:
            yield
        finally:
            self._policy.release()

    def finish(self, context: Context) -> None:
        """Bake the zeros that there are: no weight is pruned here that no step followed. Masks stay until `detach`."""
        reshard_(context.model)
        self._finalise(context)
        for note in self._policy.layers_report()["notes"]:
            context.note(note)
        self._policy.store.apply()

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return that what the masks prune is 0, of biases and norms of pruned units too."""
        self._counted = zeros_of_sharded(self._policy.weights)
        counted = {entry["name"]: entry["pruned"] for entry in self.report()["tensors"]}
        packed = self._policy.store.packed().items()
        return {name: Zeros(mask, counted.get(name), holds=Where.TRAINED) for name, mask in packed}

    def _detach(self) -> None:
        """Release the masks; the state stays readable."""
        policy = self._policy
        # cut short, the processes that hold the other parts may be gone
        if policy.store and (policy.is_final or not any(map(is_sharded, policy.weights.values()))):
            self._saved = self.state_dict()
        if self._costs:
            self._costs.close()
        policy.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, what lies under them, what was gathered, and how far it is."""
        if self._saved and not self._policy.store:
            return dict(self._saved)
        return {
            **self._policy.state_dict(),
            "costs": dict(self._costs.costs) if self._costs else {},
            "last_update": self._last_update,
            "sparsity": self._sparsity,
            "own": dict(self._own),
            "is_final": self._policy.is_final,
            "waits": self._waits,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore all but the masks, which the policy checks."""
        self._last_update = int(state["last_update"])
        self._sparsity = float(state["sparsity"])
        self._own = {name: float(share) for name, share in state.get("own", {}).items()}
        self._policy.is_final = bool(state.get("is_final", False))
        self._waits = bool(state.get("waits", False))
        if state.get("scorer"):
            self._policy.scorer.load_state_dict(state["scorer"])
        if self._costs:
            self._costs.costs.update(state.get("costs", {}))

    def figures(self) -> dict[str, float]:
        """Return ``prune/sparsity``, the share of the weights within reach that the masks prune."""
        return {"prune/sparsity": self._pruned_share}

    def report(self) -> dict[str, Any]:
        """Return per tensor how many weights are zero, counted in the weights, and what was left dense."""
        policy = self._policy
        return {
            **weights_report(policy.targets, {**policy.store.num_pruned, **self._counted}),
            "begin_step": self._schedule.begin,
            "end_step": self._schedule.end,
            "last_update_step": self._last_update,
            "left_out": dict(policy.targets.left_out),
            **policy.layers_report(),
            **policy.scorer.report(),
            **policy.report(),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        asked = f"{share_text(report['sparsity'])} of {amount(report['numel'])} weights"
        told = f"Pruned {asked} in {counted(len(report['tensors']), 'layer')}"
        if report["last_update_step"] is None:
            told = f"Pruned nothing yet: pruning begins at step {report['begin_step']:,}"
        elif report["begin_step"] != report["end_step"]:
            told += f", from step {report['begin_step']:,} to step {report['end_step']:,}"
        lost, units = (sum(entry[name] for entry in report.get("units", ())) for name in ("pruned", "units"))
        told += f". {lost:,} of {counted(units, 'unit')} are zero" if units else ""
        left = report["left_out"]
        dense = [f"Left dense: {listed(left, 3)}."] if left else []
        return [f"{told}.", *dense, report["note"]]

    def _update(self, context: Context) -> None:
        step, own = context.step, self._targets.own
        self._last_update = step
        # a run resumed with more steps stretches a schedule given in fractions: then it waits for the schedule
        self._sparsity = max(self._sparsity, self._schedule.sparsity(step, self.config.sparsity))
        self._own = {
            name: max(self._own.get(name, 0.0), self._schedule.sparsity(step, share)) for name, share in own.items()
        }
        if self._sparsity > 0 or any(self._own.values()):
            # A NaN weight fails the ranking; the error then says which weight and step.
            with naming_nan("prune", self._policy.weights, step):
                masks = self._policy.next_masks(context, self._sparsity, self._own)
            self._policy.take(context, masks)
            self._note_share()
            context.projection_changes += 1
        self._policy.scorer.reset()
        self._has_trained = False
        if step >= self._schedule.end:
            self._finalise(context)

    def _note_share(self) -> None:
        weights, gone = self._policy.weights, self._policy.store.num_pruned
        numel = sum(weights[name].numel() for name in gone if name in weights)
        self._pruned_share = sum(gone[name] for name in gone if name in weights) / numel if numel else 0.0

    def _finalise(self, context: Context) -> None:
        """Keep the present masks for good: nothing learns under them any more, and nothing is gathered."""
        policy = self._policy
        if policy.is_final:
            return
        policy.freeze(context)
        if self._costs:
            self._costs.close()
