"""Gradients of single examples, by Opacus' hooks on the user's own modules, and their clipped sum."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared_core.errors import CompatibilityError, MatchError, TrainingError
from shared_core.module_match import own_class
from shared_core.privacy.accountant import opacus
from shared_core.privacy.layer_hooks import ExampleGradients, layer_hooks, not_each
from shared_core.sharded import shards, whole

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
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MatchError("dp: model must have a trainable parameter, got none; unfreeze what is to be trained")
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
        raise CompatibilityError(f"dp: model must give a gradient for each example, but {told}")


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
        self._hooks = layer_hooks()(model, functorch)
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
                    f"dp: {name} must get its gradient through the forward of its own module, once, got one without; "
                    "use layers as modules, and leave gradient checkpointing out"
                )
        self._hooks.made = {}
        return taken

    def _check_sums(self, made: Mapping[str, ExampleGradients]) -> None:
        known = {name: value for name, value in self._model.named_parameters() if value.grad is not None}
        sizes = {name: float(made[name].norms.double().sum()) for name in known}
        for name, parameter in known.items():
            gradient, norms = whole(cast(Tensor, parameter.grad)), made[name].norms
            total = made[name].weighted_sum(torch.ones_like(norms), all_finite=True)
            apart = float((total.double() - gradient).norm())
            # a gradient that is 0 but for rounding, as that of a key's bias in attention, agrees with nothing
            if apart > (0.05 if made[name].coarse else 1e-3) * sizes[name] and apart > 1e-4 * max(sizes.values()):
                raise TrainingError(
                    f"dp: gradients of single examples must sum to the gradient of {name}, got a difference of "
                    f"{apart / sizes[name]:.2g} of their size; its layer has no rule that fits how it is used"
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
    clipped = scale * (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    return clipped.where(norms.isfinite(), 0)
