"""What validations of the user's own saw of the model, and what the final model is known to be worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from shared_core.engine.checks.preflight import check_all, reported_names
from shared_core.engine.receipt import figures

if TYPE_CHECKING:
    from shared_core.engine.session import Session


class Validation:
    """Knows the metrics of the last validation and whether it saw the model as it is now."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: tuple[int, dict[str, float]] | None = None
        self._final: dict[str, float] = {}

    def saw(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Take what a validation of the present weights found; several of one step (one a data set) add up."""
        context = self._session.attached("evaluated")
        before = self._last[1] if self._last and self._last[0] == context.step else {}
        self._last, context.unvalidated = (context.step, before | figures(metrics)), False

    def restored(self) -> None:
        """Weights of a checkpoint are in the model: others than those that were last validated, unless of that step."""
        context = self._session.attached("load_state_dict")
        context.unvalidated |= not (self._last and self._last[0] == context.step)

    @property
    def is_current(self) -> bool:
        """True if the last validation saw the model as it is now."""
        context = self._session.context
        return bool(context and not context.unvalidated and self._last and self._last[0] == context.step)

    def finals(self) -> dict[str, float]:
        """Return the figures of the final model, as far as any are known."""
        return self._final or dict(self._last[1] if self._last and self.is_current else {})

    def preflight(self, evaluate: Callable[[], Iterable[str]], also: Mapping[str, str] | None = None) -> None:
        """Check at the start of a run, by one evaluated batch, that evaluation will report what the recipe needs.

        Where the user's evaluation fails on so little data, a note says that its first run will tell. Nothing is
        evaluated in a resumed run, or where nothing needs it.

        Args:
            evaluate: Evaluates one batch and leaves no trace; returns the names of the metrics, on every process.
            also: Metrics that the trainer needs itself, by option.

        Raises:
            ConfigError: If one is not reported.
        """
        wanted = {**self._session.recipe.needed_metrics(), **(also or {})}
        if not wanted or self._session.step:
            return
        names, reason = reported_names(evaluate)
        if names is not None:
            check_all(wanted, names)
            return
        self._session.note(
            f"whether evaluation reports {', '.join(sorted(set(wanted.values())))} is only known after its first run: "
            f"one batch could not be evaluated at the start ({reason})"
        )

    def of_final(self, evaluate: Callable[[], Mapping[str, float]], *, after_steps: bool = False) -> None:
        """Evaluate the finished model if it holds what no validation has seen; the figures go into the receipt.

        Args:
            evaluate: Returns the metrics of the weights of now, on every process.
            after_steps: Whether steps of training after the last validation count, too.
        """
        context = self._session.context
        if context is not None and (context.unvalidated or (after_steps and not self.is_current)):
            self._final = {name: value for name, value in figures(evaluate()).items() if name != "epoch"}
            found = ", ".join(f"{name} {value:.6g}" for name, value in self._final.items())
            self._session.note(f"the final model was evaluated after its last change: {found}")
