"""The technique's scaler in accelerate's place while a trainer trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from transformers import Trainer

from hf_eff._environment import inner_optimizer
from hf_eff._wrapped import Wrapped
from shared_core.engine.session import Session

if TYPE_CHECKING:
    from shared_core.loss_scaling import LossScaling


class ScalerSwap:
    """Puts the scaler of a session in the place of accelerate's, and that one back.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._own: tuple[Any, bool] | None = None
        self.unscaled = False
        """Whether the gradients of this step are divided by the scale already."""

    @property
    def is_ours(self) -> bool:
        """Whether accelerate has the session's scaler now."""
        return self._own is not None

    def put(self, session: Session) -> None:
        """Give accelerate a new scaler, if the session has the technique."""
        technique = cast("LossScaling | None", session.techniques.get("loss_scale"))
        if technique is None:
            return
        trainer, accelerator = self._trainer, cast(Any, self._trainer.accelerator)
        if self._own is None:
            self._own = (accelerator.scaler, accelerator.native_amp)
        accelerator.scaler = technique.make_scaler(accelerator.device.type)
        if trainer.optimizer is not None:
            # an optimizer from an earlier `train` holds that run's scaler
            trainer.optimizer = inner_optimizer(trainer.optimizer)
        if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
            accelerator.native_amp = True
            session.note(
                f"fp16 on {accelerator.device.type} runs under autocast because loss_scale is on; by itself the "
                "trainer would train in fp32 here"
            )

    def watch(self) -> Wrapped:
        """Return what keeps accelerate from dividing gradients by the scale twice; each accelerator needs it."""
        return Wrapped(self._trainer.accelerator, "unscale_gradients", self._unscale_once)

    def unscale(self) -> None:
        """Divide the gradients by the scale, if there is one and nobody did."""
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and not self.unscaled:
            scaler.unscale_(inner_optimizer(self._trainer.optimizer))
            self.unscaled = True

    def _unscale_once(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        accelerator = self._trainer.accelerator
        if self.unscaled:
            return  # accelerate would do it again when it clips
        method(*args, **kwargs)
        self.unscaled = accelerator.native_amp and accelerator.mixed_precision == "fp16"

    def restore(self) -> None:
        """Give accelerate its own scaler back."""
        if self._own is not None:
            accelerator: Any = self._trainer.accelerator
            accelerator.scaler, accelerator.native_amp = self._own
            self._own = None
