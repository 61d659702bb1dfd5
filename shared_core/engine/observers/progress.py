"""Compare a run with its plans: which targets it has not reached, and at which rate its steps arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import all_finite, local_part

if TYPE_CHECKING:
    from shared_core.engine.session import Session


class Progress:
    """Reports what the plans still miss, which is final at the end of the run, and steps at another rate."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._final: dict[str, str] | None = None
        self._may_note_best = self._is_on_plan = True
        self._early_skips = 0

    def unreached(self) -> dict[str, str]:
        """Return the targets that the model, or the final model, has not reached, by technique."""
        if self._final is not None:
            return dict(self._final)
        context = self._session.context
        if context is None or not self._session.has_begun:
            return {}
        missing = {key: plan.missing for key, plan in context.ask_plans().items()}
        found = {key: text if isinstance(text, str) else text() for key, text in missing.items()}
        return {key: text for key, text in found.items() if text}

    def may_be_best(self) -> bool:
        """Return True if the present weights reach all targets, so that they may be the best. Warns the first time."""
        unreached = self.unreached()
        if unreached and self._may_note_best:
            self._may_note_best = False
            so_far = "; ".join(f"{key}: {text}" for key, text in unreached.items())
            self._session.note(f"a checkpoint is not a candidate for the best before all targets are reached: {so_far}")
        return not unreached

    def keep(self) -> dict[str, str]:
        """Return the unreached targets, which are final from now on: techniques forget at the end what they count."""
        self._final = self.unreached()
        return self._final

    def note_unreached(self) -> None:
        """Note unreached targets before techniques finish, and keep them for the receipt."""
        context, unreached = self._session.context_for("finish"), self.keep()
        planned, (applied, skipped) = context.total_steps, context.furthest
        is_short = planned is not None and applied + skipped < planned
        ended = f"the run ended after {applied} steps" + (f" of {planned} planned" if is_short else "")
        for key, text in unreached.items():
            context.note(f"{key} did not reach its target: {text}; {ended}")
        for key, step, what in context.events_after(applied):
            if key not in unreached:
                context.note(f"{key} did not run as planned: {ended}, before step {step}: {what}")
        if is_short or (planned is not None and applied > planned):
            context.note(f"steps: {applied} were applied, {planned} were planned")

    def note_unfinished(self, ends_by: str = "") -> None:
        """Note that the loop ended without finishing the model.

        Args:
            ends_by: The missing call.
        """
        context = self._session.context_for("finish")
        self._session.note(
            f"the model was not finished: the loop ended after {context.step} of {context.total_steps} steps{ends_by}; "
            "files that it saved hold training weights"
        )

    def passed_end(self) -> None:
        """Note once that more steps were applied than planned. Schedules keep their last value."""
        context = self._session.context_for("after_step")
        context.note(
            f"training continues after the {context.total_steps} planned steps: schedules stay at their final value, "
            "and techniques without an end continue"
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


def not_finite_note(model: nn.Module) -> str:
    """Return a warning if the trained weights, or this process's part, contain NaN or infinity; else ""."""
    parts = {name: local_part(value.detach()) for name, value in model.named_parameters() if not value.is_meta}
    held = {
        name: part
        for name, part in parts.items()
        # float8 (1 byte) and other libraries' packed tensors have no norm
        if part.is_floating_point() and part.itemsize > 1 and part.layout == torch.strided and type(part) is Tensor
    }
    if all_finite(held.values()):
        return ""
    wrong = next(name for name, value in held.items() if not all_finite([value]))
    return f"weights contain NaN or infinity, such as {wrong}: training diverged, or a callback changed them"
