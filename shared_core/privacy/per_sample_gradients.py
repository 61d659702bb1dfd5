"""Gradients of single examples, by Opacus' hooks on the user's own modules, and their clipped sum."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from shared_core.distributed.collectives import all_gather_object, rank, world_size
from shared_core.distributed.sharded_tensors import whole
from shared_core.engine.checks.model_guards import refuse_scripted
from shared_core.errors import CompatibilityError, MatchError, TrainingError
from shared_core.modules.matching import own_class
from shared_core.numerics.deferred_checks import read_together
from shared_core.privacy.accountant import opacus

_FACTORED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
"""Layers of whose weight an example's gradient is ``Σₜ lₜrₜᵀ`` over positions: no matrix an example need be made."""

_GRAM_ELEMENTS = 1 << 24


@dataclass
class Use:
    """A pass of a batch through a layer of such a kind."""

    layer: nn.Module
    inputs: Tensor
    outputs: Tensor
    """The gradient of the outputs."""

    @property
    def shape(self) -> torch.Size:
        """Of the weight, whole where it is sharded."""
        return cast(Tensor, self.layer.weight).shape

    def size(self) -> int:
        """Return the elements of all factors."""
        rows, columns = self.shape[0], self.shape[1:].numel()
        if isinstance(self.layer, nn.Embedding):
            return self.inputs.numel() * (1 + columns)
        return self.outputs.numel() // rows * (rows + columns)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return l, (examples, positions, out) or the rows looked up, (examples, positions), and r, (…, in)."""
        layer, inputs, outputs = self.layer, self.inputs, in_full(self.outputs)
        if isinstance(layer, nn.Embedding):
            places = inputs.reshape(len(inputs), -1)
            return places, outputs.reshape(*places.shape, -1)
        inputs = inputs.to(outputs.dtype)
        if isinstance(layer, nn.Linear):
            count = len(inputs)
            return outputs.reshape(count, -1, outputs.shape[-1]), inputs.reshape(count, -1, inputs.shape[-1])
        convolution: Any = layer
        padding, mode = convolution._reversed_padding_repeated_twice, convolution.padding_mode
        inputs = nn.functional.pad(inputs, padding, "constant" if mode == "zeros" else mode)
        if isinstance(layer, nn.Conv1d):
            inputs = inputs.unsqueeze(-2)
        kernel, dilation, stride = (
            (1, *values)[-2:] for values in (convolution.kernel_size, convolution.dilation, convolution.stride)
        )
        columns = nn.functional.unfold(inputs, kernel, dilation=dilation, stride=stride)
        return outputs.flatten(2).mT, columns.mT

    def bias(self) -> Tensor:
        """Return each example's gradient of the bias."""
        by_channel = isinstance(self.layer, nn.Conv1d | nn.Conv2d)
        outputs = in_full(self.outputs).flatten(2).sum(2) if by_channel else in_full(self.outputs)
        return outputs if outputs.dim() == 2 else outputs.flatten(1, -2).sum(1)

    def samples(self) -> Tensor:
        """Return each example's gradient of the weight."""
        left, right = self.factors()
        count = len(right)
        if left.is_floating_point():
            return (left.mT @ right).view(count, *self.shape)
        found = right.new_zeros(count * self.shape[0], self.shape[1])
        places = left + self.shape[0] * torch.arange(count, device=left.device).unsqueeze(1)
        return found.index_add_(0, places.flatten(), right.flatten(0, 1)).view(count, *self.shape)


