"""Results of the user's validations, and the metrics of the final model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from shared_core.engine.checks.preflight import check_all, reported_names
from shared_core.engine.observers.history import numeric_metrics

if TYPE_CHECKING:
    from shared_core.engine.session import Session


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

    def preflight(self, evaluate: Callable[[], Iterable[str]], also: Mapping[str, str] | None = None) -> None:
        """Evaluate one batch at the start of a run to check that evaluation reports the metrics the recipe needs.

        If the user's evaluation fails on so little data, a note says so. Nothing is evaluated in a resumed run, or if
        no metric is needed.

        Args:
            evaluate: Evaluates one batch without side effects and returns the metric names, on every process.
            also: Metrics that the trainer itself needs, by option.

        Raises:
            ConfigError: If a metric is not reported.
        """
        wanted = {**self._session.recipe.needed_metrics(), **(also or {})}
        if not wanted or self._session.step:
            return
        names, reason = reported_names(evaluate)
        if names is not None:
            check_all(wanted, names)
            return
        self._session.note(
            f"could not check that evaluation reports {', '.join(sorted(set(wanted.values())))}: evaluating one batch "
            f"at the start failed ({reason})"
        )

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
