"""Swaps weights into the model for evaluations and files, and the training weights back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared_core.engine.saving.session_state import unstepped
from shared_core.engine.technique import Purpose

if TYPE_CHECKING:
    from shared_core.engine.session import Session


class Swaps:
    """Counts nested evaluations and saves of a session, so that only the outermost swaps weights.

    Args:
        session: Its techniques swap. Before `begin` and after the run they swap nothing.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._evaluations, self._evaluation = 0, contextlib.ExitStack()
        self.is_saving = False
        """True during a save. Torch may then step the optimizer to create its state for the file."""

    @contextlib.contextmanager
    def during(self, purpose: Purpose) -> Iterator[None]:
        """Hold the weights for a purpose in the model, see `Session.swapped`."""
        if purpose == "evaluate":
            self.begin_evaluation()
            try:
                yield
            finally:
                self.leave_evaluation()
        elif self.is_saving:
            yield
        else:
            with self._saving(purpose):
                yield

    @contextlib.contextmanager
    def _saving(self, purpose: Purpose) -> Iterator[None]:
        session, self.is_saving = self._session, True
        try:
            session.refuse_changed()
            session.experts.join()
            optimizers = session.context.optimizers if session.context else ()
            with unstepped(optimizers), self._enter(purpose):
                yield
        finally:
            self.is_saving = False

    def _enter(self, purpose: Purpose) -> contextlib.ExitStack:
        live = self._session.context if self._session.is_live else None
        return contextlib.ExitStack() if live is None else self._session.hooks.entered(live, purpose)

    def begin_evaluation(self) -> None:
        """Hold the weights to evaluate from now on, for trainers that report a validation's start and end."""
        if not self._evaluations:
            self._session.refuse_changed()
            self._evaluation = self._enter("evaluate")
        # Counted only now: after an error, the script may go on and evaluate again.
        self._evaluations += 1

    def leave_evaluation(self) -> None:
        """End what `begin_evaluation` began. Does nothing without it."""
        if self._evaluations:
            self._evaluations -= 1
            if not self._evaluations:
                self._evaluation.close()

    def end_evaluation(self) -> None:
        """Put the training weights back if an exception has left others in the model."""
        self._evaluation.close()
