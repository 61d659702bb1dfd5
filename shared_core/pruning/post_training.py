"""Prune a trained model in one go, without training, by its weights alone or with a few batches.

Batches only let the criterion see inputs or gradients. They leave no trace in the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.config.options import checked
from shared_core.distributed.collectives import all_finite, local_part, world_size
from shared_core.engine.checks import coverage
from shared_core.engine.technique import Context
from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.modules.calls import call_on_batch, evaluating, loss_of, solve_in_order
from shared_core.modules.like_stock import taking_look_alikes
from shared_core.modules.matching import check_model
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.numerics.second_order import compensated
from shared_core.pruning.config import DURING_TRAINING, GATHERED, PruneConfig
from shared_core.pruning.masks import MaskPolicy, weights_report
from shared_core.pruning.schedules import Schedule
from shared_core.pruning.scorers import CostWatch, layer_costs
from shared_core.pruning.structured import UnitPruning
from shared_core.pruning.targets import find_targets, refuse_sharded
from shared_core.pruning.technique import make_policy

_OF_GRADIENTS = ("taylor", "fisher", "neuron_taylor")

Loss = Callable[[nn.Module, Any], Any]


class Calibration:
    """Runs batches in eval mode, and restores modes, gradients, hooks and running statistics."""

    def __init__(self, model: nn.Module, policy: MaskPolicy, loss: Loss | None) -> None:
        self._model, self._policy, self._loss = model, policy, loss
        self._scorer, self._tensors = policy.scorer, policy.store.weights
        self.batches = self.batches_left_out = self.examples = 0

    def look_at(self, config: PruneConfig, batch: Any) -> None:
        """Run one batch to measure layer costs and find the units."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))

        handle = self._model.register_forward_pre_hook(keep, with_kwargs=True)
        costs = None if config.cost == "none" else CostWatch(config.cost, self._scorer.modules)
        try:
            if costs:
                costs.watch()
            with self._prepared(gradients=False):
                self._run(batch)
            if costs:
                costs.end_step()
        finally:
            handle.remove()
            if costs:
                costs.close()
        if costs:
            self._policy.take_costs(costs.costs)
        if config.criterion == "shapley":
            self._count(batch)
        if isinstance(self._policy, UnitPruning):
            if not calls:
                raise ConfigError("prune", "loss must call the model as a whole, but did not", "call model(...)")
            self._policy.show(self._model, lambda: [self._model(*args, **kwargs) for args, kwargs in calls])

    def run(self, config: PruneConfig, batches: Sequence[Any], progress: Callable[[int, int], None] | None) -> None:
        """Show every batch to the criterion."""
        gradients = config.criterion in _OF_GRADIENTS
        self._scorer.attach()
        try:
            with self._prepared(gradients=gradients):
                for done, batch in enumerate(batches, 1):
                    output = self._run(batch)
                    if not gradients or self._observe(config, output):
                        self._count(batch)
                    if progress is not None:
                        progress(done, len(batches))
            self._scorer.reduce()
        finally:
            self._scorer.detach()
        if not self.batches:
            rule = f"calibration must give finite gradients, got NaN or infinity in all {len(batches)} batches"
            raise TrainingError("prune", rule, "check the loss")

    def solve(
        self,
        config: PruneConfig,
        batches: Sequence[Any],
        own: Mapping[str, float],
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Tensor]:
        """Prune linear layers in forward order, adjusting the kept weights to compensate, and return the masks."""
        masks: dict[str, Tensor] = {}
        n_m = config.kept_of if config.granularity == "n_m" else None

        def one(name: str, layer: nn.Module, hessian: Tensor) -> None:
            weight = self._tensors[name]
            share = 0.0 if n_m else own.get(name, config.sparsity)
            rows, kept = compensated(as_rows(layer, weight.detach()), hessian, sparsity=share, n_m=n_m)
            weight.copy_(from_rows(layer, rows, weight))
            masks[name] = from_rows(layer, kept, weight).contiguous()

        with self._prepared(gradients=False):
            solve_in_order(self._model, self._scorer.modules, self._run, batches, one, "prune sparsegpt", progress)
        for batch in batches:
            self._count(batch)
        return masks

    def _run(self, batch: Any) -> Any:
        return call_on_batch(self._model, batch, self._loss, "prune: calibration")

    def _observe(self, config: PruneConfig, output: Any) -> bool:
        """Show the gradients of one batch to the criterion. Return True if they are finite."""
        found = output if self._loss is not None else loss_of(output)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            rule = f"loss must be a scalar that depends on the weights for criterion {config.criterion}, got {kind}"
            remedy = "pass loss(model, batch), or use batches with labels and a model whose output has a loss"
            raise ConfigError("prune", rule, remedy)
        wanted = {name: tensor for name, tensor in self._tensors.items() if tensor.requires_grad}
        # Compute gradients only for the scored weights.
        found.backward(inputs=list(wanted.values()))  # type: ignore[no-untyped-call]
        gradients = {name: tensor.grad for name, tensor in wanted.items() if tensor.grad is not None}
        is_finite = all_finite(gradients.values())
        if is_finite:
            self._scorer.observe_step(self._tensors, gradients)
            if isinstance(self._policy, UnitPruning):
                self._policy.observe_units()
        else:
            # One bad batch (overflow in half precision) must not decide: skip and count it.
            self._scorer.discard_step()
            self.batches_left_out += 1
        for tensor in wanted.values():
            tensor.grad = None
        return is_finite

    def _count(self, batch: Any) -> None:
        self.batches += 1
        self.examples += _num_examples(batch)

    @contextlib.contextmanager
    def _prepared(self, *, gradients: bool) -> Iterator[None]:
        dropouts = [(each, each.dropout) for each in self._scorer.modules.values() if isinstance(each, nn.RNNBase)]
        before = [(tensor, tensor.grad, tensor.requires_grad) for tensor in self._model.parameters()]
        try:
            for tensor, _, _ in before if gradients else ():
                tensor.grad = None
            for name in self._scorer.modules if gradients else ():
                self._tensors[name].requires_grad_(True)  # also frozen ones that include names
            with (
                evaluating(self._model),
                torch.set_grad_enabled(gradients),
                # A graph compiled before the hooks existed would run without them.
                torch.compiler.set_stance("force_eager"),
            ):
                for module in self._scorer.modules.values():
                    # Scorers count forwards in train mode. Linear and convolutional layers behave the same in both
                    # modes, as do recurrent ones without dropout, for which cuDNN supports backward only in train mode.
                    module.training = not isinstance(module, nn.MultiheadAttention)
                    if isinstance(module, nn.RNNBase):
                        module.dropout = 0.0
                yield
        finally:
            for recurrent, dropout in dropouts:
                recurrent.dropout = dropout
            for tensor, gradient, required in before:
                tensor.grad = gradient
                tensor.requires_grad_(required)