def ghost_squares(uses: Iterable[Use]) -> Tensor:
    """Return each example's squared norm of ``Σₜ lₜrₜᵀ``, from the products of positions ``(lₛ·lₜ)(rₛ·rₜ)``.

    What rounding can hide where positions cancel is added: a norm told too small would break the bound on an example.

    Source: Li et al. 2021, arXiv:2110.05679, section 4.
    """
    kinds: dict[bool, list[tuple[Tensor, Tensor]]] = {}
    for left, right in (use.factors() for use in uses):
        kinds.setdefault(left.is_floating_point(), []).append((left, right))
    # One group of dense l and one of rows looked up: a weight may be an embedding's and a head's.
    groups = [
        found[0] if len(found) == 1 else tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))
        for found in kinds.values()
    ]
    positions = sum(right.shape[1] for _, right in groups)
    rows = max(1, _GRAM_ELEMENTS // positions**2)
    parts = zip(
        *(zip(torch.split(left, rows), torch.split(right, rows), strict=True) for left, right in groups), strict=True
    )
    squares = []
    for part in parts:
        dots = []
        for left, right in part:
            gram = right @ right.mT
            gram.diagonal(dim1=1, dim2=2).mul_(1 + positions * torch.finfo(gram.dtype).eps)
            dots.append(_dot(_gram(left, left), gram))
        if len(part) == 2:
            (left, right), (other, others) = part
            dots.append(2 * _dot(_gram(left, other), right @ others.mT))
        squares.append(dots[0] if len(dots) == 1 else torch.stack(dots).sum(0))
    return squares[0] if len(squares) == 1 else torch.cat(squares)


def _dot(gram: Tensor, other: Tensor) -> Tensor:
    return (gram.to(other.dtype).flatten(1).unsqueeze(1) @ other.flatten(1).unsqueeze(2)).flatten()


def _gram(left: Tensor, other: Tensor) -> Tensor:
    """Return the products of rows, of which those looked up stand for rows of the unit matrix."""
    if left.is_floating_point() and other.is_floating_point():
        return left @ other.mT
    if left.is_floating_point():
        return left.gather(2, other.unsqueeze(1).expand(-1, left.shape[1], -1))
    return _gram(other, left).mT if other.is_floating_point() else left.unsqueeze(2) == other.unsqueeze(1)


@dataclass
class ExampleGradients:
    """The gradients of one parameter in one backward, an example a row, or the inputs that they are made of."""

    norms: Tensor
    """(examples,), in float32 or float64; squared where `samples` is None, until the backward has ended."""
    samples: Tensor | None
    """(examples, ...), None where the layers' inputs and gradients of outputs are kept instead, which are smaller."""
    uses: list[Use] = field(default_factory=list)
    coarse: bool = False
    """True if the backward ran in 16 bits, as under autocast: the gradient of the whole batch is rounded to them."""

    def weighted_sum(self, factors: Tensor, all_finite: bool) -> Tensor:
        """Return ``Σᵢ fᵢgᵢ``; a factor of 0 leaves an example out, also one that is not finite.

        Source of the sum without a second backward: Bu et al. 2022, arXiv:2210.00038.
        """

        # A factor of 0 does not remove NaN: 0 * NaN is NaN.
        def cleaned(values: Tensor) -> Tensor:
            is_number = values.is_floating_point() or values.is_complex()
            return values.nan_to_num(0, 0, 0) if is_number and not all_finite else values

        if self.samples is not None:
            samples = cleaned(in_full(self.samples))
            # Σ_n f_n g_n, (n, ...) contracted over examples.
            return torch.einsum("n,n...->...", factors.to(samples.dtype), samples)
        # gᵢ is the sum of lₜrₜᵀ over the positions t of example i, so Σᵢ fᵢgᵢ is one product (fl)ᵀr over all positions
        sums = []
        for use in self.uses:
            left, right = map(cleaned, use.factors())
            weights = factors.to(right.dtype).view(-1, 1, 1)
            if left.is_floating_point() and left.shape[2] < right.shape[2]:
                left = left * weights
            else:
                right = right * weights
            left, right = left.flatten(0, 1), right.flatten(0, 1)
            # An embedding's gradient adds rows of δ at the looked-up places.
            if left.is_floating_point():
                sums.append((left.T @ right).view(use.shape))
            else:
                sums.append(right.new_zeros(use.shape).index_add_(0, left, right))
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def in_full(values: Tensor) -> Tensor:
    """Return values in float32 at least, in which norms and sums are exact enough for what is promised of them."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_each(name: str, examples: int, rows: object) -> None:
    """Refuse a parameter that has not one gradient from each example."""
    if rows != examples:
        raise TrainingError(
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
        self.force_functorch = functorch
        # By name: FSDP2 has other parameter objects in forward (gathered) than in backward.
        names = {value: name for name, value in model.named_parameters() if value.requires_grad}
        self._names = {
            module: {own: names[value] for own, value in module.named_parameters() if value in names}
            for module in self.iterate_submodules(model)
        }
        self.made: dict[str, list[ExampleGradients]] = {}
        """By parameter, one entry for each backward since they were taken."""
        self.ghosts: dict[str, bool] = {}
        """By parameter, whether its last norms were found without gradients of single examples."""
        self._ahead: Counter[str] = Counter()
        self._coarse: set[str] = set()
        self._samples: dict[str, Tensor] = {}
        self._uses: dict[str, list[Use]] = {}
        self._order: dict[nn.Module, Tensor] = {}
        self.is_checking = True
        """True if a part of autograd's own gradients is kept in `gradients`: until the first backward has been seen."""
        self.gradients: dict[str, Tensor] = {}
        self._kept: dict[str, Any] = {}
        prepared = {module: _by_example(module) for module in self._names if not self._has_rule(module)}
        super().__init__(model, loss_reduction="sum", strict=True, force_functorch=functorch)
        for module, function in prepared.items():
            vars(module)["ft_compute_sample_grad"] = function
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
            if not self._has_rule(module):
                return  # vmap differentiates it as a whole
        for child in module.children():
            yield from self.iterate_submodules(child)

    def _get_module_type(self, module: nn.Module) -> type[nn.Module]:
        return own_class(module)

    def _has_rule(self, module: nn.Module) -> bool:
        return not is_vmapped(module, self.force_functorch)

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep a layer's inputs in forward."""
        trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if not (self.hooks_enabled and trains and module.training and torch.is_grad_enabled()):
            return
        order = [self._order[module]] if module in self._order else []
        vars(module).setdefault("activations", []).append([value.detach() for value in inputs] + order)
        # How many backwards each parameter still expects: weight sharing gives several to one parameter.
        self._ahead.update(self._names[module].values())
        if self.is_checking:
            for own, parameter in module.named_parameters():
                name = self._names[module].get(own)
                if name is not None and name not in self._kept:
                    keep = functools.partial(self._keep_gradient, name)
                    self._kept[name] = parameter.register_hook(keep)  # type: ignore[no-untyped-call]

    def _keep_gradient(self, name: str, gradient: Tensor) -> None:
        # Before DDP and FSDP2 reduce it. Each process keeps other elements, so that this fits beside a sharded model.
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        self.gradients[name] = part_to_check(dense).clone()

    def end_checking(self) -> None:
        """Keep no more of autograd's gradients."""
        for handle in self._kept.values():
            handle.remove()
        self.is_checking, self.gradients, self._kept = False, {}, {}

    def _check_inputs(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        by_name = [
            name for name, value in named.items() if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        ]
        others = () if self._has_rule(module) else inputs[1:]
        if self.hooks_enabled and (by_name or others or not all(isinstance(value, Tensor) for value in inputs)):
            kinds = [*(type(value).__name__ for value in inputs), *by_name]
            self._refuse(module, f"input, by position, got ({', '.join(kinds)}) for {own_class(module).__name__}")

    def _refuse(self, module: nn.Module, rule: str) -> None:
        name = next(iter(self._names[module].values()))
        remedy = "freeze it, or put torch.nn.Linear layers in its place"
        raise TrainingError("dp", f"{name} must be of a layer with one tensor as {rule}", remedy)

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
        by_rule = self._has_rule(module)
        if not by_rule and (len(outputs) > 1 or outputs[0] is None):
            self._refuse(module, f"output, got {len(outputs)} from {kind.__name__}, which has no rule")
        # Opacus puts the batch first and undoes the loss's mean here.
        activations, backprops = self.rearrange_grad_samples(
            module=module, backprops=outputs[0].detach(), loss_reduction=loss_reduction, batch_first=batch_first
        )
        # Padding has no gradient, and Opacus' rule does not know of padding_idx.
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            backprops = backprops.masked_fill((activations[0] == module.padding_idx).unsqueeze(-1), 0)
        rows = vars(module)["max_batch_len"]
        if by_rule and _is_factored(module) and len(backprops) == rows:
            use = Use(module, activations[0], backprops)
            if "weight" in names:
                self._add_use(names["weight"], use)
            if "bias" in names:
                self._add(names["bias"], use.bias())
        else:
            rule = self.GRAD_SAMPLERS[kind] if by_rule else self._by_vmap
            now: dict[Tensor, str] = {value: names.get(own, "") for own, value in module.named_parameters()}
            for parameter, found in rule(module, activations, backprops).items():
                # Packed sequences: later steps have fewer examples; those that are over get a gradient of 0.
                if len(found) < rows:
                    found = torch.cat([found, found.new_zeros(rows - len(found), *found.shape[1:])])
                if len(activations) > 1 and kind is opacus("layers.dp_rnn").RNNLinear:
                    # torch sorted the sequence by length: back to the order of the batch.
                    found = found[activations[1]]
                if now.get(parameter):
                    self._add(now[parameter], found)
        # 16-bit outputs: the whole batch's gradient is rounded, which the later comparison must allow for.
        if torch.finfo(outputs[0].dtype).bits < 32:
            self._coarse.update(names.values())
        self._ahead.subtract(names.values())
        # All backwards of the parameter have come: its norm is known now.
        for name in names.values():
            if self._ahead[name] == 0 and (name in self._samples or name in self._uses):
                self.made.setdefault(name, []).append(self._keep(name))
        if not vars(module)["activations"]:
            del vars(module)["max_batch_len"]

    def _by_vmap(self, layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Tensor, Tensor]:
        parameters = list(layer.parameters())
        inputs = activations[0]
        if inputs.is_floating_point() and backprops.is_floating_point():
            inputs = inputs.to(backprops.dtype)
        found = layer.ft_compute_sample_grad([whole(value) for value in parameters], inputs, backprops)  # type: ignore[operator]
        return dict(zip(parameters, found, strict=True))

    def _add_use(self, name: str, use: Use) -> None:
        """Keep a layer's factors as long as they are smaller than the gradients of single examples."""
        uses = self._uses.setdefault(name, [])
        uses.append(use)
        check_each(name, len(uses[0].outputs), len(use.outputs))
        # The smaller is also the faster: T positions cost T²(out + in) for the norm, the gradients T·out·in.
        if name in self._samples or sum(each.size() for each in uses) >= len(use.outputs) * use.shape.numel():
            self._add(name)

    def _add(self, name: str, *samples: Tensor) -> None:
        for found in (*samples, *(use.samples() for use in self._uses.pop(name, ()))):
            before = self._samples.get(name)
            check_each(name, len(found if before is None else before), len(found))
            self._samples[name] = found if before is None else before + found

    def _keep(self, name: str) -> ExampleGradients:
        uses, samples = self._uses.pop(name, []), self._samples.pop(name, None)
        self.ghosts[name] = samples is None
        if samples is None:
            norms = ghost_squares(uses)
        else:  # a parameter may be a single number
            norms = in_full(samples).reshape(len(samples), samples.shape[1:].numel()).norm(dim=1)
        return ExampleGradients(norms, samples, uses, name in self._coarse)


def _is_factored(layer: nn.Module) -> bool:
    """Return True if the layer's weight has a gradient of factors; a convolution in groups has several."""
    return own_class(layer) in _FACTORED and getattr(layer, "groups", 1) == 1


def is_vmapped(layer: nn.Module, functorch: bool) -> bool:
    """Return True if no rule gives the gradients of a layer, so that vmap differentiates it as a whole.

    Rules of Opacus (1.6) pad with zeros whatever the layer pads with, know no norm without bias, and leave the
    imaginary part out.
    """
    has_rule = own_class(layer) in opacus("grad_sample").GradSampleHooks.GRAD_SAMPLERS
    return (
        functorch
        or not has_rule
        or (getattr(layer, "padding_mode", "zeros") != "zeros" and not _is_factored(layer))
        or (isinstance(layer, nn.LayerNorm) and layer.bias is None)
        or any(parameter.is_complex() for parameter in layer.parameters(recurse=False))
    )


def _by_example(layer: nn.Module) -> Callable[..., Any]:
    """Return the function of parameters, inputs and gradients of outputs that gives a layer's gradients by example."""
    functorch = opacus("grad_sample.functorch")
    if not any(parameter.is_complex() for parameter in layer.parameters()):
        functorch.prepare_layer(layer)
        return cast(Callable[..., Any], vars(layer)["ft_compute_sample_grad"])
    function, _ = functorch.make_functional(layer)

    def loss(parameters: Any, inputs: Tensor, outputs: Tensor) -> Tensor:
        # dL = Re(conj(g) dz) for a complex output z with gradient g
        return torch.real(function(parameters, inputs.unsqueeze(0)) * outputs.unsqueeze(0).conj()).sum()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))


