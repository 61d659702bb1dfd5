"""Trainers of other libraries.

TRL's trainers multiply by the output layer's weight outside its forward. SetFit trains its body with a Trainer of its
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_eff._adapters import Adapter
from hf_eff._run_environment import is_peft
from shared_core.errors import CompatibilityError

if TYPE_CHECKING:
    from transformers import Trainer

_FUSED = "fused_lm_head"


class QuantizedHead(Adapter):
    """Gives such a trainer the quantized input and weight of a fake-quantized output layer."""

    key = "qat"

    def around(self) -> dict[str, Callable[..., Any]]:
        """Provide the operands in every training and validation of the run."""
        around: dict[str, Callable[..., Any]] = {"_inner_training_loop": self._train}
        if loss_of_trl(self._trainer) == "DistillationTrainer":
            around["_compute_loss"] = self._compute_loss
        return around

    def _train(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as hooks:
            if loss_of_trl(self._trainer) is not None:
                self._operands = _Operands(self._trainer.model, hooks)
            return method(*args, **kwargs)

    def _compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._operands.served():
            return method(*args, **kwargs)


class Fp8Head(Adapter):
    """Raises an error for an output layer in FP8, which such a trainer would bypass."""

    key = "fp8"

    def begin(self, loader: Any) -> None:
        """Check it after the layers are changed."""
        _check_head(self, "shared_core.fp8.")


class LoraHead(Adapter):
    """Raises an error for an adapter on an output layer, which such a trainer would never train."""

    key = "lora"

    def begin(self, loader: Any) -> None:
        """Check it after the layers are changed."""
        _check_head(self, "peft.")


def _check_head(adapter: Adapter, library: str) -> None:
    owner = loss_of_trl(adapter._trainer)
    if owner in (None, "GKDTrainer", "RewardTrainer"):
        return
    if type(base_of(adapter._trainer.model).get_output_embeddings()).__module__.startswith(library):
        raise CompatibilityError(
            adapter.key,
            f"include must leave out the output layer with TRL's {owner}, which multiplies by its weight directly, got "
            "the output layer too",
            "name the other layers",
        )


class _Operands:
    """Puts them where the trainer reads: in the backbone's output, and in the result of `get_output_embeddings`."""

    def __init__(self, model: Any, hooks: contextlib.ExitStack) -> None:
        self._model, self._forward = base_of(model), contextlib.ExitStack()
        self._serves = False
        handles = (
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.base_model.register_forward_hook(self._quantize),
            model.register_forward_hook(self._end, always_call=True),
        )
        for handle in handles:
            hooks.callback(handle.remove)

    def __getstate__(self) -> dict[str, Any]:
        return {"_serves": False, "_forward": None, "_model": None}  # a copy of the model is not being trained

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Provide them in forwards of the backbone inside this context."""
        from shared_core.quantization.fake_quant_layers import is_quantized  # imports all of quantization

        self._serves = self._model is not None and is_quantized(self._model.get_output_embeddings())
        try:
            yield
        finally:
            if self._serves:
                vars(self._model).pop("get_output_embeddings", None)
            self._serves = False

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get(_FUSED) and self._forward is not None:
            self._forward.enter_context(self.served())

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._forward is not None:
            self._forward.close()

    def _quantize(self, backbone: nn.Module, args: Any, output: Any) -> Any:
        if not self._serves:
            return None
        vars(self._model).pop("get_output_embeddings", None)
        head = self._model.get_output_embeddings()
        hidden = head.quantizer.input(head, output.last_hidden_state)
        weight = head.quantizer.weight(head, head.weight)
        self._model.get_output_embeddings = lambda: SimpleNamespace(weight=weight, bias=head.bias)
        return type(output)(**{**output, "last_hidden_state": hidden})


def base_of(model: Any) -> Any:
    """Return the transformers model inside PEFT's wrapper."""
    return model.get_base_model() if is_peft(model) else model


def loss_of_trl(trainer: Trainer) -> str | None:
    """Return the TRL class that computes a trainer's loss, None if there is none."""
    kinds = [cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls)]
    return next((cls.__name__ for cls in kinds if cls.__module__.startswith("trl.")), None)


def fuses_head(trainer: Trainer) -> bool:
    """Return True if the trainer gets log-probabilities from the model: TRL replaces the instance's forward."""
    forward = getattr(base_of(trainer.model), "forward", None)
    while forward is not None:  # accelerate wraps it
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None and _FUSED in code.co_varnames:
            smooths = trainer.label_smoother is not None and getattr(trainer.args, "loss_type", "nll") == "nll"
            return not smooths and trainer.compute_loss_func is None
        forward = getattr(forward, "__wrapped__", None)
    return False


class SetFit(Adapter):
    """Finds the inner Trainer, and raises an error for settings that would undo the techniques."""

    @staticmethod
    def trainer_in(trainer: Any) -> Any:
        """Return ``st_trainer``: SetFit's own class is not a transformers Trainer."""
        return getattr(trainer, "st_trainer", trainer)

    def check(self) -> None:
        """Refuse `end_to_end`."""
        if getattr(getattr(self._trainer, "setfit_args", None), "end_to_end", False):
            raise CompatibilityError(
                "hf",
                "SetFit's end_to_end must be False, got True: it continues to train the sentence model after its "
                "trainer has ended, which undoes the techniques' changes to the weights",
                "train only the head",
            )
