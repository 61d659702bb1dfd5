"""Show the gradients of each step to a session, complete and unscaled, and tell it whether the step was applied.

The scale of accelerate's gradients is divided out once, and steps that its scaler skips in silence are found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from hf_eff._run_environment import inner_optimizer
from shared_core.distributed.zero import ZeroOptimizer
from shared_core.errors import TrainingError
from shared_core.front_ends.wrapped_method import Wrapped

if TYPE_CHECKING:
    from transformers import Trainer

    from shared_core.engine.session import Session


class Accelerated(Protocol):
    """A trainer, or a loop: what steps an optimizer through accelerate."""

    accelerator: Any
    optimizer: Any


class GradientScale:
    """Around the scaler of a trainer's accelerator, if it has one."""

    def __init__(self, trainer: Accelerated) -> None:
        self._trainer = trainer
        self._before: float | None = None
        self.unscaled = False  # whether the gradients of this step are divided by the scale already

    def watch(self) -> Wrapped:
        """Return what keeps accelerate from dividing gradients by the scale twice; each accelerator needs it."""
        return Wrapped(self._trainer.accelerator, "unscale_gradients", self._unscale_once)

    def unscale(self) -> None:
        """Divide the gradients by the scale, if there is one and nobody did."""
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and not self.unscaled:
            # With torch's optimizer: the scaler keeps its state by that object.
            scaler.unscale_(inner_optimizer(self._trainer.optimizer))
            self.unscaled = True

    def _unscale_once(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        accelerator = self._trainer.accelerator
        if self.unscaled:
            return  # accelerate would do it again when it clips
        method(*args, **kwargs)
        # Only here is there a scale at all: `native_amp` with fp16.
        self.unscaled = accelerator.native_amp and accelerator.mixed_precision == "fp16"

    def before_step(self) -> None:
        """Remember the scale where a skip would be hidden: torch's scaler leaves it to a fused optimizer."""
        scaler = self._trainer.accelerator.scaler
        # A fused optimizer gets the scale and the overflow flag, and skips inside its kernel: accelerate sees a step.
        hidden = hasattr(inner_optimizer(self._trainer.optimizer), "_step_supports_amp_scaling")
        is_torchs = scaler is not None and type(scaler).step is torch.amp.GradScaler.step
        self._before = scaler.get_scale() if hidden and is_torchs else None

    def hid_a_skip(self) -> bool:
        """Return True if the step since then was skipped and the trainer does not know; the next one begins."""
        self.unscaled = False
        # After an overflow the scale falls: that is the only trace of a hidden skip.
        return self._before is not None and self._trainer.accelerator.scaler.get_scale() < self._before


class WatchedSteps:
    """Follows one trainer's steps; those of DeepSpeed come inside the last backward."""

    session: Session
    """The trainer's."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._scale = trainer, GradientScale(trainer)
        self.computed = False  # whether the loss of this step went through `compute_loss`
        self._complete = False  # the step's gradients are all there
        self._discarded = False  # the last step was, and accelerate was told so
        self._zero: ZeroOptimizer | None = None
        self._engine_step: Wrapped | None = None

    def watch(self) -> Wrapped:
        """Return what surrounds the accelerator; each one needs it."""
        return self._scale.watch()

    def stop(self) -> None:
        """Forget the step that was prepared for last."""
        self._complete = self._scale.unscaled = False

    def before_norm(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Show complete gradients, once, before the first of what clips them and what takes their norm for logs."""
        if not self._complete and self._is_live:
            self._complete = True
            # Techniques look at gradients: they must not be a loss scale's multiple of themselves, which changes.
            self._scale.unscale()
            self.session.before_step()
        return method(*args, **kwargs)

    def before_step(self) -> None:
        """Refuse a step that passed the hooks by."""
        if self._is_live:
            self._check_hooks_ran()
        # Raised by us for the last step: accelerate sets it itself in each step, but only where it has a scaler.
        if self._discarded:
            cast(Any, self._trainer.optimizer)._is_overflow = self._discarded = False
        self._scale.before_step()

    def after_step(self) -> None:
        """Tell the session whether the step was applied."""
        self._complete = self.computed = False
        skipped = self._trainer.accelerator.optimizer_step_was_skipped
        if self._scale.hid_a_skip():
            skipped = True
            self.session.note(
                "a fused optimizer hides skipped steps from the trainer, whose learning rate schedule moves on; "
                "switch loss_scale on (kind: dynamic) to hold it too"
            )
        if skipped:
            self.session.after_step(applied=False)
        elif not self.session.after_step():
            # accelerate knows of its scaler's skips alone; the learning rate must not move on this one either
            cast(Any, self._trainer.optimizer)._is_overflow = self._discarded = True
        self.follow()

    @property
    def _is_live(self) -> bool:
        return self.session.is_attached and self.session.has_begun

    def _check_hooks_ran(self) -> None:
        computed = self.computed or not self.session.needs_forward
        for ran, name in ((computed, "compute_loss"), (self._complete, "_get_grad_norm")):
            if not ran:
                raise TrainingError(
                    "hf",
                    f"{type(self._trainer).__name__} must call self.{name} before each optimizer step, got a step "
                    "without",
                    "call it in your training_step, and assign nothing to the trainer's methods once techniques are "
                    "attached",
                )

    # --- DeepSpeed

    def optimizer(self) -> torch.optim.Optimizer:
        """Return torch's own: accelerate's wrapper has no hooks, and skips steps by itself; or DeepSpeed's."""
        engine, context = self._trainer.model_wrapped, self.session.context
        if self._trainer.is_deepspeed_enabled and self._engine_step is None and self.session.recipe:
            self._engine_step = Wrapped(engine, "step", self._step_of_engine)
            self._zero = ZeroOptimizer.of(engine)
            if self._zero is not None and context is not None:
                context.in_full_precision = self._zero.in_full_precision
        return cast(torch.optim.Optimizer, self._zero) or inner_optimizer(self._trainer.optimizer)

    def _step_of_engine(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # within the last backward: the trainer's own events of a step come after it
        self._complete = True
        lent = self._zero.gradients() if self._zero and self.session.needs_gradients else contextlib.nullcontext()
        with lent:
            self.session.before_step()
        self.follow()
        return method(*args, **kwargs)

    def follow(self) -> None:
        """Let the copies that DeepSpeed steps hold what was written into the weights."""
        if self._zero is not None:
            self._zero.follow()

    def leave_engine(self) -> None:
        """Give DeepSpeed's engine its own step back."""
        if self._engine_step is not None:
            self._engine_step.undo()
        self._zero = self._engine_step = None
