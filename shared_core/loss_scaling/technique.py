"""Loss scaling as a technique: it owns the scaler that a trainer or a plain loop uses instead of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shared_core.engine.checks.loss_dtype import LossDtype
from shared_core.engine.plan import Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.loss_scaling.config import LossScaleConfig
from shared_core.loss_scaling.histograms import HistogramProbe
from shared_core.loss_scaling.scaler import LossScaler
from shared_core.loss_scaling.underflow import FlushProbe, UnderflowTelemetry
from shared_core.printing import counted, share_text


class LossScaling(Technique):
    """Holds `scaler`. The trainer or loop calls its ``scale``, ``unscale_``, ``step`` and ``update``."""

    config: LossScaleConfig

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__(config)
        self.scaler = LossScaler(**config.scaler_options())
        """The scaler to train with. Its scale is on the device of the first loss."""
        self.telemetry = UnderflowTelemetry(config.format)
        """The latest measurement of underflow."""
        self.flush = FlushProbe()
        """The latest count of flushed activation gradients."""
        self.histograms = HistogramProbe(config.format)
        """The latest histograms of weights, activations, gradients and updates."""
        self.loss_dtype = LossDtype()
        """The dtype of the first training loss."""
        self._kept: dict[str, Any] = {
            "telemetry": self.telemetry, "flush": self.flush, "histograms": self.histograms, "loss": self.loss_dtype,
        }  # fmt: skip
        self._steps_at_begin = 0
        self._flush_due = False

    def make_scaler(self, device: str) -> LossScaler:
        """Return a new scaler with these options for a device type, and store it as `scaler`.

        Raises:
            CompatibilityError: If there is no such device. torch would continue without scaling.
        """
        scaler = LossScaler(device, **self.config.scaler_options())
        if not scaler.is_enabled():
            raise CompatibilityError("loss_scale", f"device {device!r} cannot be used for loss scaling")
        self.scaler = scaler
        return scaler

    def attach(self, context: Context) -> Touched:
        """Return that the technique acts on the whole run."""
        context.undo.callback(self._detach)
        return Touched()

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Record how many steps the scaler has seen, and let it unscale the gradients of 16-bit parameters."""
        if state is not None:
            self.scaler.load_state_dict(state["scaler"])  # harmless if the trainer has already restored it
            for key, kept in self._kept.items():
                kept.load_state_dict(state.get(key, {}))
        self._steps_at_begin = self.scaler.num_steps
        self.scaler.widen_gradients = context.widen_gradients
        if self.config.flush_every:
            self.flush.watch(context.model)
            self._arm_flush(context)
        if self.config.histogram_every:
            self.histograms.watch(context.model)
            self._arm_histograms(context)

    def _detach(self) -> None:
        """Remove the hooks of the flush count and of the histograms."""
        self.flush.leave()
        self.histograms.leave()
        self.scaler.widen_gradients = None

    def _arm_flush(self, context: Context) -> None:
        self._flush_due = _is_due(self.config.flush_every, context.step, self.flush.step)
        if self._flush_due:
            self.flush.arm()

    def _arm_histograms(self, context: Context) -> None:
        if _is_due(self.config.histogram_every, context.step, self.histograms.step):
            self.histograms.arm()

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the loss unchanged. The first one shows in which type it was computed."""
        self.loss_dtype.warn(task_loss, context, self.loss)
        return task_loss

    def before_step(self, context: Context) -> None:
        """Measure underflow if due. If the step overflows, the next one is measured."""
        if _is_due(self.config.telemetry_every, context.step, self.telemetry.step):
            self.telemetry.measure(context.model.named_parameters(), self.scaler.get_scale(), context.step)
        if self._flush_due:
            self._flush_due = not self.flush.measure(context.step) and self.flush.is_watching
            if self._flush_due:
                self.flush.arm()
        if self.histograms.is_armed:
            self.histograms.before_step(self.scaler.get_scale(), context.step)

    def after_step(self, context: Context, applied: bool) -> None:
        """Raise `TrainingError` if the step bypassed the scaler, so that nothing would be scaled."""
        if applied and self.scaler.num_steps == self._steps_at_begin:
            raise TrainingError(
                "loss_scale",
                "the optimizer stepped without the scaler",
                "call scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()",
            )
        if applied:
            self._arm_flush(context)
            if self.histograms.is_armed:
                self.histograms.after_step()
        self._arm_histograms(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and the latest measurements."""
        return {"scaler": self.scaler.state_dict()} | {key: kept.state_dict() for key, kept in self._kept.items()}

    def figures(self) -> dict[str, float]:
        """Return the scale, the number of skipped steps, and the latest underflow, zero share and headroom."""
        return {
            "loss_scale/scale": self.scaler.get_scale(),
            "loss_scale/skipped": float(self.scaler.skipped_steps),
            **self.telemetry.figures(),
            **self.flush.figures(),
            **self.histograms.figures(),
        }

    def report(self) -> dict[str, Any]:
        """Return the numbers of steps and skips, the range of scales, the floor, and underflow by layer."""
        low, high = self.scaler.scale_range or (None, None)
        floor = {"floor": self.scaler.lowest_scale} if self.config.kind == "enhanced" else {}
        return {
            "kind": self.config.kind,
            "steps": self.scaler.num_steps,
            "skipped_steps": self.scaler.skipped_steps,
            "scale": self.scaler.get_scale(),
            "lowest_scale": low,
            "highest_scale": high,
            **floor,
            **self.loss_dtype.report(),
            **self.telemetry.report(),
            **self.flush.report(),
            **self.histograms.report(),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        text = f"Scaled the loss by {report['scale']:,.0f} at the end"
        low, high = report["lowest_scale"], report["highest_scale"]
        span = f", between {low:,.0f} and {high:,.0f} before" if low is not None and low != high else ""
        seen = f"Skipped {report['skipped_steps']:,} of {counted(report['steps'], 'step')}."
        lost = report.get("underflow")
        measured = (
            []
            if lost is None
            else [f"{share_text(lost)} of the gradients underflowed at step {report['measured_step']:,}."]
        )
        return [f"{text}{span}. {seen}", *measured]


def _is_due(every: int, step: int, measured: int | None) -> bool:
    return bool(every) and step % every == 0 and measured != step
