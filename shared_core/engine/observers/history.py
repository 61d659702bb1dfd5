"""Figures of a run over its steps, thinned out to a limited number of points, for the plots of a receipt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_core.engine.registry import REGISTRY
from shared_core.engine.technique import returned

if TYPE_CHECKING:
    from shared_core.engine.session import Session
    from shared_core.engine.technique import Technique


LIMIT = 200  # even: see `Series.add`
# evaluation times, which differ between otherwise identical runs
_TIMINGS = ("_runtime", "_per_second", "_time")


def numeric_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of a validation, without its timings and the figures of techniques.

    Example:
        >>> numeric_metrics({"eval_loss": 0.5, "eval_runtime": 3.0, "note": "x"})
        {'eval_loss': 0.5}
    """
    return {name: float(value) for name, value in metrics.items() if _is_metric(name, value)}


def _is_metric(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    of_a_technique = name.partition("/")[0] in REGISTRY  # Lightning also returns the figures that we logged
    return is_number and not isinstance(value, bool) and not name.endswith(_TIMINGS) and not of_a_technique


def _device_memory() -> dict[str, float]:
    """Return the present and peak bytes of tensors on the CUDA device; empty without one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]  # the flat form is much slower
    return {"memory/allocated": float(found["current"]), "memory/largest": float(found["peak"])}


class Series:
    """Points over steps. Above `LIMIT` points every other one is dropped, but never the first or the latest.

    The result depends only on the added points, so a resumed run ends with the same ones as an uninterrupted run.

    Example:
        >>> series = Series()
        >>> for step in range(1, 1002):
        ...     series.add(step, {"prune/sparsity": step / 2000})
        >>> len(series.points), [point["step"] for point in series.points[:3]], series.points[-1]["step"]
        (126, [1, 9, 17], 1001)
    """

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self._stride, self._seen = 1, 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add figures of a step. For the latest step, add to its figures or replace them."""
        if not values:
            return
        if self.points and self.points[-1]["step"] == step:
            self.points[-1] |= values
            return
        # The latest point is always kept. When the next one comes, it is dropped unless it lies on the stride.
        if self.points and (self._seen - 1) % self._stride:
            self.points.pop()
        self.points.append({"step": step, **values})
        self._seen += 1
        # Drop every other point: memory stays bounded for runs of any length.
        if len(self.points) > LIMIT:  # an odd number, so the latest stays
            self.points = self.points[::2]
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the points, their stride and the number of points seen."""
        return {"points": [dict(point) for point in self.points], "stride": self._stride, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.points = [dict(point) for point in state["points"]]
        self._stride, self._seen = int(state["stride"]), int(state["seen"])


class History:
    """Logged figures of the techniques and metrics of the user's validations, over applied steps."""

    def __init__(self) -> None:
        self._series = {"figures": Series(), "validation": Series()}

    def logged(self, step: int, techniques: Mapping[str, Technique]) -> dict[str, float]:
        """Add the figures of the techniques, and on CUDA the present and peak memory. Return the figures.

        Raises:
            TypeError: If the config of a technique does not declare a figure.
        """
        found: dict[str, float] = {}
        for key, one in techniques.items():
            figures = returned(key, "figures", one.figures(), Mapping)
            if unknown := ", ".join(sorted(figures.keys() - {f"{key}/{name}" for name in one.config.figures})):
                raise TypeError(f"{key}: {type(one.config).__name__}.figures must declare all figures, got {unknown}")
            found |= figures
        self._series["figures"].add(step, {name: float(value) for name, value in found.items()} | _device_memory())
        return found

    def validated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a validation."""
        self._series["validation"].add(step, numeric_metrics(metrics))

    def to_dict(self) -> dict[str, Any]:
        """Return the points for the receipt, and under ``validation`` the latest value of each metric."""
        points = self._series["validation"].points
        latest = {name: value for point in points for name, value in point.items() if name != "step"}
        return {"validation": latest, "history": {name: series.points for name, series in self._series.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Return all points."""
        return {name: series.state_dict() for name, series in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the points, unless there are some: loading the best checkpoint must not erase the history."""
        for name, series in self._series.items():
            if name in state and not series.points:
                series.load_state_dict(state[name])


class Validation:
    """Keeps the metrics of the last validation and whether the model has changed since."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: tuple[int, dict[str, float]] | None = None
        self._final: dict[str, float] = {}

    def saw(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Record the metrics of a validation of the present weights. Those of one step (one per data set) add up."""
        context = self._session.context_for("evaluated")
        before = self._last[1] if self._last and self._last[0] == context.step else {}
        self._last, context.unvalidated = (context.step, before | numeric_metrics(metrics)), False

    def restored(self) -> None:
        """Record that a checkpoint was loaded: unless it is of the last validated step, its weights are unvalidated."""
        context = self._session.context_for("load_state_dict")
        context.unvalidated |= not (self._last and self._last[0] == context.step)

    @property
    def is_current(self) -> bool:
        """True if the model has not changed since the last validation."""
        context = self._session.context
        return bool(context and not context.unvalidated and self._last and self._last[0] == context.step)

    def finals(self) -> dict[str, float]:
        """Return the metrics of the final model, empty if none are known."""
        return self._final or dict(self._last[1] if self._last and self.is_current else {})

    def of_final(self, evaluate: Callable[[], Mapping[str, float]], *, after_steps: bool = False) -> None:
        """Evaluate the finished model if it changed after the last validation. The metrics go into the receipt.

        Args:
            evaluate: Returns the metrics of the present weights, on every process.
            after_steps: True if training steps after the last validation count as a change too.
        """
        context = self._session.context
        if context is not None and (context.unvalidated or (after_steps and not self.is_current)):
            self._final = {name: value for name, value in numeric_metrics(evaluate()).items() if name != "epoch"}
            found = ", ".join(f"{name} {value:.6g}" for name, value in self._final.items())
            self._session.note(f"the final model was evaluated after its last change: {found}")
