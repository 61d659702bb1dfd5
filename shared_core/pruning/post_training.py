"""Pruning of a trained model at once: scored by its weights alone or on a few batches, no training.

Batches run through the model so that a criterion sees inputs or gradients, and leave nothing in it.
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
from shared_core.modules.calls import call_on_batch, evaluating, solve_in_order
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
    """Runs batches in eval mode; modes, gradients, hooks and running statistics are afterwards what they were."""

    def __init__(self, model: nn.Module, policy: MaskPolicy, loss: Loss | None) -> None:
        self._model, self._policy, self._loss = model, policy, loss
        self._scorer, self._tensors = policy.scorer, policy.store.weights
        self.batches = self.batches_left_out = self.examples = 0

    def look_at(self, config: PruneConfig, batch: Any) -> None:
        """Run one batch to see what each layer costs and which units there are."""
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
                raise ConfigError("prune", "loss must call the model as a whole, got no call of it", "call model(...)")
            self._policy.show(self._model, lambda: [self._model(*args, **kwargs) for args, kwargs in calls])

    def run(self, config: PruneConfig, batches: Sequence[Any], progress: Callable[[int, int], None] | None) -> None:
        """Let the criterion see every batch."""
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
            raise TrainingError("prune", rule, "look at the loss")

    def solve(
        self,
        config: PruneConfig,
        batches: Sequence[Any],
        own: Mapping[str, float],
        progress: Callable[[int, int], None] | None,
    ) -> dict[str, Tensor]:
        """Prune linear layers in the order of the forward, the kept weights moved to make up; return the masks."""
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
        """Show the gradients of one batch to the criterion; return whether they are finite."""
        found = output if self._loss is not None else _loss_of(output)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            rule = f"loss must be a scalar that depends on the weights for criterion {config.criterion}, got {kind}"
            remedy = "pass loss(model, batch), or batches with labels to a model whose output has a loss"
            raise ConfigError("prune", rule, remedy)
        wanted = {name: tensor for name, tensor in self._tensors.items() if tensor.requires_grad}
        # Only for the scored weights: no gradient of the others is made.
        found.backward(inputs=list(wanted.values()))  # type: ignore[no-untyped-call]
        gradients = {name: tensor.grad for name, tensor in wanted.items() if tensor.grad is not None}
        is_finite = all_finite(gradients.values())
        if is_finite:
            self._scorer.observe_step(self._tensors, gradients)
            if isinstance(self._policy, UnitPruning):
                self._policy.observe_units()
        else:
            # One bad batch (overflow in half precision) must not decide: it is counted and left out.
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
                self._tensors[name].requires_grad_(True)  # a frozen one that include names
            with (
                evaluating(self._model),
                torch.set_grad_enabled(gradients),
                # a graph that was compiled before there were hooks would run without them
                torch.compiler.set_stance("force_eager"),
            ):
                for module in self._scorer.modules.values():
                    # scorers count forwards in train mode; linear and convolutional layers do the same in either, and
                    # recurrent ones without dropout, whose backward cuDNN has in train mode alone
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


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _num_examples(batch: Any) -> int:
    """Return how many examples a batch holds: the first axis of its first tensor that has one."""
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
        sparsity: The share of them.
        criterion: What they were scored by.
        granularity: What was pruned whole.
        left_out: Every other matrix, with the reason why it stays dense.
        batches: Calibration batches that scores come from.
        batches_left_out: Those whose gradients held NaN or infinity.
        examples: How many examples these held.
        seconds: What it took.
        note: What this sparsity is good for.
        scope: How it was shared out over layers.
        max_layer_sparsity: The largest share of one layer that could go; None where all lose the same, or go whole.
        capped: Layers, or groups of units, that reached it.
        overrides: The sparsity of each weight that had one of its own.
        notes: What a user should know of layers that lost most of what they had.
        units: One entry a group of units: group, kind, units, pruned.
        groups_left_out: Groups that cannot be pruned, with the reason.
        coverage: How much of the model is within reach (`engine.checks.coverage.Reach`); of units what they hold.
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
        """Return all but the masks as plain values that JSON can hold."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "masks"]
        return {name: getattr(self, name) for name in names}


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
    """Prune a trained model in place, at once to ``config.sparsity``, and return what was done.

    Weights become zero; names, shapes, classes, modes, gradients and running statistics stay as they are. All scores
    are those of the dense model in evaluation mode. Each batch counts as the gradients of one step do in training:
    ``taylor`` is the mean over batches of the magnitude of w·g, ``fisher`` takes every example by itself.

    ``sparsegpt`` (Frantar & Alistarh 2023, arXiv:2301.00774) also moves the weights that it keeps: `compensated` says
    how, `solve_in_order` in which order and on which inputs. An error in mid-work leaves the layers done so far pruned.

    Args:
        model: Trained; its weights change.
        config: Options as a recipe's ``prune`` section has them, or a `PruneConfig`. Those about the time of training
            must be left out, and so must criterion ``movement``.
        calibration: Batches, for criteria that look at inputs or gradients; the first alone is looked at for neurons,
            channels and heads, for ``cost: flops`` or ``energy``, and for ``shapley``. Each is a tensor, a tuple of
            arguments or a mapping of keyword arguments, or whatever `loss` takes.
        loss: ``loss(model, batch)`` returns the mean loss of a batch, a scalar; it runs every batch, whatever the
            criterion. By default the model is called with the batch, and where gradients are needed its output must
            have a ``loss`` (models of transformers, given labels).
        num_batches: How many batches are run, at most.
        seed: Of the draws of ``random`` and ``shapley``.
        allow_partial: Whether layers with less than half of the weights that multiply activations will do.
        progress: Called with (batches run, batches) after each batch, to show a bar.

    Raises:
        ConfigError: If an option breaks its rule, or calibration or loss is missing or not what the model takes.
        CompatibilityError: If a weight is not finite, or weights are sharded or batches spread over processes.
        MatchError: If there is nothing to prune, or too little (`allow_partial`).
        TrainingError: If no batch has finite gradients, or a layer saw no input.

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
    model = getattr(model, "_orig_mod", model)  # of a compiled one
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
    told = policy.report()
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
        **{name: told[name] for name in ("units", "groups_left_out") if name in told},
    )


def as_config(config: PruneConfig | Mapping[str, Any]) -> PruneConfig:
    """Return a config from either form that `prune` takes, without options of training."""
    defaults = {each.name: each.default for each in dataclasses.fields(PruneConfig)}
    is_made = isinstance(config, PruneConfig)
    given: Mapping[str, Any] = {name: getattr(config, name) for name in defaults} if is_made else config  # type: ignore[assignment]
    if not isinstance(given, Mapping):
        return PruneConfig.from_dict(given)  # which refuses it
    if given.get("criterion") == "movement":
        rule = "criterion must be another after training, got 'movement', which looks at how weights move in training"
        raise ConfigError("prune", rule, "take taylor")
    for name in DURING_TRAINING:
        asked = name in given and not (is_made and given[name] == defaults[name])
        if asked and (name, given[name]) != ("schedule", "one_shot"):
            rule = f"{name} must be left out after training, got {given[name]!r}"
            remedy = "it says what happens while a model trains: put it into the recipe of a run"
            raise ConfigError("prune", rule, remedy)
    return config if isinstance(config, PruneConfig) else PruneConfig.from_dict({**config, "schedule": "one_shot"})


def _checked_batches(config: PruneConfig, calibration: Iterable[Any] | None, num_batches: int) -> list[Any]:
    num_batches = checked(num_batches, int, "prune", "num_batches", low=1)
    needs = config.needs_batches
    if not needs:
        return []
    if world_size() > 1:
        rule = f"calibration must run in one process, got {world_size()}, each with masks of its own batches"
        raise CompatibilityError("prune", rule, "prune before they start, and load the result")
    batches = list(itertools.islice(() if calibration is None else calibration, num_batches))
    if not batches:
        raise ConfigError("prune", f"calibration must be given with {needs}, got no batches", "pass some")
    return batches


def _check_weights(config: PruneConfig, weights: Mapping[str, Tensor]) -> None:
    refuse_sharded(config, weights)
    for name, weight in weights.items():
        if not bool(torch.isfinite(local_part(weight.detach())).all()):
            rule = f"weights of {name} must be finite, got NaN or infinity"
            raise CompatibilityError("prune", rule, "look for the diverged step")
