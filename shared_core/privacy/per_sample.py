"""Gradients of single examples, by Opacus' hooks on the user's own modules, and their clipped sum."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared_core.errors import CompatibilityError, MatchError, TrainingError
from shared_core.privacy.accountant import opacus


def check_model(model: nn.Module) -> None:
    """Refuse a model in which gradients of single examples do not exist, or cannot be had.

    Raises:
        CompatibilityError: Naming every such module and what to put in its place.
        MatchError: If nothing is trained.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MatchError("dp: model must have a trainable parameter, got none; unfreeze what is to be trained")
    validators = opacus("validators").ModuleValidator.VALIDATORS
    wrong = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if isinstance(module, _BatchNorm):
            wrong.append(
                f"{name} ({kind}) normalises an example by the others of its batch; put "
                f"torch.nn.GroupNorm(num_groups, {module.num_features}) in its place, or convert the model with "
                "opacus.validators.ModuleValidator.fix"
            )
        elif trained and validators.get(type(module), lambda module: [])(module):
            wrong.append(
                f"{name} ({kind}) has no rule; opacus.validators.ModuleValidator.fix puts Opacus' own in its place"
            )
        elif trained and list(module.buffers(recurse=False)):
            wrong.append(
                f"{name} ({kind}) trains beside buffers, which hold what it saw without noise; freeze or replace it"
            )
        elif getattr(module, "_compiled_call_impl", None) is not None or kind == "OptimizedModule":
            wrong.append(f"{name} ({kind}) is compiled, and hooks of single layers do not run; leave torch.compile out")
    wrong += [
        f"{name} is {parameter.dtype}, which would round the noise; load the model in float32"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and torch.finfo(parameter.dtype).bits < 32
    ]
    if wrong:
        raise CompatibilityError("dp: model must give a gradient for each example, but\n" + "\n".join(wrong))


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
        self._expanding = [
            module.register_forward_pre_hook(self._expand)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        ]
        # the first layer's input needs no gradient, which is as it should be
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
        self._hooks = _hooks_class()(model, loss_reduction="sum", strict=True, force_functorch=functorch)

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

    def take(self, check_sum: bool = False) -> dict[str, Tensor]:
        """Return the gradients of the last backward by parameter, (examples, ...), and forget them.

        Args:
            check_sum: Whether ``.grad`` holds this backward alone and should be the sum of what is returned.

        Raises:
            TrainingError: Naming a parameter of which an example's gradient is not known.
        """
        taken = {}
        for name, parameter in self._model.named_parameters():
            found = getattr(parameter, "grad_sample", None)
            if found is not None:
                parameter.grad_sample = None  # type: ignore[attr-defined]
                if not isinstance(found, Tensor) or len(found) != self.num_examples:
                    rows = len(found) if isinstance(found, Tensor) else "several"
                    raise TrainingError(
                        f"dp: {name} must get a gradient from each of the {self.num_examples} examples, got {rows}; "
                        "every layer's input must have the batch in its first dimension, one row an example, and "
                        "every batch must give a loss"
                    )
                taken[name] = found.detach()
            elif parameter.requires_grad and parameter.grad is not None:
                raise TrainingError(
                    f"dp: {name} must get its gradient through the forward of its own module, once, got one without; "
                    "use layers as modules, and leave gradient checkpointing out"
                )
        if check_sum:
            self._check_sums(taken)
        return taken

    def _check_sums(self, taken: Mapping[str, Tensor]) -> None:
        whole = {name: value.grad for name, value in self._model.named_parameters() if value.grad is not None}
        sizes = {name: float(taken[name].double().flatten(1).norm(dim=1).sum()) for name in whole}
        for name, gradient in whole.items():
            apart = float((taken[name].sum(0, dtype=torch.float64) - gradient).norm())
            coarse = min(torch.finfo(taken[name].dtype).bits, torch.finfo(gradient.dtype).bits) < 32
            # a gradient that is 0 but for rounding, as that of a key's bias in attention, agrees with nothing
            if apart > (0.05 if coarse else 1e-3) * sizes[name] and apart > 1e-4 * max(sizes.values()):
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


@functools.cache
def _hooks_class() -> Any:
    class Hooks(opacus("grad_sample").GradSampleHooks):  # type: ignore[misc]
        """Opacus' hooks, on the layers of a module that lists a layer's parameter as its own, as BERT's head does."""

        def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
            own = {parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad}
            inner = {parameter for child in module.children() for parameter in child.parameters()}
            if own and own <= inner:
                for child in module.children():
                    yield from self.iterate_submodules(child)
            else:
                yield from super().iterate_submodules(module)

    return Hooks


def clipped_sum(samples: Mapping[str, Tensor], scale: Tensor, max_norm: float) -> dict[str, Tensor]:
    """Return ``Σᵢ sᵢgᵢ · min(1, C / ‖sᵢgᵢ‖)`` by parameter; an example whose gradient is not finite counts as 0.

    Args:
        samples: gᵢ by parameter, (examples, ...), of any float dtype.
        scale: sᵢ, (examples,), which makes of gᵢ the gradient of the example's own loss.
        max_norm: C, above 0; norms are over all parameters together.

    Source: Abadi et al. 2016, arXiv:1607.00133, algorithm 1.

    Example:
        >>> clipped_sum({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, torch.ones(2), 1.0)["w"]
        tensor([0.9000, 1.2000])
    """
    full = {name: value if value.dtype == torch.float64 else value.float() for name, value in samples.items()}
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in full.values()]).norm(dim=0) * scale.abs()
    finite = norms.isfinite()
    factors = (scale * (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)).where(finite, 0)
    everything = bool(finite.all())
    return {
        name: torch.einsum("n,n...->...", factors.to(value.dtype), value if everything else value.nan_to_num(0, 0, 0))
        for name, value in full.items()
    }
