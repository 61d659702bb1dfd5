"""Pass each step's complete, unscaled gradients to a session, and report whether the step was applied.

accelerate's gradient scale is divided out once, and steps that its scaler silently skips are detected.
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

    from shared_core.front_ends.session import Session


class Accelerated(Protocol):
    """A trainer or a loop that steps an optimizer through accelerate."""

    accelerator: Any
    optimizer: Any


class GradientScale:
    """Wraps the scaler of a trainer's accelerator, if it has one."""

    def __init__(self, trainer: Accelerated) -> None:
        self._trainer = trainer
        self._before: float | None = None
        self.unscaled = False  # True if this step's gradients are already divided by the scale

    def watch(self) -> Wrapped:
        """Return the wrapper that keeps accelerate from unscaling gradients twice; each accelerator needs it."""
        return Wrapped(self._trainer.accelerator, "unscale_gradients", self._unscale_once)

    def unscale(self) -> None:
        """Divide the gradients by the scale, once, if there is one."""
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and not self.unscaled:
            # With torch's optimizer: the scaler stores its state under that object.
            scaler.unscale_(inner_optimizer(self._trainer.optimizer))
            self.unscaled = True

    def _unscale_once(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        accelerator = self._trainer.accelerator
        if self.unscaled:
            return  # accelerate would do it again when it clips
        method(*args, **kwargs)
        # Only `native_amp` with fp16 has a scale at all.
        self.unscaled = accelerator.native_amp and accelerator.mixed_precision == "fp16"

    def before_step(self) -> None:
        """Remember the scale if a skip would be hidden: torch's scaler leaves skipping to a fused optimizer."""
        scaler = self._trainer.accelerator.scaler
        # A fused optimizer gets the scale and the overflow flag and skips inside its kernel. accelerate sees a step.
        hidden = hasattr(inner_optimizer(self._trainer.optimizer), "_step_supports_amp_scaling")
        is_torchs = scaler is not None and type(scaler).step is torch.amp.GradScaler.step
        self._before = scaler.get_scale() if hidden and is_torchs else None

    def hid_a_skip(self) -> bool:
        """Return True if the step since then was skipped without the trainer noticing. The next step begins."""
        self.unscaled = False
        # After an overflow the scale falls: the only trace of a hidden skip.
        return self._before is not None and self._trainer.accelerator.scaler.get_scale() < self._before


class WatchedSteps:
    """Follows one trainer's steps. DeepSpeed steps inside the last backward."""

    session: Session
    """The trainer's."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._scale = trainer, GradientScale(trainer)
        self.computed = False  # True if this step's loss went through `compute_loss`
        self._complete = False  # True if the step's gradients are complete
        self._discarded = False  # True if the last step was discarded, and accelerate was told so
        self._zero: ZeroOptimizer | None = None
        self._engine_step: Wrapped | None = None

    def watch(self) -> Wrapped:
        """Return the wrapper of the accelerator; each one needs it."""
        return self._scale.watch()

    def stop(self) -> None:
        """Forget the last prepared step."""
        self._complete = self._scale.unscaled = False

    def before_norm(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Pass complete gradients to the session once, before they are clipped or their norm is logged."""
        if not self._complete and self._is_live:
            self._complete = True
            # Techniques need the true gradients, not multiples by a changing loss scale.
            self._scale.unscale()
            self.session.before_step()
        return method(*args, **kwargs)

    def before_step(self) -> None:
        """Raise an error if a step bypassed the hooks."""
        if self._is_live:
            self._check_hooks_ran()
        # Set by us for the last step: accelerate resets it in each step, but only if it has a scaler.
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
                "a fused optimizer hides skipped steps from the trainer, so the learning rate schedule keeps "
                "advancing; switch on loss_scale (kind: dynamic) to hold it as well"
            )
        if skipped:
            self.session.after_step(applied=False)
        elif not self.session.after_step():
            # accelerate knows only its own scaler's skips; the learning rate must not advance on this one either
            cast(Any, self._trainer.optimizer)._is_overflow = self._discarded = True
        self.follow()

    @property
    def _is_live(self) -> bool:
        return self.session.is_live

    def _check_hooks_ran(self) -> None:
        computed = self.computed or not self.session.hooks.acts_on_loss
        for ran, name in ((computed, "compute_loss"), (self._complete, "_get_grad_norm")):
            if not ran:
                raise TrainingError(
                    "hf",
                    f"{type(self._trainer).__name__} must call self.{name} before each optimizer step, but a step came "
                    "without",
                    "call it in your training_step, and don't reassign the trainer's methods after techniques are "
                    "attached",
                )

    # --- DeepSpeed

    def optimizer(self) -> torch.optim.Optimizer:
        """Return torch's optimizer or DeepSpeed's. accelerate's wrapper has no hooks, and skips steps by itself."""
        engine, context = self._trainer.model_wrapped, self.session.context
        if self._trainer.is_deepspeed_enabled and self._engine_step is None and self.session.recipe:
            self._engine_step = Wrapped(engine, "step", self._step_of_engine)
            self._zero = ZeroOptimizer.of(engine)
            if self._zero is not None and context is not None:
                context.in_full_precision = self._zero.in_full_precision
        return cast(torch.optim.Optimizer, self._zero) or inner_optimizer(self._trainer.optimizer)

    def _step_of_engine(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # inside the last backward: the trainer's own step events come later
        self._complete = True
        lent = self._zero.gradients() if self._zero and self.session.hooks.before_step else contextlib.nullcontext()
        with lent:
            self.session.before_step()
        self.follow()
        return method(*args, **kwargs)

    def follow(self) -> None:
        """Copy what was written into the weights to the master copies that DeepSpeed steps."""
        if self._zero is not None:
            self._zero.follow()

    def leave_engine(self) -> None:
        """Restore the step method of DeepSpeed's engine."""
        if self._engine_step is not None:
            self._engine_step.undo()
        self._zero = self._engine_step = None
