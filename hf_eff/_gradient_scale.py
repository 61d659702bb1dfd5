"""The scale of accelerate's gradients: divided out once, and the steps that its scaler skips in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_eff._run_environment import inner_optimizer
from shared_core.front_ends.wrapped_method import Wrapped


class Accelerated(Protocol):
    """A trainer, or a loop: what steps an optimizer through accelerate."""

    accelerator: Any
    optimizer: Any


class GradientScale:
    """Around the scaler of a trainer's accelerator, if it has one."""

    def __init__(self, trainer: Accelerated) -> None:
        self._trainer = trainer
        self._before: float | None = None
        self.unscaled = False
        """Whether the gradients of this step are divided by the scale already."""

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
        """Return whether the step since then was skipped and the trainer does not know; the next one begins."""
        self.unscaled = False
        # After an overflow the scale falls: that is the only trace of a hidden skip.
        return self._before is not None and self._trainer.accelerator.scaler.get_scale() < self._before
