"""Differences of the Trainers of transformers 4.57 to 5.5 from later ones; no other file handles them.

Up to 5.2 the loop is one method, which clips by itself and keeps the sum of losses to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from packaging.version import Version
from torch import Tensor
from transformers import Trainer

from shared_core.front_ends.wrapped_method import Wrapped


def second_division(trainer: Trainer) -> str | None:
    """Return what to tell of a Trainer that divides gradients of micro-batches by their number once more; else None.

    That of transformers 5.2 to 5.5.3 hands the number to accelerate, whose ``backward`` divides by it too.
    """
    accelerator = trainer.accelerator
    number = accelerator.gradient_accumulation_steps
    if number == 1 or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return None
    return (
        f"this version of transformers divides gradients once more by its {number} micro-batches, with techniques or "
        "without: 5.5.4 and later do not"
    )


class OlderLoop:
    """Gives a Trainer ``_clip_grad_norm``, ``_get_grad_norm`` and ``_tr_loss`` with their meaning in later versions."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._clip: Callable[..., Any] = trainer.accelerator.clip_grad_norm_  # to the norm that the loop asked for
        self._in_training_step = self._has_clipped = False
        self._checkpoint: Any = None
        vars(trainer).update(_clip_grad_norm=self._clip_grad_norm, _get_grad_norm=self._get_grad_norm)
        self._start_sum()

    @classmethod
    def of(cls, trainer: Trainer) -> OlderLoop | None:
        """Return it for a trainer that needs it, None for one of a later version."""
        return cls(trainer) if Version(transformers.__version__) < Version("5.3") else None

    def watch(self) -> list[Wrapped]:
        """Return what notes the events of the loop; outside all other wrappers, which may hold an event back."""
        handler = self._trainer.callback_handler
        return [
            Wrapped(self._trainer, "_inner_training_loop", self._inner_training_loop, keep_signature=True),
            Wrapped(self._trainer, "training_step", self._training_step, keep_signature=True),
            Wrapped(self._trainer, "_maybe_log_save_evaluate", self._log_save_evaluate, keep_signature=True),
            Wrapped(handler, "on_train_begin", self._on_train_begin),
            Wrapped(handler, "on_pre_optimizer_step", self._on_pre_optimizer_step),
        ]

    def watch_accelerator(self) -> Wrapped:
        """Return what sends the loop's clipping through ``_clip_grad_norm``; each accelerator needs it."""
        return Wrapped(self._trainer.accelerator, "clip_grad_norm_", self._on_clip)

    # --- clipping

    def _on_clip(self, method: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_training_step:
            return method(parameters, *args, **kwargs)  # by the user, of gradients that are not complete
        self._clip, self._has_clipped = lambda other: method(other, *args, **kwargs), True
        return self._trainer._clip_grad_norm(self._trainer.model_wrapped)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._clip(model.parameters())

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return grad_norm  # those versions log none where they do not clip

    def _on_pre_optimizer_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._has_clipped:
            self._trainer._get_grad_norm(self._trainer.model_wrapped)
        self._has_clipped = False
        return method(*args, **kwargs)

    # --- the sum of losses since the last log, a variable of the loop

    def _start_sum(self) -> None:
        # Whoever resumes a run puts another tensor there: one that the loop's own sum is yet to begin from.
        self._trainer._tr_loss = self._loops_sum = torch.zeros((), device=self._trainer.args.device)

    def _inner_training_loop(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start_sum()
        self._checkpoint = kwargs.get("resume_from_checkpoint")
        return method(*args, **kwargs)

    def _on_train_begin(self, method: Callable[..., Any], args: Any, state: Any, *rest: Any) -> Any:
        control = method(args, state, *rest)
        if state.epoch >= state.num_train_epochs:
            # The loop is passed over and adds nothing: what was taken off for its sum is put back.
            self._trainer._total_loss_scalar += self._trainer._tr_loss.item()
            self._start_sum()
        return control

    @property
    def _is_resumed(self) -> bool:
        """True until the loop's sum includes the sum of the run that is resumed."""
        return self._trainer._tr_loss is not self._loops_sum

    def _training_step(self, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._in_training_step = True
        try:
            loss = method(*args, **kwargs)
        finally:
            self._in_training_step = False
        if self._is_resumed and loss.isfinite():  # the loop may pass over another one
            # The loop adds it to 0: the same sum, bit for bit, as that of a run that was never stopped.
            loss = loss + self._trainer._tr_loss
            self._trainer._tr_loss = self._loops_sum
        return loss

    def _log_save_evaluate(self, method: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._is_resumed and loss is not self._trainer._tr_loss:
            # No step is left: the loop restores generators with a batch alone, and an evaluation draws from them.
            self._trainer._load_rng_state(self._checkpoint)
            loss += self._trainer._tr_loss  # in place: the loop's own
        if loss is not self._trainer._tr_loss:
            self._trainer._tr_loss = self._loops_sum = loss
        method(loss, *args, **kwargs)
