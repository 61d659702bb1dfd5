"""The technique's scaler in accelerate's place while a trainer trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hf_eff._adapters.adapter import Adapter
from hf_eff._run_environment import inner_optimizer


class LossScaling(Adapter):
    """Gives accelerate the technique's scaler, and its own back."""

    key = "loss_scale"

    def around(self) -> dict[str, Callable[..., Any]]:
        """Swap around each try to train: the scaler must be there before accelerate's `prepare`."""
        return {"_inner_training_loop": self._train}

    def _train(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer, accelerator = self._trainer, cast(Any, self._trainer.accelerator)
        own = accelerator.scaler, accelerator.native_amp
        accelerator.scaler = self.technique.make_scaler(accelerator.device.type)
        if trainer.optimizer is not None:
            # an optimizer from an earlier `train` holds that run's scaler
            trainer.optimizer = inner_optimizer(trainer.optimizer)
        if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
            accelerator.native_amp = True
            self.session.note(
                f"fp16 on {accelerator.device.type} runs under autocast because loss_scale is on; by itself the "
                "trainer would train in fp32 here"
            )
        try:
            return method(*args, **kwargs)
        finally:
            accelerator.scaler, accelerator.native_amp = own
