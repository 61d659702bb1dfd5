"""The end of an epoch whose last step a run is resumed from: what the trainer does there after it saved that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer


class EpochEnd:
    """Catches up on the events, the log entry, the evaluation and the checkpoint that an epoch's end had yet to bring.

    The trainer (transformers 5.23) begins the next epoch instead, and logs of a loss only what follows the resume.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._has_ended = self._is_resumed = False
        self._figures: tuple[Any, Any] = (None, None)  # gradient norm and learning rate of the last step
        self.trial: Any = None  # that of a hyperparameter search
        self.ignored_keys: Any = None  # keys of the model's output that evaluations leave out, as `train` was told
        self.is_due = False  # whether the run that is resumed had an epoch's end before it
        self.is_silent = False
        """True if nothing is logged, evaluated or saved any more: the run that is resumed was over."""

    def begin(self) -> None:
        """Note that an epoch begins."""
        self._has_ended = False

    def end(self) -> None:
        """Note that an epoch ends."""
        self._has_ended = True

    def state(self) -> dict[str, Any]:
        """Return if an epoch's end is yet to come, and the loss that is not logged yet."""
        trainer, state = self._trainer, self._trainer.state
        # A whole number of epochs, or the last step: the trainer saved in `step end`, and what an epoch's end does
        # was yet to come.
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
        """Restore what `state` returned, if a run is resumed, which may have taken all its steps."""
        trainer: Any = self._trainer
        self.is_due, self.is_silent = bool(saved and saved["is_due"]), False
        self._has_ended, self._is_resumed = not self.is_due, bool(saved)
        if not saved:
            return
        self.is_silent = is_over and not self.is_due
        self.is_due &= not is_over  # the trainer ends an epoch without steps by itself
        self._figures = saved["grad_norm"], saved["learning_rate"]
        # The sum of losses since the last log: the next entry's mean must include those before the stop.
        trainer._tr_loss = saved["loss"].to(trainer.args.device)
        trainer._globalstep_last_logged = saved["logged_at"]
        trainer._total_loss_scalar -= trainer._tr_loss.item()  # the mean that `train` returns is of its own steps

    def catch_up(self, restore: Callable[[], None]) -> None:
        """Do what was due."""
        trainer: Any = self._trainer
        self.is_due = False
        # Generators as they were at saving: the evaluation that follows draws from them.
        restore()
        control = trainer.control
        # Flags that `on_epoch_end` of the trainer's own callbacks sets anew.
        control.should_log = control.should_evaluate = control.should_save = False
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, control)
        epoch = int(trainer.state.epoch) - 1
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, trainer.model_wrapped, self.trial, epoch, self.ignored_keys, None
        )

    def log_save_evaluate(
        self, method: Callable[..., None], loss: Any, norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any
    ) -> None:
        """Do so unless the run was over; before its first step a resumed run's figures are those of the last one."""
        if self.is_silent:
            return
        if self._is_resumed and learning_rate is None:
            # The trainer's own figures are of no step yet.
            norm, learning_rate = self._figures
        self._is_resumed, self._figures = False, (norm, learning_rate)
        method(loss, norm, *args, learning_rate=learning_rate, **kwargs)
