"""Batches that run through a trained model so that a criterion sees inputs or gradients, and leave nothing in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.distributed.collectives import all_finite
from shared_core.errors import ConfigError, TrainingError
from shared_core.modules.calls import call_on_batch, evaluating, solve_in_order
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.numerics.second_order import compensated
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.masks import MaskPolicy
from shared_core.pruning.scorers import CostWatch
from shared_core.pruning.structured import UnitPruning

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
            raise TrainingError(
                "prune",
                f"calibration must give finite gradients, got NaN or infinity in all {len(batches)} batches",
                "look at the loss",
            )

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
            raise ConfigError(
                "prune",
                f"loss must be a scalar that depends on the weights for criterion {config.criterion}, got {kind}",
                "pass loss(model, batch), or batches with labels to a model whose output has a loss",
            )
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
