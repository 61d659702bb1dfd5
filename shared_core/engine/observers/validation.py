"""What validations of the user's own saw of the model, and what the final model is known to be worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from shared_core.engine.preflight import check_all, reported_names
from shared_core.engine.receipt import figures
from shared_core.engine.technique import Context


class Validation:
    """Knows the metrics of the last validation and whether it saw the model as it is now."""

    def __init__(self) -> None:
        self._last: tuple[int, dict[str, float]] | None = None
        self._final: dict[str, float] = {}

    def saw(self, context: Context, metrics: Mapping[str, float | Tensor]) -> None:
        """Take what a validation of the present weights found; several of one step (one a data set) add up."""
        before = self._last[1] if self._last and self._last[0] == context.step else {}
        self._last, context.unvalidated = (context.step, before | figures(metrics)), False

    def restored(self, context: Context) -> None:
        """Weights of a checkpoint are in the model: others than those that were last validated, unless of that step."""
        context.unvalidated |= not (self._last and self._last[0] == context.step)

    def is_current(self, context: Context) -> bool:
        """Return whether the last validation saw the model as it is now."""
        return bool(not context.unvalidated and self._last and self._last[0] == context.step)

    def finals(self, context: Context | None) -> dict[str, float]:
        """Return the figures of the final model, as far as any are known."""
        last = self._last if context and self.is_current(context) else None
        return self._final or dict(last[1] if last else {})

    def preflight(self, context: Context, wanted: Mapping[str, str], evaluate: Callable[[], Iterable[str]]) -> None:
        """Check at the start of a run, by one evaluated batch, that evaluation will report what is needed.

        Where the user's evaluation fails on so little data, a note says that its first run will tell. Nothing is
        evaluated in a resumed run, or where nothing needs it.

        Args:
            context: The run.
            wanted: Metrics that are needed, by option.
            evaluate: Evaluates one batch and leaves no trace; returns the names of the metrics, on every process.

        Raises:
            ConfigError: If one is not reported.
        """
        if not wanted or context.step:
            return
        names, reason = reported_names(evaluate)
        if names is not None:
            check_all(wanted, names)
            return
        context.note(
            f"whether evaluation reports {', '.join(sorted(set(wanted.values())))} is only known after its first run: "
            f"one batch could not be evaluated at the start ({reason})"
        )

    def of_final(self, context: Context, evaluate: Callable[[], Mapping[str, float]], *, after_steps: bool) -> None:
        """Evaluate the finished model if it holds what no validation has seen; the figures go into the receipt.

        Args:
            context: The run.
            evaluate: Returns the metrics of the weights of now, on every process.
            after_steps: Whether steps of training after the last validation count, too.
        """
        if context.unvalidated or (after_steps and not self.is_current(context)):
            self._final = {name: value for name, value in figures(evaluate()).items() if name != "epoch"}
            found = ", ".join(f"{name} {value:.6g}" for name, value in self._final.items())
            context.note(f"the final model was evaluated after its last change: {found}")
