"""The precision of float32 matrix products: TF32 or bf16 where the hardware has them, told where it has not."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.engine.loss_dtype import LossDtype
from shared_core.engine.plan import Ability, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.hardware import float32_matmul_format, float32_matmul_precision, matmul_hardware
from shared_core.matmul_precision.config import MatmulPrecisionConfig

_BACKENDS: Any = torch.backends  # half of it has no annotations


class MatmulPrecision(Technique):
    """Sets torch's ``float32_matmul_precision`` for one run, measures what it does here, and puts it back.

    Args:
        config: The options.
    """

    key: ClassVar[str] = "matmul"
    config: MatmulPrecisionConfig
    _live: ClassVar[weakref.WeakValueDictionary[int, MatmulPrecision]] = weakref.WeakValueDictionary()
    """Those that set the precision and have not put it back, in order: torch has one setting for all of them."""

    def __init__(self, config: MatmulPrecisionConfig) -> None:
        super().__init__(config)
        self.loss_dtype = LossDtype()
        """The dtype of the first training loss."""
        self.previous: str | None = None
        """Torch's setting before this run; ``"mixed"`` if its newer switches were set. None before `attach`."""
        self._before, self._set = _switches(), _switches()
        """Torch's settings before `attach` and after it."""
        self._device = torch.device("cpu")
        self._format: str | None = None

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return inactive where neither TF32 nor bfloat16 takes the place of float32, by measuring it."""
        reason = ""
        for precision in ("high", "medium"):
            technique = cls(MatmulPrecisionConfig(precision=precision))  # type: ignore[arg-type]
            # Measured on an empty model: the setting is torch's own.
            technique.attach(Context(nn.Module()))
            technique._device, technique._format = device, float32_matmul_format(device)
            reason = technique._reason()
            technique._detach()
            if technique.is_active:
                return Ability("native", f"{precision} multiplies in {technique._format}")
        return Ability("inactive", reason)

    def attach(self, context: Context) -> Touched:
        """Set the precision, for evaluation too."""
        context.undo.callback(self._detach)
        if context.is_preview:
            return Touched(what="all float32 matrix products")
        self.previous = float32_matmul_precision()
        self._before = _switches()
        # Numbers rise, so that the order of setting is known.
        self._live[1 + max(self._live, default=0)] = self
        torch.set_float32_matmul_precision(self.config.precision)
        self._set = _switches()
        return Touched(what="all float32 matrix products")

    def _detach(self) -> None:
        """Put torch's setting back; where a later run has set its own since, that one puts it back in our place."""
        mine = next((number for number, one in self._live.items() if one is self), None)
        if mine is None:
            return
        del self._live[mine]
        # Runs may end in another order than they began in: the setting of before is passed on to the next.
        later = [one for number, one in sorted(self._live.items()) if number > mine]
        if not later:
            _restore(self._before)
        elif later[0]._before == self._set:  # else somebody set another one in between, which stays theirs
            later[0]._before = self._before

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Measure a product on the model's device, and say aloud if the setting changes nothing there."""
        if state is not None:
            self.loss_dtype.load_state_dict(state.get("loss", {}))
        parameter = next(context.model.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._format = float32_matmul_format(self._device)
        if not self.is_active:
            context.services.say(f"efftrain: matmul: {self.config.precision} is INACTIVE: {self._reason()}")

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the loss as it is; the first one tells what it was computed in."""
        self.loss_dtype.tell(task_loss, context, self.loss)
        return task_loss

    @property
    def is_active(self) -> bool:
        """Whether products are computed in what was asked for: measured, not looked up. False before `begin`."""
        if self.config.precision == "highest":
            return self._format == "float32"
        return self._format in ("tf32", "bf16")

    def _reason(self) -> str:
        device, asked = self._device, self.config.precision
        if asked == "highest":
            return f"products on {device.type} are still rounded to {self._format}"
        still = f"float32 products on {device.type} stay float32, because"
        if device.type == "cuda":
            if matmul_hardware(device)["tf32"]:
                return f"{still} TF32, which this GPU has, is switched off outside torch (NVIDIA_TF32_OVERRIDE=0, say)"
            major, minor = torch.cuda.get_device_capability(device)
            return f"{still} compute capability {major}.{minor} has no TF32 (NVIDIA's of 8.0 and later have)"
        if device.type != "cpu":
            return f"{still} this device has no such switch"
        if asked == "high":
            return f"{still} a CPU has no TF32; medium allows bfloat16 where oneDNN uses it"
        if not (_BACKENDS.mkldnn.is_available() and _BACKENDS.mkldnn.enabled):
            return f"{still} oneDNN is not there or switched off"
        if not matmul_hardware(device)["bf16"]:
            return f"{still} this CPU has no bf16 instructions"
        return f"{still} oneDNN does not use this CPU's bf16 instructions for them"

    def finish(self, context: Context) -> None:
        """Put torch's setting back; weights need no baking."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what the loss was computed in; all else is measured anew."""
        return {"loss": self.loss_dtype.state_dict()}

    def report(self) -> dict[str, Any]:
        """Return what was asked for, what was before, what products were really computed in, and the loss's dtypes."""
        return {
            "requested": self.config.precision,
            "previous": self.previous,
            "device": self._device.type,
            "active": self.is_active,
            "products_in": self._format,
            **({} if self.is_active or self._format is None else {"reason": self._reason()}),
            **self.loss_dtype.report(),
        }


def _switches() -> tuple[str, str, str]:
    """Return torch's setting, and the newer switches of each backend behind it."""
    newer = _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision
    return float32_matmul_precision(), *newer


def _restore(switches: tuple[str, str, str]) -> None:
    precision, *newer = switches
    # this one overwrites the newer switches, so that they come second
    torch.set_float32_matmul_precision("highest" if precision == "mixed" else precision)
    _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision = newer