def part_to_check(gradient: Tensor) -> Tensor:
    """Return the elements of a whole gradient that this process compares with autograd's."""
    return gradient.flatten()[rank() :: world_size()]


@functools.cache
def opacus_hooks() -> Any:
    """Return the class of the hooks; Opacus is imported by this call."""
    return type("OpacusLayerHooks", (LayerHooks, opacus("grad_sample").GradSampleHooks), {})


_NAMED = 3


def check_model(model: nn.Module, functorch: bool = False) -> None:
    """Refuse a model in which gradients of single examples do not exist, or cannot be had."""
    refuse_scripted(model, "dp")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MatchError("dp", "model must have a trainable parameter, got none", "unfreeze what is to be trained")
    validators = opacus("validators").ModuleValidator.VALIDATORS
    wrong: dict[str, list[str]] = {}  # a model often lacks one thing in all its layers
    for name, module in model.named_modules():
        kind = own_class(module).__name__
        reason = _reason(module, kind, validators.get(own_class(module)), is_vmapped(module, functorch))
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
    if trained and any(isinstance(value, Tensor) and value.grad_fn is not None for value in vars(module).values()):
        return (
            "computes a weight in a hook before its forward (torch.nn.utils.weight_norm), which vmap cannot follow; "
            "use torch.nn.utils.parametrizations.weight_norm, or leave it out"
        )
    if trained and parametrize.is_parametrized(module) and list(module.buffers()):
        return (
            "computes its weight with buffers, which vmap cannot follow (as spectral_norm does); train without, or "
            "call torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if trained and list(module.buffers()):
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
    """Hooks on a model's layers that keep the gradient of each example; the model's modules and keys stay its own."""

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
        first = inputs[0] if inputs and module.training and torch.is_grad_enabled() else None
        if isinstance(first, Tensor) and first.dim() > 1 and len(first) == 1:
            return (first.expand(self.rows_ahead(), *first.shape[1:]), *inputs[1:])
        return None

    @property
    def ghosts(self) -> Mapping[str, bool]:
        """By parameter, whether its last norms were found without gradients of single examples."""
        return cast(Mapping[str, bool], self._hooks.ghosts)

    def clipped_sums(self, scale: Tensor, max_norm: float) -> Iterator[tuple[str, Tensor]]:
        """Yield ``Σᵢ sᵢgᵢ · min(1, C / ‖sᵢgᵢ‖)`` of the last backward by parameter; forget its gradients.

        Of the first one it is checked that the sum of all gᵢ is the gradient that autograd found, on every process.

        Source: Abadi et al. 2016, arXiv:1607.00133, algorithm 1.
        """
        made = self._take()
        if self._hooks.is_checking:
            self._check_sums(made)
        for parameter in self._model.parameters():
            parameter.grad = None  # the sum of unclipped gradients has no use, and takes the memory of these sums
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
                check_each(name, self.num_examples, len(found[0].norms) if len(found) == 1 else "several")
                taken[name] = found[0]
            elif parameter.requires_grad and parameter.grad is not None:
                raise TrainingError(
                    "dp",
                    f"{name} must get its gradient through the forward of its own module, once, got one without",
                    "use layers as modules, and leave gradient checkpointing out",
                )
        self._hooks.made = {}
        ghosts = [found for found in taken.values() if found.samples is None]
        if ghosts:  # all roots at once: a kernel for each layer would take as long as its products
            roots = torch.stack([found.norms for found in ghosts]).clamp(min=0).sqrt()
            for found, root in zip(ghosts, roots, strict=True):
                found.norms = root
        return taken

    def _check_sums(self, made: Mapping[str, ExampleGradients]) -> None:
        # A layer whose rule does not fit shows here: the sum over examples must be the gradient that autograd found.
        known, found = {name: value for name, value in self._hooks.gradients.items() if name in made}, []
        for name, gradient in known.items():
            norms = made[name].norms
            total = part_to_check(made[name].weighted_sum(torch.ones_like(norms), all_finite=True))
            wide = torch.promote_types(total.dtype, torch.float64)
            found += [norms.double().sum(), (total.to(wide) - gradient).norm()]
        self._hooks.end_checking()
        read = read_together(found)
        sizes = dict(zip(known, read[::2], strict=True))
        wrong = ""
        for name, apart in zip(known, read[1::2], strict=True):
            # a gradient that is 0 but for rounding, as that of a key's bias in attention, agrees with nothing
            if apart > (0.05 if made[name].coarse else 1e-3) * sizes[name] and apart > 1e-4 * max(sizes.values()):
                wrong = wrong or f"{name}, got a difference of {apart / sizes[name]:.2g} of their size"
        # all raise it, or the others would wait for this one
        if wrong := next(filter(None, all_gather_object(wrong) if world_size() > 1 else [wrong]), ""):
            raise TrainingError(
                "dp",
                f"gradients of single examples must sum to the gradient of {wrong}",
                "its layer has no rule that fits how it is used; try grad_sample_mode functorch, or freeze it",
            )

    def remove(self) -> None:
        """Leave the model without hooks and without anything kept on modules and parameters."""
        self._hooks.end_checking()
        self._hooks.cleanup()
        for hook in self._expanding:
            hook.remove()
        for module in self._in_place:
            vars(module)["inplace"] = True
        for module in self._model.modules():
            for left in ("activations", "max_batch_len"):
                vars(module).pop(left, None)


def clip_factors(norms: Tensor, scale: Tensor, max_norm: float) -> Tensor:
    """Return ``sᵢ · min(1, C / ‖sᵢgᵢ‖)``, 0 for an example whose gradient is not finite."""
    norms = norms * scale.abs()
    # min(1, C / ‖g‖) with ‖g‖ in the scaled units: the loss's factor is divided out by `scale`.
    clipped = scale * (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    # An example that is not finite is left out: clipping cannot bound it.
    return clipped.where(norms.isfinite(), 0)
