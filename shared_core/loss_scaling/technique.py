"""Loss scaling as a technique: it owns the scaler that a trainer or a bare loop uses in place of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared_core.errors import CompatibilityError, TrainingError
from shared_core.loss_scaling.config import LossScaleConfig
from shared_core.loss_scaling.scaler import LossScaler
from shared_core.technique import Context, Technique


class LossScaling(Technique):
    """Holds `scaler`; whoever drives the optimizer calls it: ``scale``, ``unscale_``, ``step``, ``update``.

    Args:
        config: The options.
    """

    key = "loss_scale"
    config: LossScaleConfig

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__(config)
        self.scaler = LossScaler(**config.to_dict())
        """The scaler to train with; its scale lives on the device of the first loss."""
        self._steps_at_begin = 0

    def make_scaler(self, device: str) -> LossScaler:
        """Return a fresh scaler with these options for a device type, and keep it as `scaler`.

        Raises:
            CompatibilityError: If there is no such device, where torch would go on without scaling.
        """
        scaler = LossScaler(device, **self.config.to_dict())
        if not scaler.is_enabled():
            raise CompatibilityError(f"loss_scale: device must be usable for loss scaling, got {device!r}")
        self.scaler = scaler
        return scaler

    def begin(self, context: Context) -> None:
        """Note how many steps the scaler has seen."""
        self._steps_at_begin = self.scaler.num_steps

    def after_optimizer_step(self, context: Context) -> None:
        """Raise `TrainingError` if the step went past the scaler: nothing would be scaled."""
        if self.scaler.num_steps == self._steps_at_begin:
            raise TrainingError(
                "loss_scale: the scaler must step the optimizer, got a step that it has not seen; call "
                "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return {"scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scaler; harmless where the trainer restored it already."""
        self.scaler.load_state_dict(state["scaler"])

    def metrics(self) -> dict[str, float]:
        """Return the scale and the number of skipped steps."""
        return {
            "loss_scale/scale": self.scaler.get_scale(),
            "loss_scale/skipped": float(self.scaler.skipped_steps),
        }

    def report(self) -> dict[str, Any]:
        """Return steps seen and skipped, and the scales they were seen at."""
        low, high = self.scaler.scale_range or (None, None)
        return {
            "kind": self.config.kind,
            "steps": self.scaler.num_steps,
            "skipped_steps": self.scaler.skipped_steps,
            "scale": self.scaler.get_scale(),
            "lowest_scale": low,
            "highest_scale": high,
        }
