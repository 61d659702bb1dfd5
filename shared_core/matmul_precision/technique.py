"""The precision of float32 matrix products: TF32 or bf16 if the hardware has them, or else a note that it does not."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shared_core.engine.checks.loss_dtype import LossDtype
from shared_core.engine.plan import Touched
from shared_core.engine.technique import Context, Technique
from shared_core.hardware import (
    float32_matmul_format,
    float32_matmul_precision,
    matmul_switches,
    restore_matmul,
    why_matmul_inactive,
)
from shared_core.matmul_precision.config import MatmulPrecisionConfig


class MatmulPrecision(Technique):
    """Sets torch's ``float32_matmul_precision`` for one run, measures its effect, and restores it at the end.

    Args:
        config: The options.
    """

    config: MatmulPrecisionConfig
    _live: ClassVar[weakref.WeakValueDictionary[int, MatmulPrecision]] = weakref.WeakValueDictionary()
    """Instances that set the precision and have not restored it yet, in order: torch has one global setting."""

    def __init__(self, config: MatmulPrecisionConfig) -> None:
        super().__init__(config)
        self.loss_dtype = LossDtype()
        """The dtype of the first training loss."""
        self.previous: str | None = None
        """Torch's setting before this run, ``"mixed"`` if its newer switches were set. None before `attach`."""
        self._before, self._set = matmul_switches(), matmul_switches()
        """Torch's settings before `attach` and after it."""
        self._device = torch.device("cpu")
        self._format: str | None = None

    def attach(self, context: Context) -> Touched:
        """Set the precision, for evaluation too."""
        context.undo.callback(self._detach)
        if context.is_preview:
            return Touched(what="all float32 matrix products")
        self.previous = float32_matmul_precision()
        self._before = matmul_switches()
        # Increasing numbers record the order of setting.
        self._live[1 + max(self._live, default=0)] = self
        torch.set_float32_matmul_precision(self.config.precision)
        self._set = matmul_switches()
        return Touched(what="all float32 matrix products")

    def _detach(self) -> None:
        """Restore torch's setting. If a later run has set its own since, that run restores ours."""
        mine = next((number for number, one in self._live.items() if one is self), None)
        if mine is None:
            return
        del self._live[mine]
        # Runs may end in a different order than they began, so the earlier setting is passed on to the next run.
        later = [one for number, one in sorted(self._live.items()) if number > mine]
        if not later:
            restore_matmul(self._before)
        elif later[0]._before == self._set:  # otherwise other code changed it, so leave it
            later[0]._before = self._before

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Measure a product on the model's device, and warn if the setting changes nothing there."""
        if state is not None:
            self.loss_dtype.load_state_dict(state.get("loss", {}))
        parameter = next(context.model.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._format = float32_matmul_format(self._device)
        if reason := self._reason():
            context.services.say(f"efftrain: matmul: {self.config.precision} is INACTIVE: {reason}")

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the loss unchanged, and record the dtype of the first one."""
        self.loss_dtype.warn(task_loss, context, self.loss)
        return task_loss

    @property
    def is_active(self) -> bool:
        """True if products are measured to have the requested precision. False before `begin`."""
        return self._format is not None and not self._reason()

    def _reason(self) -> str:
        return why_matmul_inactive(self.config.precision, self._device, self._format)

    def finish(self, context: Context) -> None:
        """Restore torch's setting. The weights need no conversion."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the dtype of the loss. Everything else is measured again."""
        return {"loss": self.loss_dtype.state_dict()}

    def report(self) -> dict[str, Any]:
        """Return the requested and earlier setting, the measured format of products, and the loss's dtype."""
        return {
            "requested": self.config.precision,
            "previous": self.previous,
            "device": self._device.type,
            "active": self.is_active,
            "products_in": self._format,
            **({} if self.is_active or self._format is None else {"reason": self._reason()}),
            **self.loss_dtype.report(),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report as plain sentences, the result first. The report may come from a file."""
        if report["active"]:
            return [f"Multiplied float32 in {report['products_in']} on {report['device']}."]
        if report["products_in"] is None:
            return ["Changed nothing: training did not start."]
        return [f"Changed nothing: {report['reason']}."]
