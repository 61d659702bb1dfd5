"""Opacus' hooks on a model's layers, and what they keep of a backward: the gradient of each example, by parameter."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from shared_core.errors import TrainingError
from shared_core.module_match import own_class
from shared_core.privacy.accountant import opacus
from shared_core.sharded import whole

_JOINED = (nn.Linear, nn.Embedding)
"""Layers whose weight gets its gradient from each position by itself: sums over examples are one product."""


@dataclass
class ExampleGradients:
    """The gradients of one parameter in one backward, an example a row, or the inputs that they are made of."""

    norms: Tensor
    """(examples,), in float32 or float64."""
    samples: Tensor | None
    """(examples, ...), None where the layers' inputs and gradients of outputs are kept instead, which are smaller."""
    uses: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)
    coarse: bool = False
    """Whether the backward ran in 16 bits, as under autocast: the gradient of the whole batch is rounded to them."""

    def weighted_sum(self, factors: Tensor, all_finite: bool) -> Tensor:
        """Return ``Σᵢ fᵢgᵢ``; a factor of 0 leaves an example out, also one that is not finite."""

        def cleaned(values: Tensor) -> Tensor:
            return values if all_finite or not values.is_floating_point() else values.nan_to_num(0, 0, 0)

        if self.samples is not None:
            samples = cleaned(in_full(self.samples))
            return torch.einsum("n,n...->...", factors.to(samples.dtype), samples)
        sums = []
        for layer, inputs, found in self.uses:
            outputs = cleaned(in_full(found))
            outputs = (outputs * factors.to(outputs.dtype).view(-1, *[1] * (outputs.dim() - 1))).flatten(0, -2)
            if isinstance(layer, nn.Embedding):
                total = outputs.new_zeros(layer.num_embeddings, layer.embedding_dim)
                sums.append(total.index_add_(0, inputs.flatten(), outputs))
            else:
                sums.append(outputs.T @ cleaned(inputs).flatten(0, -2).to(outputs.dtype))
        return torch.stack(sums).sum(0)


def in_full(values: Tensor) -> Tensor:
    """Return values in float32 at least, in which norms and sums are exact enough for what is promised of them."""
    return values if values.dtype == torch.float64 else values.float()


def not_each(name: str, examples: int, rows: object) -> TrainingError:
    """Return the error of a parameter that has not one gradient from each example."""
    return TrainingError(
        f"dp: {name} must get a gradient from each of the {examples} examples, got {rows}; every layer's input must "
        "have the batch in its first dimension, one row an example, and every batch must give a loss"
    )