def _num_examples(batch: Any) -> int:
    """Return the number of examples in a batch: the first axis of its first tensor that has axes."""
    leaves = tree_leaves(list(batch.values()) if isinstance(batch, Mapping) else batch)
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 1)


@dataclass(frozen=True)
class PruneReport:
    """The result of `prune`.

    Args:
        masks: By name, bool, True = kept: of every tensor that was pruned. To train on with them, take
            ``prune: {sparsity: <report.sparsity>, schedule: one_shot, begin: 0}`` with the same include and skip.
        tensors: One entry a weight: name, shape, numel, how many of it are zero, sparsity.
        numel: Weights within reach.
        pruned: How many of them are zero.
        sparsity: Their share.
        criterion: How weights were scored.
        granularity: What was pruned as a whole.
        left_out: Every other matrix → why it stays dense.
        batches: Calibration batches used for the scores.
        batches_left_out: Batches skipped because their gradients held NaN or infinity.
        examples: Number of examples in the used batches.
        seconds: Time taken.
        note: What this kind of sparsity is good for.
        scope: How the sparsity was distributed over layers.
        max_layer_sparsity: Limit for the share pruned from one layer. None if all lose the same share or are pruned
            whole.
        capped: Layers, or groups of units, that reached the limit.
        overrides: Weight → its own sparsity, for weights that have one.
        notes: Warnings about layers that lost most of their weights.
        units: One entry per group of units: group, kind, units, pruned.
        groups_left_out: Groups that cannot be pruned → why.
        coverage: How much of the model is within reach (`engine.checks.coverage.Reach`), or what the units hold.
    """

    masks: dict[str, Tensor] = field(repr=False)
    tensors: list[dict[str, Any]]
    numel: int
    pruned: int
    sparsity: float
    criterion: str
    granularity: str
    left_out: dict[str, str]
    batches: int
    batches_left_out: int
    examples: int
    seconds: float
    note: str
    scope: str
    max_layer_sparsity: float | None
    capped: list[str]
    overrides: dict[str, float]
    notes: list[str]
    units: list[dict[str, Any]] = field(default_factory=list)
    groups_left_out: dict[str, str] = field(default_factory=dict)
    coverage: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the masks as values that JSON can hold."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "masks"]
        return {name: getattr(self, name) for name in names}


