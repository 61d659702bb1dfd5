"""Tell whether the optimizer step of a batch was applied, and move schedulers with applied steps alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared_core.engine.session import Session
from shared_core.front_ends.wrapped_method import Wrapped


class WatchedSteps:
    """Tells a session of applied and skipped steps, from the start of training until `stop`."""

    def __init__(self, trainer: Any, session: Session, *, skipped: bool = False) -> None:
        self._trainer, self._session = trainer, session
        self._hooks: list[Any] = []
        self._wrapped: list[Wrapped] = []
        # A step of the last batch before a resume was tried: schedulers that follow at the epoch's end must know of
        # it.
        self._tried, self._applied, self._discarded = skipped, False, False
        for optimizer in trainer.optimizers:
            # Hooks of the optimizer, not of Lightning: torch's scaler skips `optimizer.step` itself, and only an
            # applied step calls it.
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_post_hook(self._stepped))
            else:  # DeepSpeed's, which steps torch's own once for each of its groups
                self._wrapped.append(Wrapped(optimizer, "step", self._step_of_deepspeed))
        # Only now: before, Lightning would take it for the user's own and check schedulers less strictly.
        self._wrapped.append(Wrapped(trainer.lightning_module, "lr_scheduler_step", self._lr_scheduler_step))

    def stop(self) -> None:
        """Give optimizers and module their own methods back."""
        for hook in self._hooks:
            hook.remove()
        # In reverse: where a method is wrapped twice, the inner one must be put back last.
        for wrapped in reversed(self._wrapped):
            wrapped.undo()

    def next_batch(self) -> None:
        """Nothing was tried or applied in this batch so far."""
        self._tried = self._applied = self._discarded = False

    @property
    def skipped(self) -> bool:
        """True if the optimizer step of this batch was tried and not applied."""
        return self._tried and not self._applied

    def before_step(self) -> None:
        """Gradients are complete: an `optimizer_step` of the user's own may also let a batch pass without."""
        self._tried = True

    def batch_ended(self) -> bool:
        """Count a skipped step; return whether an accumulation window ended."""
        # Manual optimisation steps when it likes: only automatic steps are expected once a window.
        window_ended = not self._trainer.fit_loop._should_accumulate()
        automatic = self._trainer.lightning_module.automatic_optimization
        # A discarded step was told by `after_step` already.
        if automatic and window_ended and self._tried and not (self._applied or self._discarded):
            self._session.after_step(applied=False)
        return window_ended

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # An epoch of Lightning's SWA steps without gradients, and torch for states that it saves.
        if self._trainer.fit_loop._skip_backward or self._session.is_saving:
            return
        self._applied = self._session.after_step()
        self._discarded = not self._applied

    def _step_of_deepspeed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not getattr(self._trainer.optimizers[0], "overflow", False):
            self._stepped(None, args, kwargs)
        return result

    def _lr_scheduler_step(self, original: Callable[..., None], scheduler: Any, metric: Any = None) -> None:
        by_step = any(
            config.scheduler is scheduler and config.interval == "step" for config in self._trainer.lr_scheduler_configs
        )
        # Lightning would move the learning rate on steps that the scaler skipped.
        if not (self.skipped and by_step and self._trainer.lightning_module.automatic_optimization):
            original(scheduler, metric)