@functools.cache
def layer_hooks() -> Any:
    """Return the class of the hooks; Opacus is imported by this call."""
    dp_rnn = opacus("layers.dp_rnn")

    class LayerHooks(opacus("grad_sample").GradSampleHooks):  # type: ignore[misc]
        """Opacus' hooks, which keep gradients by name: FSDP2 has other parameters in forward and backward.

        They sit on the layers of a module that lists a layer's parameter as its own, as BERT's head does.
        """

        def __init__(self, model: nn.Module, functorch: bool) -> None:
            names = {value: name for name, value in model.named_parameters() if value.requires_grad}
            self._names = {
                module: {own: names[value] for own, value in module.named_parameters() if value in names}
                for module in self.iterate_submodules(model)
            }
            self.spares = False
            """Whether inputs are kept in place of gradients that are larger."""
            self.made: dict[str, list[ExampleGradients]] = {}
            """By parameter, one entry for each backward since they were taken."""
            self._ahead: Counter[str] = Counter()
            self._coarse: set[str] = set()
            self._samples: dict[str, Tensor] = {}
            self._uses: dict[str, list[tuple[nn.Module, Tensor, Tensor] | None]] = {}
            self._order: dict[nn.Module, Tensor] = {}
            super().__init__(model, loss_reduction="sum", strict=True, force_functorch=functorch)
            self.autograd_grad_sample_hooks += [
                module.register_forward_pre_hook(self._check_inputs, with_kwargs=True) for module in self._names
            ]
            self.autograd_grad_sample_hooks += [
                module.register_forward_pre_hook(self._keep_order)
                for module in model.modules()
                if isinstance(module, dp_rnn.DPRNNBase)
            ]

        def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
            own = {parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad}
            inner = {parameter for child in module.children() for parameter in child.parameters()}
            listed = bool(own) and own <= inner
            if own and not listed:
                yield module
                if self._get_module_type(module) not in self.GRAD_SAMPLERS:
                    return  # vmap differentiates it as a whole
            for child in module.children():
                yield from self.iterate_submodules(child)

        def _get_module_type(self, module: nn.Module) -> type[nn.Module]:
            return own_class(module)

        def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
            trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            if not (self.hooks_enabled and trains and module.training and torch.is_grad_enabled()):
                return
            order = [self._order[module]] if module in self._order else []
            vars(module).setdefault("activations", []).append([value.detach() for value in inputs] + order)
            self._ahead.update(self._names[module].values())

        def _check_inputs(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            by_name = [
                name for name, value in named.items() if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
            ]
            others = inputs[1:] if own_class(module) not in self.GRAD_SAMPLERS or self.force_functorch else ()
            if self.hooks_enabled and (by_name or others or not all(isinstance(value, Tensor) for value in inputs)):
                kinds = [*(type(value).__name__ for value in inputs), *by_name]
                raise TrainingError(
                    f"dp: {next(iter(self._names[module].values()))} must be of a layer with one tensor as input, by "
                    f"position, got ({', '.join(kinds)}) for {own_class(module).__name__}; freeze it, or put "
                    "torch.nn.Linear layers in its place"
                )

        def _keep_order(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
            """Keep where the rows of a packed sequence were: torch sorts them by length."""
            for layer in module.modules():
                self._order.pop(layer, None)
                if isinstance(inputs[0], PackedSequence) and inputs[0].unsorted_indices is not None:
                    self._order[layer] = inputs[0].unsorted_indices

        def capture_backprops_hook(
            self, module: nn.Module, inputs: Any, outputs: Any, loss_reduction: str, batch_first: bool
        ) -> None:
            if not self.hooks_enabled:
                return
            kind, names = own_class(module), self._names[module]
            by_rule = kind in self.GRAD_SAMPLERS and not self.force_functorch
            if not by_rule and (len(outputs) > 1 or outputs[0] is None):
                raise TrainingError(
                    f"dp: {next(iter(names.values()))} must be of a layer with one tensor as output, got "
                    f"{len(outputs)} from {kind.__name__}, which has no rule; freeze it"
                )
            activations, backprops = self.rearrange_grad_samples(
                module=module, backprops=outputs[0].detach(), loss_reduction=loss_reduction, batch_first=batch_first
            )
            joined = by_rule and kind in _JOINED
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                backprops = backprops.masked_fill((activations[0] == module.padding_idx).unsqueeze(-1), 0)
            rule = self.GRAD_SAMPLERS[kind] if by_rule else self._by_vmap
            samples = rule(module, activations, in_full(backprops) if joined else backprops)
            rows = vars(module)["max_batch_len"]
            now: dict[Tensor, str] = {value: own for own, value in module.named_parameters()}
            for parameter, found in samples.items():
                name = names.get(now.get(parameter, ""))
                if name is None:
                    continue
                if len(found) < rows:  # packed sequences
                    found = torch.cat([found, found.new_zeros(rows - len(found), *found.shape[1:])])
                if len(activations) > 1 and kind is dp_rnn.RNNLinear:
                    found = found[activations[1]]
                before = self._samples.get(name)
                if before is not None and len(before) != len(found):
                    raise not_each(name, len(before), len(found))
                self._samples[name] = found if before is None else before + found
                use = (module, activations[0], backprops) if joined and now[parameter] == "weight" else None
                self._uses.setdefault(name, []).append(use)
            if torch.finfo(outputs[0].dtype).bits < 32:
                self._coarse.update(names.values())
            self._ahead.subtract(names.values())
            for name in names.values():
                if self._ahead[name] == 0 and name in self._samples:
                    self.made.setdefault(name, []).append(self._keep(name))
            if not vars(module)["activations"]:
                del vars(module)["max_batch_len"]

        def _by_vmap(self, layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
            parameters = list(layer.parameters())
            inputs = activations[0].to(backprops.dtype) if activations[0].is_floating_point() else activations[0]
            found = layer.ft_compute_sample_grad([whole(value) for value in parameters], inputs, backprops)  # type: ignore[operator]
            return dict(zip(parameters, found, strict=True))

        def _keep(self, name: str) -> ExampleGradients:
            samples, found = self._samples.pop(name), self._uses.pop(name)
            uses = [use for use in found if use is not None]
            kept = sum(part.numel() for _, inputs, outputs in uses for part in (inputs, outputs))
            norms = in_full(samples).flatten(1).norm(dim=1)
            if self.spares and len(uses) == len(found) and kept < samples.numel():
                return ExampleGradients(norms, None, uses, name in self._coarse)
            return ExampleGradients(norms, samples, coarse=name in self._coarse)

    return LayerHooks
