"""Gradients of single examples, by Opacus' hooks on the user's own modules, and their clipped sum."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from shared_core.distributed.sharded_tensors import shards, whole
from shared_core.engine.model_guards import refuse_scripted
from shared_core.errors import CompatibilityError, MatchError, TrainingError
from shared_core.modules.matching import own_class
from shared_core.numerics.deferred_checks import read_together
from shared_core.privacy.accountant import opacus

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

        # A factor of 0 does not remove NaN: 0 * NaN is NaN.
        def cleaned(values: Tensor) -> Tensor:
            return values if all_finite or not values.is_floating_point() else values.nan_to_num(0, 0, 0)

        if self.samples is not None:
            samples = cleaned(in_full(self.samples))
            # Σ_n f_n g_n, (n, ...) contracted over examples.
            return torch.einsum("n,n...->...", factors.to(samples.dtype), samples)
        # gᵢ is the sum of δₜxₜᵀ over the positions t of example i, so Σᵢ fᵢgᵢ is one product (fδ)ᵀx over all positions
        sums = []
        for layer, inputs, found in self.uses:
            outputs = cleaned(in_full(found))
            outputs = (outputs * factors.to(outputs.dtype).view(-1, *[1] * (outputs.dim() - 1))).flatten(0, -2)
            # An embedding's gradient adds rows of δ at the looked-up places.
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
        "dp",
        f"{name} must get a gradient from each of the {examples} examples, got {rows}",
        "every layer's input must have the batch in its first dimension, one row an example, and every batch must "
        "give a loss",
    )


_GradSampleHooks: Any = object  # Opacus is imported where it is needed: it takes seconds


class LayerHooks(_GradSampleHooks):  # type: ignore[misc]
    """Opacus' hooks, which keep gradients by name: FSDP2 has other parameters in forward and backward.

    They sit on the layers of a module that lists a layer's parameter as its own, as BERT's head does. The class that
    `opacus_hooks` returns has Opacus' own behind it.
    """

    def __init__(self, model: nn.Module, functorch: bool) -> None:
        # By name: FSDP2 has other parameter objects in forward (gathered) than in backward.
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
            if isinstance(module, opacus("layers.dp_rnn").DPRNNBase)
        ]

    def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules that own trained parameters, and none that lists those of a layer inside it."""
        own = {parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad}
        inner = {parameter for child in module.children() for parameter in child.parameters()}
        listed = bool(own) and own <= inner
        # A layer that lists parameters of a child of its own (containers) would count them twice.
        if own and not listed:
            yield module
            if self._get_module_type(module) not in self.GRAD_SAMPLERS:
                return  # vmap differentiates it as a whole
        for child in module.children():
            yield from self.iterate_submodules(child)

    def _get_module_type(self, module: nn.Module) -> type[nn.Module]:
        return own_class(module)

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep a layer's inputs in forward."""
        trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if not (self.hooks_enabled and trains and module.training and torch.is_grad_enabled()):
            return
        order = [self._order[module]] if module in self._order else []
        vars(module).setdefault("activations", []).append([value.detach() for value in inputs] + order)
        # How many backwards each parameter still expects: weight sharing gives several to one parameter.
        self._ahead.update(self._names[module].values())

    def _check_inputs(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        by_name = [
            name for name, value in named.items() if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        ]
        others = inputs[1:] if own_class(module) not in self.GRAD_SAMPLERS or self.force_functorch else ()
        if self.hooks_enabled and (by_name or others or not all(isinstance(value, Tensor) for value in inputs)):
            kinds = [*(type(value).__name__ for value in inputs), *by_name]
            raise TrainingError(
                "dp",
                f"{next(iter(self._names[module].values()))} must be of a layer with one tensor as input, by "
                f"position, got ({', '.join(kinds)}) for {own_class(module).__name__}",
                "freeze it, or put torch.nn.Linear layers in its place",
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
        """Make the gradients of examples of a layer's inputs and of the gradient of its outputs."""
        if not self.hooks_enabled:
            return
        kind, names = own_class(module), self._names[module]
        by_rule = kind in self.GRAD_SAMPLERS and not self.force_functorch
        if not by_rule and (len(outputs) > 1 or outputs[0] is None):
            raise TrainingError(
                "dp",
                f"{next(iter(names.values()))} must be of a layer with one tensor as output, got {len(outputs)} from "
                f"{kind.__name__}, which has no rule",
                "freeze it",
            )
        # Opacus puts the batch first and undoes the loss's mean here.
        activations, backprops = self.rearrange_grad_samples(
            module=module, backprops=outputs[0].detach(), loss_reduction=loss_reduction, batch_first=batch_first
        )
        joined = by_rule and kind in _JOINED
        # Padding has no gradient, and Opacus' rule does not know of padding_idx.
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
            # Packed sequences: later steps have fewer examples; those that are over get a gradient of 0.
            if len(found) < rows:  # packed sequences
                found = torch.cat([found, found.new_zeros(rows - len(found), *found.shape[1:])])
            if len(activations) > 1 and kind is opacus("layers.dp_rnn").RNNLinear:
                # torch sorted the sequence by length: back to the order of the batch.
                found = found[activations[1]]
            before = self._samples.get(name)
            if before is not None and len(before) != len(found):
                raise not_each(name, len(before), len(found))
            self._samples[name] = found if before is None else before + found
            use = (module, activations[0], backprops) if joined and now[parameter] == "weight" else None
            self._uses.setdefault(name, []).append(use)
        # 16-bit outputs: the whole batch's gradient is rounded, which the later comparison must allow for.
        if torch.finfo(outputs[0].dtype).bits < 32:
            self._coarse.update(names.values())
        self._ahead.subtract(names.values())
        # All backwards of the parameter have come: its norm is known now.
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
        # Inputs and output gradients instead of (examples, out, in): kept where they are smaller, that is for few
        # positions.
        if self.spares and len(uses) == len(found) and kept < samples.numel():
            return ExampleGradients(norms, None, uses, name in self._coarse)
        return ExampleGradients(norms, samples, coarse=name in self._coarse)


@functools.cache
def opacus_hooks() -> Any:
    """Return the class of the hooks; Opacus is imported by this call."""
    return type("OpacusLayerHooks", (LayerHooks, opacus("grad_sample").GradSampleHooks), {})


_NAMED = 3


def check_model(model: nn.Module, functorch: bool = False) -> None:
    """Refuse a model in which gradients of single examples do not exist, or cannot be had.

    Args:
        model: The model.
        functorch: Whether every layer is differentiated by vmap.

    Raises:
        CompatibilityError: Naming such modules and what to put in their place.
        MatchError: If nothing is trained.
    """
    refuse_scripted(model, "dp")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MatchError("dp", "model must have a trainable parameter, got none", "unfreeze what is to be trained")
    validators = opacus("validators").ModuleValidator.VALIDATORS
    rules = opacus("grad_sample").GradSampleHooks.GRAD_SAMPLERS
    wrong: dict[str, list[str]] = {}  # a model often lacks one thing in all its layers
    for name, module in model.named_modules():
        kind = own_class(module).__name__
        reason = _reason(module, kind, validators.get(own_class(module)), functorch or own_class(module) not in rules)
        if reason:
            wrong.setdefault(reason, []).append(f"{name} ({kind})")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and torch.finfo(parameter.dtype).bits < 32:
            reason = f"is {parameter.dtype}, which would round the noise; load the model in float32"
            wrong.setdefault(reason, []).append(name)
    if wrong:
        told = ". ".join(f"{names[0]} {reason}{_likewise(names[1:])}" for reason, names in wrong.items())
        raise CompatibilityError("dp", f"model must give a gradient for each example, but {told}")


def _reason(module: nn.Module, kind: str, validator: Callable[..., Any] | None, is_vmapped: bool) -> str:
    """Return why a module gives no gradients of single examples, or nothing."""
    trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    if isinstance(module, _BatchNorm):
        return (
            "normalises an example by the others of its batch; put torch.nn.GroupNorm in its place, or convert the "
            "model with opacus.validators.ModuleValidator.fix"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (reason := _embedding_reason(module, is_vmapped)):
        return reason
    if trained and isinstance(module, nn.RNN | nn.RNNCellBase):
        return f"has no rule; put opacus.layers.dp_rnn.DP{kind} in its place"
    if trained and validator is not None and validator(module):
        return "has no rule; opacus.validators.ModuleValidator.fix puts Opacus' own in its place"
    if trained and list(module.buffers(recurse=False)):
        return (
            "trains beside buffers, which Opacus does not take, constants (position_ids) or not, as they may hold what "
            "was seen without noise; freeze or replace it"
        )
    if trained and type(module) is not own_class(module) and is_vmapped:
        return (
            "is sharded by itself, and vmap differentiates a copy of it, which FSDP2 lets nobody make; shard the block "
            "that it is in, or leave sharding to strategy eff_fsdp"
        )
    if trained and is_vmapped and len(inputs := _inputs(module)) > 1:
        return (
            f"has no rule, and vmap differentiates layers of one input, got {', '.join(inputs)}; freeze it, or take a "
            "model without such layers (stacked experts are among them)"
        )
    if getattr(module, "_compiled_call_impl", None) is not None or kind == "OptimizedModule":
        return "is compiled, and hooks of single layers do not run; leave torch.compile out"
    return ""


def _embedding_reason(module: nn.Embedding | nn.EmbeddingBag, is_vmapped: bool) -> str:
    if module.max_norm is not None:
        return "shrinks the rows that it looks up (max_norm), in which examples can be seen without noise; leave it out"
    if not module.weight.requires_grad:
        return ""
    if module.scale_grad_by_freq:
        return (
            "divides gradients by how often a row is looked up in the whole batch (scale_grad_by_freq), which lets one "
            "example change how much others count; leave it out"
        )
    if isinstance(module, nn.EmbeddingBag):
        return "has no rule that counts a row twice; put torch.nn.Embedding and a sum or mean in its place"
    if module.sparse and is_vmapped:
        return "has sparse gradients, which vmap does not know; set sparse=False, as noise is on every row"
    return ""


def _inputs(module: nn.Module) -> list[str]:
    """Return the arguments that a layer's forward cannot do without."""
    arguments = inspect.signature(module.forward).parameters.values()
    in_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in arguments if each.kind in in_place and each.default is each.empty]


def _likewise(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" (so too {', '.join(names[:_NAMED])}{more})"


class PerSample:
    """Hooks on a model's layers that keep the gradient of each example; the model's modules and keys stay its own.

    Args:
        model: The model, checked before.
        functorch: Whether every layer is differentiated by vmap, Opacus' own rules or not.
    """

    def __init__(self, model: nn.Module, functorch: bool) -> None:
        self._model = model
        self.num_examples = 0
        """Rows of the micro-batch whose backward comes next."""
        self.rows_ahead: Callable[[], int] = lambda: self.num_examples
        """Rows of the micro-batch whose forward is running."""
        self._in_place = [module for module in model.modules() if getattr(module, "inplace", False) is True]
        for module in self._in_place:
            vars(module)["inplace"] = False  # torch refuses to change the output of a module with a full backward hook
        # the first layer's input needs no gradient, which is as it should be
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
        self._hooks = opacus_hooks()(model, functorch)
        self._expanding = [  # only now: vmap differentiates copies of the layers, which were made with their hooks
            module.register_forward_pre_hook(self._expand)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        ]

    def _expand(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        # transformers look positions up once for the whole batch: (1, length)
        first = inputs[0] if inputs else None
        if (
            not (module.training and torch.is_grad_enabled())
            or not isinstance(first, Tensor)
            or first.dim() < 2
            or first.shape[0] != 1
        ):
            return None
        return (first.expand(self.rows_ahead(), *first.shape[1:]), *inputs[1:])

    def begin(self) -> None:
        """Go by how the model is to be trained: where it is sharded no process keeps what it has no memory for."""
        self._hooks.spares = shards(self._model)

    def clipped_sums(self, scale: Tensor, max_norm: float, check_sum: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield ``Σᵢ sᵢgᵢ · min(1, C / ‖sᵢgᵢ‖)`` of the last backward by parameter, and forget its gradients.

        Args:
            scale: sᵢ, (examples,), which makes of gᵢ the gradient of the example's own loss.
            max_norm: C, above 0; norms are over all parameters together.
            check_sum: Whether ``.grad`` holds this backward alone and should be the sum of all gᵢ.

        Raises:
            TrainingError: Naming a parameter of which an example's gradient is not known.

        Source: Abadi et al. 2016, arXiv:1607.00133, algorithm 1.
        """
        made = self._take()
        if check_sum:
            self._check_sums(made)
        if made:
            # The norm is over all parameters of an example: norms of parts, then the norm of these.
            norms = torch.stack([gradients.norms for gradients in made.values()]).norm(dim=0)
            factors, all_finite = clip_factors(norms, scale, max_norm), bool(norms.isfinite().all())
            for name in list(made):
                yield name, made.pop(name).weighted_sum(factors, all_finite)

    def _take(self) -> dict[str, ExampleGradients]:
        made, taken = self._hooks.made, {}
        for name, parameter in self._model.named_parameters():
            if name in made:
                found = made[name]
                if len(found) != 1 or len(found[0].norms) != self.num_examples:
                    raise not_each(name, self.num_examples, len(found[0].norms) if len(found) == 1 else "several")
                taken[name] = found[0]
            elif parameter.requires_grad and parameter.grad is not None:
                raise TrainingError(
                    "dp",
                    f"{name} must get its gradient through the forward of its own module, once, got one without",
                    "use layers as modules, and leave gradient checkpointing out",
                )
        self._hooks.made = {}
        return taken

    def _check_sums(self, made: Mapping[str, ExampleGradients]) -> None:
        known = {name: value for name, value in self._model.named_parameters() if value.grad is not None}
        found = []
        # Checks itself once: the sum over examples must be the gradient that autograd found, or a layer is missed.
        for name, parameter in known.items():
            gradient, norms = whole(cast(Tensor, parameter.grad)), made[name].norms
            total = made[name].weighted_sum(torch.ones_like(norms), all_finite=True)
            found += [norms.double().sum(), (total.double() - gradient).norm()]
        read = read_together(found)
        sizes = dict(zip(known, read[::2], strict=True))
        for name, apart in zip(known, read[1::2], strict=True):
            # a gradient that is 0 but for rounding, as that of a key's bias in attention, agrees with nothing
            if apart > (0.05 if made[name].coarse else 1e-3) * sizes[name] and apart > 1e-4 * max(sizes.values()):
                raise TrainingError(
                    "dp",
                    f"gradients of single examples must sum to the gradient of {name}, got a difference of "
                    f"{apart / sizes[name]:.2g} of their size",
                    "its layer has no rule that fits how it is used",
                )

    def remove(self) -> None:
        """Leave the model without hooks and without anything kept on modules and parameters."""
        self._hooks.cleanup()
        for hook in self._expanding:
            hook.remove()
        for module in self._in_place:
            vars(module)["inplace"] = True
        for module in self._model.modules():
            for left in ("activations", "max_batch_len"):
                vars(module).pop(left, None)


def clip_factors(norms: Tensor, scale: Tensor, max_norm: float) -> Tensor:
    """Return ``sᵢ · min(1, C / ‖sᵢgᵢ‖)``, 0 for an example whose gradient is not finite.

    Args:
        norms: ‖gᵢ‖ over all parameters together, (examples,).
        scale: sᵢ, (examples,).
        max_norm: C, above 0.

    Example:
        >>> clip_factors(torch.tensor([5.0, 0.5, torch.nan]), torch.ones(3), 1.0)
        tensor([0.2000, 1.0000, 0.0000])
    """
    norms = norms * scale.abs()
    # min(1, C / ‖g‖) with ‖g‖ in the scaled units: the loss's factor is divided out by `scale`.
    clipped = scale * (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    # An example that is not finite is left out: clipping cannot bound it.
    return clipped.where(norms.isfinite(), 0)
