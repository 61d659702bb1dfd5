"""The private names of transformers' Trainer that this package needs, and substitutes for older versions.

If a version lacks one, the error names it. The Trainers of transformers 4.57 to 5.5 differ from later ones: up to 5.2
the loop is one method, which clips by itself and keeps the sum of losses local. Only this file handles them.

transformers has no public hook at these places. Each name was found in the last tested version of the Trainer, in the
method given here. A test checks this and reports names that moved.
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

from shared_core.front_ends import wrapped_method
from shared_core.front_ends.wrapped_method import PrivateName, Wrapped

FIRST_SEEN, LAST_SEEN = "4.57", "5.24"
"""The oldest and the newest transformers with every name. For older ones, `OlderLoop` provides those with a `since`,
or they are not needed."""

WRAPPED = {
    "_inner_training_loop": PrivateName("train", "techniques attach anew for each try of auto_find_batch_size"),
    "_hp_search_setup": PrivateName("train", "a trial of a search sets the arguments of its own run"),
    "_set_signature_columns_if_needed": PrivateName("_remove_unused_columns", "a column of ours stays in the batch"),
    "_prepare_inputs": PrivateName("training_step", "a column of ours is taken out before the model sees the batch"),
    "_load_rng_state": PrivateName("_run_epoch", "batches drawn ahead of a checkpoint are drawn again"),
    "_maybe_log_save_evaluate": PrivateName("_run_epoch", "an evaluation due at an epoch's end is caught up on"),
    "_clip_grad_norm": PrivateName("_run_epoch", "gradients are complete and not yet clipped", since="5.3"),
    "_get_grad_norm": PrivateName("_run_epoch", "the same where max_grad_norm is 0", since="5.3"),
    "_save_checkpoint": PrivateName("_maybe_log_save_evaluate", "techniques prepare weights before they are saved"),
    "_save": PrivateName("save_model", "saved weights are baked"),
    "_load_from_checkpoint": PrivateName("_prepare_for_training", "layers have to fit the weights that are loaded"),
    "_load_optimizer_and_scheduler": PrivateName("_prepare_for_training", "optimizers are prepared for their state"),
    "_determine_best_metric": PrivateName("_maybe_log_save_evaluate", "only what holds the techniques may be best"),
    "_load_best_model": PrivateName("_finalize_training", "the state beside the best model is loaded with it"),
}
"""Methods that are replaced on the instance."""

USED = {
    "_get_output_dir": PrivateName("_save_checkpoint", "where a trial of a search saves its checkpoints"),
    "_tr_loss": PrivateName("_run_epoch", "the logged loss goes on after a resume", since="5.3", is_method=False),
    "_globalstep_last_logged": PrivateName("_maybe_log_save_evaluate", "the same", is_method=False),
    "_total_loss_scalar": PrivateName("_maybe_log_save_evaluate", "the same", is_method=False),
    "_signature_columns": PrivateName("_set_signature_columns_if_needed", "which columns reach the model",
                                      is_method=False),
    "_eval_dataloaders": PrivateName("get_eval_dataloader", "workers of evaluation that live on", is_method=False),
    "_loss_shifts_labels": PrivateName("_get_num_items_in_batch", "which labels the loss counts; absent: none is "
                                       "shifted", since="5.13", is_method=False),
}  # fmt: skip
"""Further private names that are called or read."""


def check_private_names(trainer: Trainer) -> None:
    """Raise an error if the Trainer lacks a private method that techniques need."""
    whose = f"hf: the Trainer of transformers {transformers.__version__}"
    remedy = f"update efftrain, or use transformers {FIRST_SEEN} to {LAST_SEEN}, which were tested"
    wrapped_method.check_private_names({**WRAPPED, **USED}, lambda _: trainer, whose, remedy)


def second_division(trainer: Trainer) -> str | None:
    """Return a warning if the Trainer divides gradients by the number of micro-batches twice, else None.

    The Trainer of transformers 5.2 to 5.5.3 passes the number to accelerate, whose ``backward`` divides by it too.
    """
    accelerator = trainer.accelerator
    number = accelerator.gradient_accumulation_steps
    if number == 1 or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return None
    return (
        f"this version of transformers divides gradients a second time by its {number} micro-batches, with or without "
        "techniques: transformers 5.5.4 fixes this"
    )


class OlderLoop:
    """Gives older Trainers ``_clip_grad_norm``, ``_get_grad_norm`` and ``_tr_loss`` with their later meaning."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._clip: Callable[..., Any] = trainer.accelerator.clip_grad_norm_  # with the norm that the loop asked for
        self._in_training_step = self._has_clipped = False
        self._checkpoint: Any = None
        vars(trainer).update(_clip_grad_norm=self._clip_grad_norm, _get_grad_norm=self._get_grad_norm)
        self._start_sum()

    @classmethod
    def of(cls, trainer: Trainer) -> OlderLoop | None:
        """Return an instance for a trainer that needs it, None for a later version."""
        return cls(trainer) if Version(transformers.__version__) < Version("5.3") else None

    def watch(self) -> list[Wrapped]:
        """Return the wrapper that follows the loop's events. It is the outermost, since others may delay an event."""
        handler = self._trainer.callback_handler
        return [
            Wrapped(self._trainer, "_inner_training_loop", self._inner_training_loop, keep_signature=True),
            Wrapped(self._trainer, "training_step", self._training_step, keep_signature=True),
            Wrapped(self._trainer, "_maybe_log_save_evaluate", self._log_save_evaluate, keep_signature=True),
            Wrapped(handler, "on_train_begin", self._on_train_begin),
            Wrapped(handler, "on_pre_optimizer_step", self._on_pre_optimizer_step),
        ]

    def watch_accelerator(self) -> Wrapped:
        """Return the wrapper that sends the loop's clipping through ``_clip_grad_norm``; each accelerator needs it."""
        return Wrapped(self._trainer.accelerator, "clip_grad_norm_", self._on_clip)

    # --- clipping

    def _on_clip(self, method: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_training_step:
            return method(parameters, *args, **kwargs)  # called by the user, on incomplete gradients
        self._clip, self._has_clipped = lambda other: method(other, *args, **kwargs), True
        return self._trainer._clip_grad_norm(self._trainer.model_wrapped)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._clip(model.parameters())

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return grad_norm  # those versions log no norm without clipping

    def _on_pre_optimizer_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._has_clipped:
            self._trainer._get_grad_norm(self._trainer.model_wrapped)
        self._has_clipped = False
        return method(*args, **kwargs)

    # --- the sum of losses since the last log, a variable of the loop

    def _start_sum(self) -> None:
        # On resume another tensor is set: the loop's own sum then starts from it.
        self._trainer._tr_loss = self._loops_sum = torch.zeros((), device=self._trainer.args.device)

    def _inner_training_loop(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._start_sum()
        self._checkpoint = kwargs.get("resume_from_checkpoint")
        return method(*args, **kwargs)

    def _on_train_begin(self, method: Callable[..., Any], args: Any, state: Any, *rest: Any) -> Any:
        control = method(args, state, *rest)
        if state.epoch >= state.num_train_epochs:
            # The loop is skipped and adds nothing: restore what was subtracted for its sum.
            self._trainer._total_loss_scalar += self._trainer._tr_loss.item()
            self._start_sum()
        return control

    @property
    def _is_resumed(self) -> bool:
        """True until the loop's sum includes the resumed run's sum."""
        return self._trainer._tr_loss is not self._loops_sum

    def _training_step(self, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self._in_training_step = True
        try:
            loss = method(*args, **kwargs)
        finally:
            self._in_training_step = False
        if self._is_resumed and loss.isfinite():  # the loop may skip a non-finite loss
            # The loop adds it to 0: the same sum, bit for bit, as in an uninterrupted run.
            loss = loss + self._trainer._tr_loss
            self._trainer._tr_loss = self._loops_sum
        return loss

    def _log_save_evaluate(self, method: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._is_resumed and loss is not self._trainer._tr_loss:
            # No step is left: the loop restores generators only with a batch, but an evaluation draws from them.
            self._trainer._load_rng_state(self._checkpoint)
            loss += self._trainer._tr_loss  # in place: the loop's own tensor
        if loss is not self._trainer._tr_loss:
            self._trainer._tr_loss = self._loops_sum = loss
        method(loss, *args, **kwargs)