@taking_look_alikes
def prune(
    model: nn.Module,
    config: PruneConfig | Mapping[str, Any],
    calibration: Iterable[Any] | None = None,
    *,
    loss: Loss | None = None,
    num_batches: int = 100,
    seed: int = 0,
    allow_partial: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PruneReport:
    """Prune a trained model in place to ``config.sparsity``, and return a report.

    Weights become zero. Names, shapes, classes, modes, gradients and running statistics do not change. All scores come
    from the dense model in evaluation mode. Each batch counts like the gradients of one training step: ``taylor`` is
    the mean over batches of the magnitude of w·g, ``fisher`` treats every example separately.

    ``sparsegpt`` (Frantar & Alistarh 2023, arXiv:2301.00774) also adjusts the weights that it keeps, see `compensated`,
    layer by layer, see `solve_in_order`. If it raises midway, the layers finished so far stay pruned.

    Args:
        model: Trained; its weights change.
        config: A `PruneConfig`, or options as in a recipe's ``prune`` section. Options that only matter during training
            and criterion ``movement`` are not allowed.
        calibration: Batches for criteria that need inputs or gradients. Neurons, channels, heads, ``cost: flops`` or
            ``energy``, and ``shapley`` use only the first. Each batch is a tensor, a tuple of arguments, a mapping of
            keyword arguments, or what `loss` takes.
        loss: ``loss(model, batch)`` returns the mean loss of a batch, a scalar. It runs every batch, for every
            criterion. By default the model is called with the batch. If gradients are needed, its output must have a
            ``loss`` (models of transformers, given labels).
        num_batches: Maximum number of batches to run.
        seed: Seed of ``random`` and ``shapley``.
        allow_partial: Accept less than half of the weights that multiply activations within reach.
        progress: Called with (batches run, batches) after each batch, for example to show a bar.

    Raises:
        ConfigError: If an option is invalid, or calibration or loss is missing or does not fit the model.
        CompatibilityError: If a weight is not finite, weights are sharded, or batches are spread over processes.
        MatchError: If there is nothing to prune, or too little (see `allow_partial`).
        TrainingError: If no batch has finite gradients, or a layer received no input.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> _ = net.weight.data.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
        >>> prune(net, {"sparsity": 0.5}).pruned
        2
        >>> net.weight.tolist()
        [[0.0, -2.0], [3.0, 0.0]]
    """
    started = time.perf_counter()
    check_model(model, "prune")
    config = as_config(config)
    model = getattr(model, "_orig_mod", model)  # unwrap a compiled model
    batches = _checked_batches(config, calibration, num_batches)
    targets = find_targets(model, config)
    weights = targets.weights()
    counted = coverage.count(model)
    coverage.after_training(counted, targets.touched(), config, model, where="prune", allow_partial=allow_partial)
    _check_weights(config, weights)
    context = Context(model=model)
    context.generator.manual_seed(seed)
    policy = make_policy(config, targets, context.generator)
    policy.begin(model, Schedule(config))
    calibrating = Calibration(model, policy, loss)
    if batches and (config.is_traced or config.criterion == "shapley" or config.counts_calls):
        calibrating.look_at(config, batches[0])
    elif config.cost == "bytes":
        policy.take_costs(layer_costs(targets.modules, "bytes"))
    if config.criterion == "sparsegpt":
        masks = calibrating.solve(config, batches, targets.own, progress)
    else:
        if config.criterion in GATHERED and config.criterion != "shapley":
            calibrating.run(config, batches, progress)
        masks = policy.choose(context, config.sparsity, targets.own)
    policy.take(context, masks)
    report = policy.report()
    reached = coverage.after_training(counted, policy.touched(), config, model, where="prune", allow_partial=True)
    return PruneReport(
        masks=dict(policy.store),
        **weights_report(targets, policy.store.num_pruned),
        criterion=config.criterion,
        granularity=config.granularity,
        left_out=targets.left_out,
        batches=calibrating.batches,
        batches_left_out=calibrating.batches_left_out,
        examples=calibrating.examples,
        seconds=time.perf_counter() - started,
        **policy.layers_report(),
        coverage=reached.to_dict(),
        **{name: report[name] for name in ("units", "groups_left_out") if name in report},
    )


def as_config(config: PruneConfig | Mapping[str, Any]) -> PruneConfig:
    """Return a config from either form that `prune` accepts. Training options are refused."""
    defaults = {each.name: each.default for each in dataclasses.fields(PruneConfig)}
    is_made = isinstance(config, PruneConfig)
    given: Mapping[str, Any] = {name: getattr(config, name) for name in defaults} if is_made else config  # type: ignore[assignment]
    if not isinstance(given, Mapping):
        return PruneConfig.from_dict(given)  # raises
    if given.get("criterion") == "movement":
        rule = "criterion must not be movement after training, because it needs to see how weights move"
        raise ConfigError("prune", rule, "use taylor")
    for name in DURING_TRAINING:
        asked = name in given and not (is_made and given[name] == defaults[name])
        if asked and (name, given[name]) != ("schedule", "one_shot"):
            rule = f"{name} must be left out after training, got {given[name]!r}"
            remedy = "it only matters while a model trains: use it in a run's recipe"
            raise ConfigError("prune", rule, remedy)
    return config if isinstance(config, PruneConfig) else PruneConfig.from_dict({**config, "schedule": "one_shot"})


def _checked_batches(config: PruneConfig, calibration: Iterable[Any] | None, num_batches: int) -> list[Any]:
    num_batches = checked(num_batches, int, "prune", "num_batches", low=1)
    needs = config.needs_batches
    if not needs:
        return []
    if world_size() > 1:
        rule = f"calibration must run in one process, got {world_size()}, which would make different masks"
        raise CompatibilityError("prune", rule, "prune before starting several processes, and load the result")
    batches = list(itertools.islice(() if calibration is None else calibration, num_batches))
    if not batches:
        raise ConfigError("prune", f"calibration must be given with {needs}, got no batches", "pass some")
    return batches


def _check_weights(config: PruneConfig, weights: Mapping[str, Tensor]) -> None:
    refuse_sharded(config, weights)
    for name, weight in weights.items():
        if not bool(torch.isfinite(local_part(weight.detach())).all()):
            rule = f"weights of {name} must be finite, got NaN or infinity"
            raise CompatibilityError("prune", rule, "find the training step that diverged")
