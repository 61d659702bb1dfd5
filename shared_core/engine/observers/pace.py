"""Check that optimizer steps come at the rate that positions were planned for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared_core.engine.session import Session


class Pace:
    """Says once, as soon as it is clear, that optimizer steps come at another rate than planned."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._early_skips, self._is_on_plan = 0, True

    def overrun(self, planned: int | None) -> None:
        """Say that more steps were applied than planned."""
        self._session.note(
            f"training goes on after the {planned} planned steps: schedules stay where they ended, and everything "
            "without an end of its own continues"
        )

    def look_ahead(self, done: float, *, stops_as_planned: bool = True) -> None:
        """Compare the steps so far with the plan.

        Args:
            done: The share of the run's data that was trained on, by which the trainer will end the run.
            stops_as_planned: Whether it also ends after the planned number of steps.
        """
        context = self._session.attached("look_ahead")
        total = context.total_steps or 0
        expected, applied = done * total, context.step
        if done < 0.25:
            self._early_skips = context.skipped  # a loss scale that is too large at first soon fits
        if not self._is_on_plan or expected < 10:
            return
        counted = float(applied + self._early_skips)
        counted = min(counted, expected) if stops_as_planned else counted
        # 10 % and a step: rounding of the last window, a few skips.
        if abs(counted - expected) <= 0.1 * expected + 1:
            return
        self._is_on_plan, end = False, round(applied / done)
        never = "; ".join(f"{key}: {what} (step {step})" for key, step, what in context.events_after(end))
        context.note(
            f"OPTIMIZER STEPS DO NOT COME AS PLANNED: {applied} were applied where {expected:.0f} were planned; at "
            f"this rate the run ends after {end} of {total}" + (f", before {never}" if never else "") + ". Positions "
            "stay where they are: give them as numbers of steps, or the trainer its true number of steps"
        )
