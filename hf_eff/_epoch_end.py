"""Resume at the last step of an epoch: catch up on what the trainer does at an epoch's end after it saved that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer


class EpochEnd:
    """Catches up on the events, log entry, evaluation and checkpoint that were still due at an epoch's end.

    The trainer (transformers 5.23) starts the next epoch instead, and logs only the loss after the resume.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._has_ended = self._is_resumed = False
        self._figures: tuple[Any, Any] = (None, None)  # gradient norm and learning rate of the last step
        self.trial: Any = None  # the trial of a hyperparameter search
        self.ignored_keys: Any = None  # `ignore_keys_for_eval` of `train`
        self.is_due = False  # True if the resumed run had not finished an epoch's end
        self.is_silent = False
        """True if the resumed run was complete: nothing is logged, evaluated or saved."""

    def begin(self) -> None:
        """Record that an epoch begins."""
        self._has_ended = False

    def end(self) -> None:
        """Record that an epoch ends."""
        self._has_ended = True

    def state(self) -> dict[str, Any]:
        """Return whether an epoch's end is still due, and the loss that is not logged yet."""
        trainer, state = self._trainer, self._trainer.state
        # A whole number of epochs, or the last step: the trainer saved at the end of the step, before the epoch's end.
        is_last = float(state.epoch or 0.5).is_integer() or 0 < state.max_steps <= state.global_step
        norm, rate = self._figures
        return {
            "is_due": is_last and not self._has_ended,
            "loss": trainer._tr_loss,
            "logged_at": trainer._globalstep_last_logged,
            "grad_norm": None if norm is None else float(norm),
            "learning_rate": rate,
        }

    def resume(self, saved: Mapping[str, Any] | None, is_over: bool) -> None:
        """Restore the saved `state` of a resumed run. `is_over` says that all its steps were taken."""
        trainer: Any = self._trainer
        self.is_due, self.is_silent = bool(saved and saved["is_due"]), False
        self._has_ended, self._is_resumed = not self.is_due, bool(saved)
        if not saved:
            return
        self.is_silent = is_over and not self.is_due
        self.is_due &= not is_over  # the trainer itself ends an epoch without steps
        self._figures = saved["grad_norm"], saved["learning_rate"]
        # The sum of losses since the last log: the next logged mean must include those before the stop.
        trainer._tr_loss = saved["loss"].to(trainer.args.device)
        trainer._globalstep_last_logged = saved["logged_at"]
        trainer._total_loss_scalar -= trainer._tr_loss.item()  # `train` returns the mean of its own steps

    def catch_up(self, restore: Callable[[], None]) -> None:
        """Do what was still due."""
        trainer: Any = self._trainer
        self.is_due = False
        # Restore the generators as saved: the evaluation below draws from them.
        restore()
        control = trainer.control
        # Flags that `on_epoch_end` of the trainer's own callbacks sets again.
        control.should_log = control.should_evaluate = control.should_save = False
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, control)
        epoch = int(trainer.state.epoch) - 1
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, trainer.model_wrapped, self.trial, epoch, self.ignored_keys, None
        )

    def log_save_evaluate(
        self, method: Callable[..., None], loss: Any, norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any
    ) -> None:
        """Do so unless the run was complete. Before a resumed run's first step, log the last step's figures."""
        if self.is_silent:
            return
        if self._is_resumed and learning_rate is None:
            # The trainer has no figures of its own yet.
            norm, learning_rate = self._figures
        self._is_resumed, self._figures = False, (norm, learning_rate)
        method(loss, norm, *args, learning_rate=learning_rate, **kwargs)
