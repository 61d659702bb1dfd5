"""Pruning during training: masks follow a schedule, and pruned weights stay exactly zero.

`Pruning` implements the session's hooks. Its `MaskPolicy` chooses the masks and decides what happens to masked weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import is_sharded, reshard_
from shared_core.engine.checks.claims import Claim, Where, Zeros
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
    """Return the policy for these options: for units, or for weights that may come back or stay pruned."""
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

    Masks are recomputed at the steps of the schedule. Pruned weights stay pruned, unless `dynamic`, `sr_ste` or
    criterion ``movement`` let masked weights keep learning until ``end``. After every optimizer step pruned weights
    are set to exactly +0.0, regardless of momentum, weight decay or 8-bit optimizer states.
    """

    config: PruneConfig

    def __init__(self, config: PruneConfig) -> None:
        super().__init__(config)
        if config.criterion == "sparsegpt":
            rule = "criterion must not be sparsegpt in training, because it changes all weights at once"
            raise ConfigError("prune", rule, "use wanda, or prune after training with eff prune")
        self._policy = MaskPolicy(config, Targets({}, {}), Magnitude({}))
        self._schedule = Schedule(config)
        self._costs: CostWatch | None = None
        self._penalty: Penalty | None = None
        self._saved: Mapping[str, Any] = {}
        self._last_update = -1
        self._has_trained = self._waits = False  # since the last update: a step had gradients / an update waits for one
        self._sparsity = self._pruned_share = 0.0
        self._own: dict[str, float] = {}
        self._counted: dict[str, int] = {}

    @property
    def _targets(self) -> Targets:
        return self._policy.targets

    def attach(self, context: Context) -> Touched:
        """Find the weights to prune, choose the policy, and register the hooks that the criterion needs."""
        model = context.model
        context.undo.callback(self._detach)
        targets = find_targets(model, self.config)
        refuse_adapters(
            "prune", model, targets.modules, "merging would fill their zeros", "merge first, and prune the merged model"
        )
        context.projections.append(self._project)
        self._take(targets, model, context)
        return targets.touched()

    def leave_unheld(self, context: Context) -> Touched:
        """Leave weights dense that no optimizer holds."""
        targets = self._targets.without(context.unheld, "prune")
        if targets.modules.keys() != self._targets.modules.keys():
            self._policy.scorer.detach()
            self._take(targets, context.model, context)
        return targets.touched()

    def _project(self, values: Mapping[Tensor, Tensor] | None = None) -> None:
        self._policy.store.apply(values)

    def _take(self, targets: Targets, model: nn.Module, context: Context) -> None:
        """Prune these weights, and register the hooks that the criterion needs."""
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
        """Return when masks are made, and the current sparsity until the target is reached."""
        self._schedule = Schedule.resolve(self.config, context)
        return Plan(
            self._schedule.events(self._targets.own),
            missing=self._missing,
            usable_from=self._schedule.end,  # earlier checkpoints are less sparse than asked for
            guards=self._policy.weights,
            acts_on_gradients=self.config.acts_on_gradients,
        )

    def _missing(self) -> str:
        """Return the current sparsity until the target is reached."""
        short = [name for name, share in self._targets.own.items() if self._own.get(name, 0.0) < share]
        if self._last_update >= 0 and self._sparsity >= self.config.sparsity and not short:
            if not self._policy.is_short(self.config.sparsity):
                return ""
            return (
                f"sparsity {self._pruned_share:.4g} of {self.config.sparsity:.4g}: "
                f"{self._policy.why_short}, and the masks will not be updated again"
            )
        lines = [f"sparsity {self._sparsity:.4g} of {self.config.sparsity:.4g}"]
        lines += [f"{name} {self._own.get(name, 0.0):.4g} of {self._targets.own[name]:.4g}" for name in short]
        return f"{', '.join(lines)}, complete at step {self._schedule.end}"

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve the schedule, then restore saved masks, or make the first ones if they are due."""
        if state is not None:
            self._restore(state)
        self.plan(context)
        policy = self._policy
        policy.begin(context.model, self._schedule)
        refuse_sharded(self.config, policy.weights)
        if state is not None:
            policy.restore(state)
            self._note_share()
        elif self._last_update < 0 and context.step == 0:
            self._note_refilled(context)
        if not policy.is_final:
            policy.scorer.attach()  # final masks remove its hooks; a loaded earlier state needs them again
            if self._costs:
                self._costs.watch()
            policy.listen(context.model)
        if self.config.criterion != "shapley":
            context.drop(self.forward)
        # Criteria that need no step prune at once, so that the first forward is already sparse.
        if self._last_update < 0 and context.step >= self._schedule.begin and not self.config.needs_batches:
            self._update(context)

    def _note_refilled(self, context: Context) -> None:
        """Report that the model is already sparse if the first masks keep fewer zeros than it has."""
        found = [weight.detach() for weight in self._policy.weights.values() if not is_sharded(weight)]
        filled = read_together([weight.count_nonzero() for weight in found])
        counts = [(weight.numel(), weight.numel() - kept) for weight, kept in zip(found, filled, strict=True)]
        # Skip weights that are all zero, such as the last layer of a residual branch at initialization.
        zeros = sum(zero for size, zero in counts if zero < size)
        size, config = sum(size for size, _ in counts), self.config
        waits = self._schedule.begin > 0 or bool(config.needs_batches)
        held = 0.0 if waits else self._schedule.sparsity(0, config.sparsity)
        if size and zeros / size > held + _CLEARLY:
            context.note(
                f"prune: {zeros:,} of the {size:,} prunable weights are already zero, but the first masks keep "
                f"only {held:.4g} of the weights at zero, so training fills the others again. To keep all zeros, use "
                f"schedule: one_shot, begin: 0 and sparsity: {zeros / size:.4g}, with criterion magnitude"
            )

    def forward(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Record the last micro-batch of a step, so that a run that stopped within the step resumes alike."""
        self._policy.new_micro_batch()
        return contextlib.nullcontext()

    def before_step(self, context: Context) -> None:
        """Show the gradients to the criterion, then keep those of pruned weights from moving live weights."""
        policy = self._policy
        self._has_trained |= context.has_gradients
        if not policy.is_final:
            gradients = {name: weight.grad for name, weight in policy.weights.items() if weight.grad is not None}
            refuse_sparse("prune", gradients.values())
            if self._costs:
                self._costs.end_step()
            # Score on the task's own gradients, before the penalty changes them.
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
        # A resumed run reaches the step of its last update again.
        is_due = self._waits or (self._schedule.is_due(context.step) and context.step != self._last_update)
        if is_due:
            # If no step since the last update had gradients, the next step that has some updates the masks.
            self._waits = not (self._has_trained or self._policy.is_ready)
        if is_due and not self._waits:
            self._update(context)
        else:
            self._policy.hold(context)
        self._policy.end_step()

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Gather sharded data, so that saving needs no other process."""
        if purpose == "evaluate":
            yield
            return
        # Saved weights must hold zeros, even after writes that torch does not count (``.data``). If they do already,
        # write nothing: in the middle of a batch autograd may have saved these weights.
        if not self._policy.store.is_held():
            self._policy.store.apply()
        self._policy.gather()
        try:
            yield
        finally:
            self._policy.release()

    def finish(self, context: Context) -> None:
        """Write the zeros without pruning any further. Masks stay until `detach`."""
        reshard_(context.model)
        self._finalize(context)
        for note in self._policy.layers_report()["notes"]:
            context.note(note)
        self._policy.store.apply()

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return the claim that everything the masks prune is 0, including biases and norms of pruned units."""
        self._counted = zeros_of_sharded(self._policy.weights)
        counted = {entry["name"]: entry["pruned"] for entry in self.report()["tensors"]}
        packed = self._policy.store.packed().items()
        return {name: Zeros(mask, counted.get(name), holds=Where.TRAINED) for name, mask in packed}

    def _detach(self) -> None:
        """Release the masks. The state stays readable."""
        policy = self._policy
        # After a crash the processes that hold the other parts may be gone.
        if policy.store and (policy.is_final or not any(map(is_sharded, policy.weights.values()))):
            self._saved = self.state_dict()
        if self._costs:
            self._costs.close()
        policy.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, the values under them, the gathered statistics, and the position in the schedule."""
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
        """Restore everything but the masks, which the policy checks."""
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
        """Return ``prune/sparsity``, the share of the prunable weights that the masks prune."""
        return {"prune/sparsity": self._pruned_share}

    def report(self) -> dict[str, Any]:
        """Return how many weights of each tensor are zero, counted in the weights, and what was left dense."""
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
        text = f"Pruned {asked} in {counted(len(report['tensors']), 'layer')}"
        if report["last_update_step"] is None:
            text = f"Pruned nothing yet: pruning begins at step {report['begin_step']:,}"
        elif report["begin_step"] != report["end_step"]:
            text += f", from step {report['begin_step']:,} to step {report['end_step']:,}"
        lost, units = (sum(entry[name] for entry in report.get("units", ())) for name in ("pruned", "units"))
        text += f". {lost:,} of {counted(units, 'unit')} are zero" if units else ""
        left = report["left_out"]
        dense = [f"Left dense: {listed(left, 3)}."] if left else []
        return [f"{text}.", *dense, *filter(None, [report["note"]])]

    def _update(self, context: Context) -> None:
        step, own = context.step, self._targets.own
        self._last_update = step
        # Resuming with more steps stretches a schedule given as fractions. Sparsity then waits until it catches up.
        self._sparsity = max(self._sparsity, self._schedule.sparsity(step, self.config.sparsity))
        self._own = {
            name: max(self._own.get(name, 0.0), self._schedule.sparsity(step, share)) for name, share in own.items()
        }
        if self._sparsity > 0 or any(self._own.values()):
            # If a weight is NaN, ranking fails, and the error names the weight and the step.
            with naming_nan("prune", self._policy.weights, step):
                masks = self._policy.next_masks(context, self._sparsity, self._own)
            self._policy.take(context, masks)
            self._note_share()
            context.projection_changes += 1
        self._policy.scorer.reset()
        self._has_trained = False
        if step >= self._schedule.end:
            self._finalize(context)

    def _note_share(self) -> None:
        weights, gone = self._policy.weights, self._policy.store.num_pruned
        numel = sum(weights[name].numel() for name in gone if name in weights)
        self._pruned_share = sum(gone[name] for name in gone if name in weights) / numel if numel else 0.0

    def _finalize(self, context: Context) -> None:
        """Make the current masks final: masked weights stop learning, and nothing is gathered."""
        policy = self._policy
        if policy.is_final:
            return
        policy.freeze(context)
        if self._costs:
            self._costs.close()
