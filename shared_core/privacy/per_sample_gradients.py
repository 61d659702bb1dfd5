"""Gradients of single examples with Opacus' hooks on the user's own modules, and their clipped sum."""

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
from shared_core.modules.calls import RunHook
from shared_core.modules.matching import own_class
from shared_core.numerics.deferred_checks import read_together
from shared_core.privacy.accountant import opacus

_FACTORED = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
"""Layers whose weight gradient per example is ``Σₜ lₜrₜᵀ`` over positions, so that no matrix per example is needed."""

_GRAM_ELEMENTS = 1 << 24


@dataclass
class Use:
    """One pass of a batch through a layer of `FACTORED`."""

    layer: nn.Module
    inputs: Tensor
    outputs: Tensor
    """Gradient of the outputs."""

    @property
    def shape(self) -> torch.Size:
        """Full shape of the weight, also if it is sharded."""
        return cast(Tensor, self.layer.weight).shape

    def size(self) -> int:
        """Return the number of elements in all factors."""
        rows, columns = self.shape[0], self.shape[1:].numel()
        if isinstance(self.layer, nn.Embedding):
            return self.inputs.numel() * (1 + columns)
        return self.outputs.numel() // rows * (rows + columns)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return l, (examples, positions, out) or for lookups the row numbers (examples, positions), and r, (…, in)."""
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

    A bound on the rounding error is added, because positions may cancel and a norm that is too small would break the
    bound on an example.

    Source: Li et al. 2021, arXiv:2110.05679, section 4.
    """
    kinds: dict[bool, list[tuple[Tensor, Tensor]]] = {}
    for left, right in (use.factors() for use in uses):
        kinds.setdefault(left.is_floating_point(), []).append((left, right))
    # One group of dense l and one of lookups: a weight may be shared by an embedding and a head.
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
    """Return the products of rows; looked-up row numbers stand for rows of the unit matrix."""
    if left.is_floating_point() and other.is_floating_point():
        return left @ other.mT
    if left.is_floating_point():
        return left.gather(2, other.unsqueeze(1).expand(-1, left.shape[1], -1))
    return _gram(other, left).mT if other.is_floating_point() else left.unsqueeze(2) == other.unsqueeze(1)


@dataclass
class ExampleGradients:
    """One parameter's gradients in one backward, one row per example, or the inputs to compute them from."""

    norms: Tensor
    """(examples,), float32 or float64. Until the backward ends, squared if `samples` is None."""
    samples: Tensor | None
    """(examples, ...); None if the layers' inputs and output gradients are kept instead because they are smaller."""
    uses: list[Use] = field(default_factory=list)
    coarse: bool = False
    """True if the backward ran in 16 bits, as under autocast, so that the whole batch's gradient is rounded."""

    def weighted_sum(self, factors: Tensor, all_finite: bool) -> Tensor:
        """Return ``Σᵢ fᵢgᵢ``. A factor of 0 excludes an example, even if its gradient is not finite.

        Source of the sum without a second backward: Bu et al. 2022, arXiv:2210.00038.
        """

        # 0 * NaN is NaN, so a factor of 0 alone does not remove NaN.
        def cleaned(values: Tensor) -> Tensor:
            is_number = values.is_floating_point() or values.is_complex()
            return values.nan_to_num(0, 0, 0) if is_number and not all_finite else values

        if self.samples is not None:
            samples = cleaned(in_full(self.samples))
            # Σ_n f_n g_n, (n, ...) contracted over examples.
            return torch.einsum("n,n...->...", factors.to(samples.dtype), samples)
        # gᵢ sums lₜrₜᵀ over the positions t of example i, so Σᵢ fᵢgᵢ is one product (fl)ᵀr over all positions.
        sums = []
        for use in self.uses:
            left, right = map(cleaned, use.factors())
            weights = factors.to(right.dtype).view(-1, 1, 1)
            if left.is_floating_point() and left.shape[2] < right.shape[2]:
                left = left * weights
            else:
                right = right * weights
            left, right = left.flatten(0, 1), right.flatten(0, 1)
            # An embedding's gradient adds δ to the looked-up rows.
            if left.is_floating_point():
                sums.append((left.T @ right).view(use.shape))
            else:
                sums.append(right.new_zeros(use.shape).index_add_(0, left, right))
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def in_full(values: Tensor) -> Tensor:
    """Return values in float32 or wider, so that norms and sums are precise enough for the guarantee."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_each(name: str, examples: int, rows: object) -> None:
    """Raise if a parameter does not have one gradient per example."""
    if rows != examples:
        raise TrainingError(
            "dp",
            f"{name} must get a gradient from each of the {examples} examples, got {rows}",
            "every layer's input must have the batch in its first dimension, one row per example, and every batch must "
            "give a loss",
        )


_GradSampleHooks: Any = object  # importing Opacus takes seconds, so it is imported on use


class LayerHooks(_GradSampleHooks):  # type: ignore[misc]
    """Opacus' hooks, storing gradients by name because FSDP2 uses different parameter objects in forward and backward.

    If a module lists an inner layer's parameter as its own (BERT's head does), the hooks go on the inner layer. The
    class that `opacus_hooks` returns also derives from Opacus' own hooks.
    """

    def __init__(self, model: nn.Module, functorch: bool) -> None:
        self.force_functorch = functorch
        # By name, because FSDP2 uses different parameter objects in forward (gathered) and backward.
        names = {value: name for name, value in model.named_parameters() if value.requires_grad}
        self._names = {
            module: {own: names[value] for own, value in module.named_parameters() if value in names}
            for module in self.iterate_submodules(model)
        }
        self.made: dict[str, list[ExampleGradients]] = {}
        """Per parameter, one entry for each backward since the last read."""
        self.ghosts: dict[str, bool] = {}
        """Per parameter, True if its last norms were computed without gradients of single examples."""
        self._ahead: Counter[str] = Counter()
        self._coarse: set[str] = set()
        self._samples: dict[str, Tensor] = {}
        self._uses: dict[str, list[Use]] = {}
        self._order: dict[nn.Module, Tensor] = {}
        self.is_checking = True
        """True until the first backward ends: `gradients` keeps a part of autograd's own gradients for a check."""
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
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
                for number, hook in hooks.items():
                    if getattr(getattr(hook, "func", hook), "__self__", None) is self:
                        hooks[number] = RunHook(hook)

    def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules that own trained parameters, except those that list parameters of an inner layer."""
        own = {parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad}
        inner = {parameter for child in module.children() for parameter in child.parameters()}
        listed = bool(own) and own <= inner
        # A container that lists its child's parameters would count them twice.
        if own and not listed:
            yield module
            if not self._has_rule(module):
                return  # vmap differentiates the whole module
        for child in module.children():
            yield from self.iterate_submodules(child)

    def _get_module_type(self, module: nn.Module) -> type[nn.Module]:
        return own_class(module)

    def _has_rule(self, module: nn.Module) -> bool:
        return not is_vmapped(module, self.force_functorch)

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Store a layer's inputs in forward."""
        trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if not (self.hooks_enabled and trains and module.training and torch.is_grad_enabled()):
            return
        order = [self._order[module]] if module in self._order else []
        vars(module).setdefault("activations", []).append([value.detach() for value in inputs] + order)
        # Count the backwards that each parameter still expects: a shared weight has several.
        self._ahead.update(self._names[module].values())
        if self.is_checking:
            for own, parameter in module.named_parameters():
                name = self._names[module].get(own)
                if name is not None and name not in self._kept:
                    keep = functools.partial(self._keep_gradient, name)
                    self._kept[name] = parameter.register_hook(keep)  # type: ignore[no-untyped-call]

    def _keep_gradient(self, name: str, gradient: Tensor) -> None:
        # Before DDP and FSDP2 reduce it. Each process keeps different elements, to fit next to a sharded model.
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        self.gradients[name] = part_to_check(dense).clone()

    def end_checking(self) -> None:
        """Stop keeping autograd's gradients."""
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
            self._refuse(module, f"positional input, got ({', '.join(kinds)}) for {own_class(module).__name__}")

    def _refuse(self, module: nn.Module, rule: str) -> None:
        name = next(iter(self._names[module].values()))
        remedy = "freeze it, or replace it by torch.nn.Linear layers"
        raise TrainingError("dp", f"{name} must belong to a layer with one tensor as {rule}", remedy)

    def _keep_order(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Store the original order of a packed sequence's rows, which torch sorts by length."""
        for layer in module.modules():
            self._order.pop(layer, None)
            if isinstance(inputs[0], PackedSequence) and inputs[0].unsorted_indices is not None:
                self._order[layer] = inputs[0].unsorted_indices

    def capture_backprops_hook(
        self, module: nn.Module, inputs: Any, outputs: Any, loss_reduction: str, batch_first: bool
    ) -> None:
        """Compute the gradients of single examples from a layer's inputs and output gradients."""
        if not self.hooks_enabled:
            return
        kind, names = own_class(module), self._names[module]
        by_rule = self._has_rule(module)
        if not by_rule and (len(outputs) > 1 or outputs[0] is None):
            self._refuse(module, f"output, got {len(outputs)} from {kind.__name__}, which has no rule")
        # Opacus moves the batch first and undoes the loss's mean here.
        activations, backprops = self.rearrange_grad_samples(
            module=module, backprops=outputs[0].detach(), loss_reduction=loss_reduction, batch_first=batch_first
        )
        # Padding has no gradient, but Opacus' rule ignores padding_idx.
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
                # Packed sequences: later steps have fewer examples. Finished ones get a gradient of 0.
                if len(found) < rows:
                    found = torch.cat([found, found.new_zeros(rows - len(found), *found.shape[1:])])
                if len(activations) > 1 and kind is opacus("layers.dp_rnn").RNNLinear:
                    # torch sorted the sequence by length: restore the order of the batch.
                    found = found[activations[1]]
                if now.get(parameter):
                    self._add(now[parameter], found)
        # With 16-bit outputs the whole batch's gradient is rounded; the later comparison must allow for this.
        if torch.finfo(outputs[0].dtype).bits < 32:
            self._coarse.update(names.values())
        self._ahead.subtract(names.values())
        # All backwards of the parameter are done, so its norm is known.
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
        """Store a layer's factors if they are smaller than the gradients of single examples."""
        uses = self._uses.setdefault(name, [])
        uses.append(use)
        check_each(name, len(uses[0].outputs), len(use.outputs))
        # The smaller is also faster: for T positions the norm costs T²(out + in), the gradients cost T·out·in.
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
    """Return True if the layer's weight gradient is a sum of factors; not for grouped convolutions."""
    return own_class(layer) in _FACTORED and getattr(layer, "groups", 1) == 1


def is_vmapped(layer: nn.Module, functorch: bool) -> bool:
    """Return True if no rule covers a layer, so that vmap must differentiate it.

    The rules of Opacus (1.6) assume zero padding, do not support norms without bias, and drop imaginary parts.
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
    """Return a function that maps parameters, inputs and output gradients to a layer's gradients per example."""
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
    """Import Opacus and return the class of the hooks."""
    return type("OpacusLayerHooks", (LayerHooks, opacus("grad_sample").GradSampleHooks), {})


_NAMED = 3


def check_model(model: nn.Module, functorch: bool = False) -> None:
    """Raise if gradients of single examples do not exist in this model, or cannot be computed."""
    refuse_scripted(model, "dp")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MatchError("dp", "model must have a trainable parameter, got none", "unfreeze the weights to train")
    validators = opacus("validators").ModuleValidator.VALIDATORS
    wrong: dict[str, list[str]] = {}  # often all layers have the same problem
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
        rule = ". ".join(f"{names[0]} {reason}{_likewise(names[1:])}" for reason, names in wrong.items())
        raise CompatibilityError("dp", f"model must give a gradient for each example, but {rule}")


def _reason(module: nn.Module, kind: str, validator: Callable[..., Any] | None, is_vmapped: bool) -> str:
    """Return why a module gives no gradients of single examples, or an empty text."""
    trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    if isinstance(module, _BatchNorm):
        return (
            "normalizes each example with others of its batch; replace it by torch.nn.GroupNorm, or convert the "
            "model with opacus.validators.ModuleValidator.fix"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (reason := _embedding_reason(module, is_vmapped)):
        return reason
    if trained and isinstance(module, nn.RNN | nn.RNNCellBase):
        return f"has no rule; replace it by opacus.layers.dp_rnn.DP{kind}"
    if trained and validator is not None and validator(module):
        return "has no rule; opacus.validators.ModuleValidator.fix replaces it by Opacus' own"
    if trained and any(isinstance(value, Tensor) and value.grad_fn is not None for value in vars(module).values()):
        return (
            "computes a weight in a hook before its forward (torch.nn.utils.weight_norm), which vmap cannot follow; "
            "use torch.nn.utils.parametrizations.weight_norm, or leave it out"
        )
    if trained and parametrize.is_parametrized(module) and list(module.buffers()):
        return (
            "computes its weight from buffers (as spectral_norm does), which vmap cannot follow; train without it, or "
            "call torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if trained and list(module.buffers()):
        return (
            "has trained weights and buffers. Opacus accepts no buffers, not even constants (position_ids), as they "
            "may hold data without noise; freeze or replace it"
        )
    if trained and type(module) is not own_class(module) and is_vmapped:
        return (
            "is sharded on its own, but vmap needs a copy of it, which FSDP2 does not allow; shard the block that "
            "contains it, or leave sharding to strategy eff_fsdp"
        )
    if trained and is_vmapped and len(inputs := _inputs(module)) > 1:
        return (
            f"has no rule, and vmap supports only layers with one input, got {', '.join(inputs)}; freeze it, or use a "
            "model without such layers (for example without stacked experts)"
        )
    if getattr(module, "_compiled_call_impl", None) is not None or kind == "OptimizedModule":
        return "is compiled, so hooks of single layers do not run; do not use torch.compile"
    return ""


def _embedding_reason(module: nn.Embedding | nn.EmbeddingBag, is_vmapped: bool) -> str:
    if module.max_norm is not None:
        return "shrinks the rows that it looks up (max_norm), which reveals examples without noise; remove max_norm"
    if not module.weight.requires_grad:
        return ""
    if module.scale_grad_by_freq:
        return (
            "divides gradients by how often the whole batch looks up a row (scale_grad_by_freq), so one example "
            "changes the weight of others; remove it"
        )
    if isinstance(module, nn.EmbeddingBag):
        return "has no rule for repeated rows; replace it by torch.nn.Embedding and a sum or mean"
    if module.sparse and is_vmapped:
        return "has sparse gradients, which vmap does not support; set sparse=False, as every row gets noise"
    return ""


def _inputs(module: nn.Module) -> list[str]:
    """Return the required arguments of a layer's forward."""
    arguments = inspect.signature(module.forward).parameters.values()
    in_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in arguments if each.kind in in_place and each.default is each.empty]


def _likewise(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" (also {', '.join(names[:_NAMED])}{more})"


class PerSample:
    """Hooks on a model's layers that record each example's gradient, without changing its modules and keys."""

    def __init__(self, model: nn.Module, functorch: bool) -> None:
        self._model = model
        self.num_examples = 0
        """Rows of the micro-batch whose backward comes next."""
        self.rows_ahead: Callable[[], int] = lambda: self.num_examples
        """Rows of the micro-batch whose forward is running."""
        self._in_place = [module for module in model.modules() if getattr(module, "inplace", False) is True]
        for module in self._in_place:
            vars(module)["inplace"] = False  # torch refuses to change the output of a module with a full backward hook
        # The first layer's input needs no gradient, so this warning does not apply.
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
        self._hooks = opacus_hooks()(model, functorch)
        self._expanding = [  # only now: vmap copies layers together with their hooks
            module.register_forward_pre_hook(RunHook(self._expand))
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        ]

    def _expand(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        # transformers looks up positions once for the whole batch: (1, length)
        first = inputs[0] if inputs and module.training and torch.is_grad_enabled() else None
        if isinstance(first, Tensor) and first.dim() > 1 and len(first) == 1:
            return (first.expand(self.rows_ahead(), *first.shape[1:]), *inputs[1:])
        return None

    @property
    def ghosts(self) -> Mapping[str, bool]:
        """Per parameter, True if its last norms were computed without gradients of single examples."""
        return cast(Mapping[str, bool], self._hooks.ghosts)

    def clipped_sums(self, scale: Tensor, max_norm: float) -> Iterator[tuple[str, Tensor]]:
        """Yield ``Σᵢ sᵢgᵢ · min(1, C / ‖sᵢgᵢ‖)`` of the last backward per parameter, and forget its gradients.

        After the first backward, every process checks that the sum of all gᵢ equals autograd's gradient.

        Source: Abadi et al. 2016, arXiv:1607.00133, algorithm 1.
        """
        made = self._take()
        if self._hooks.is_checking:
            self._check_sums(made)
        for parameter in self._model.parameters():
            parameter.grad = None  # frees the sum of unclipped gradients, which is not needed
        if made:
            # An example's norm covers all parameters: the norm of the parameters' norms.
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
                    f"{name} must get its gradient through exactly one forward of its own module, got another gradient",
                    "call layers as modules, and do not use gradient checkpointing",
                )
        self._hooks.made = {}
        ghosts = [found for found in taken.values() if found.samples is None]
        if ghosts:  # all roots at once: one kernel per layer would be slow
            roots = torch.stack([found.norms for found in ghosts]).clamp(min=0).sqrt()
            for found, root in zip(ghosts, roots, strict=True):
                found.norms = root
        return taken

    def _check_sums(self, made: Mapping[str, ExampleGradients]) -> None:
        # This detects layers with a wrong rule: the sum over examples must equal autograd's gradient.
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
            # Skip gradients that are 0 up to rounding, such as a key's bias in attention: they never agree.
            if apart > (0.05 if made[name].coarse else 1e-3) * sizes[name] and apart > 1e-4 * max(sizes.values()):
                wrong = wrong or f"{name}, got a relative difference of {apart / sizes[name]:.2g}"
        # All processes raise together, or the others would wait for this one.
        if wrong := next(filter(None, all_gather_object(wrong) if world_size() > 1 else [wrong]), ""):
            raise TrainingError(
                "dp",
                f"gradients of single examples must sum to the gradient of {wrong}",
                "no rule fits the way this layer is used; try grad_sample_mode functorch, or freeze it",
            )

    def remove(self) -> None:
        """Remove all hooks and stored values from modules and parameters."""
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
    # min(1, C / ‖g‖) with ‖g‖ in scaled units: `scale` divides out the loss's factor.
    clipped = scale * (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    # Clipping cannot bound a gradient that is not finite, so such an example is left out.
    return clipped.where(norms.isfinite(), 0)
