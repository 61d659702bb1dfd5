"""Check that optimizer steps arrive at the rate that the schedules assume."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared_core.engine.session import Session


class Pace:
    """Warn once if optimizer steps arrive faster or slower than the schedules assume."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._early_skips, self._is_on_plan = 0, True

    def stepped(self, step: int, planned: int | None) -> None:
        """Note once that more steps were applied than planned. Schedules keep their last value."""
        if planned is not None and step > planned:
            self._session.note(
                f"training continues after the {planned} planned steps: schedules stay at their final value, and "
                "techniques without an end continue"
            )

    def look_ahead(self, done: float, *, stops_as_planned: bool = True) -> None:
        """Compare the steps so far with the plan.

        Args:
            done: Share of the run's data seen so far. The trainer ends the run by it.
            stops_as_planned: True if the trainer also stops after the planned number of steps.
        """
        context = self._session.context_for("look_ahead")
        total = context.total_steps or 0
        expected, applied = done * total, context.step
        if done < 0.25:
            self._early_skips = context.skipped  # the initial loss scale is too large and adapts in a few steps
        if not self._is_on_plan or expected < 10:
            return
        counted = float(applied + self._early_skips)
        counted = min(counted, expected) if stops_as_planned else counted
        # Tolerate 10 % and one step: rounding of the last window and a few skipped steps.
        if abs(counted - expected) <= 0.1 * expected + 1:
            return
        self._is_on_plan, end = False, round(applied / done)
        never = "; ".join(f"{key}: {what} (step {step})" for key, step, what in context.events_after(end))
        context.note(
            f"optimizer steps do not arrive as planned: {applied} applied, {expected:.0f} planned so far; at "
            f"this rate the run ends after {end} of {total} steps" + (f", before {never}" if never else "") + ". "
            "Schedules are not adapted: give positions as step numbers, or give the trainer its true number of steps"
        )
