"""Report whether a batch's optimizer step was applied, and advance schedulers only on applied steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import Wrapped


class WatchedSteps:
    """Reports applied and skipped steps to a session, from the start of training until `stop`."""

    def __init__(self, trainer: Any, session: Session, *, skipped: bool = False) -> None:
        self._trainer, self._session = trainer, session
        self._hooks: list[Any] = []
        self._wrapped: list[Wrapped] = []
        # The step of the last batch before a resume was tried: schedulers at the epoch's end need to know.
        self._tried, self._applied, self._discarded = skipped, False, False
        for optimizer in trainer.optimizers:
            # Hooks of the optimizer, not of Lightning: torch's scaler skips `optimizer.step` itself, so only an applied
            # step calls it.
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_post_hook(self._stepped))
            else:  # DeepSpeed's, which steps torch's own once per group
                self._wrapped.append(Wrapped(optimizer, "step", self._step_of_deepspeed))
        # Only now: earlier, Lightning would take it for the user's own and check schedulers less strictly.
        self._wrapped.append(Wrapped(trainer.lightning_module, "lr_scheduler_step", self._lr_scheduler_step))

    def stop(self) -> None:
        """Restore the methods of optimizers and module."""
        for hook in self._hooks:
            hook.remove()
        # In reverse: if a method is wrapped twice, the inner one must be restored last.
        for wrapped in reversed(self._wrapped):
            wrapped.undo()

    def next_batch(self) -> None:
        """Reset what was tried and applied in this batch."""
        self._tried = self._applied = self._discarded = False

    @property
    def skipped(self) -> bool:
        """True if the optimizer step of this batch was tried and not applied."""
        return self._tried and not self._applied

    def before_step(self) -> None:
        """Record complete gradients. A user's own `optimizer_step` may also skip a batch."""
        self._tried = True

    def batch_ended(self) -> bool:
        """Count a skipped step. Return True if an accumulation window ended."""
        # Manual optimization steps at any time: only automatic steps are expected once per window.
        window_ended = not self._trainer.fit_loop._should_accumulate()
        automatic = self._trainer.lightning_module.automatic_optimization
        # `after_step` has already reported a discarded step.
        if automatic and window_ended and self._tried and not (self._applied or self._discarded):
            self._session.after_step(applied=False)
        return window_ended

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # Lightning's SWA steps an epoch without gradients, and torch steps to create states that it saves.
        if self._trainer.fit_loop._skip_backward or self._session.swaps.is_saving:
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
        # Lightning would advance the learning rate on steps that the scaler skipped.
        if not (self.skipped and by_step and self._trainer.lightning_module.automatic_optimization):
            original(scheduler, metric)
