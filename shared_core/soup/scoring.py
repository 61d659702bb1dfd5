"""The metric of what is written into a candidate, each evaluated once or read from the journal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shared_core.errors import ConfigError
from shared_core.soup.averaging import Candidate, non_finite_tensor
from shared_core.soup.candidates import AdapterCandidate
from shared_core.soup.journal import Journal
from shared_core.soup.parallel import scores_in_processes
from shared_core.soup.sources import Ingredient

Evaluate = Callable[[dict[str, Tensor]], float]


class Scoring:
    """Evaluates candidates and keeps their scores.

    Args:
        evaluate: Returns the metric of a state dict.
        candidate: What ingredients and averages are written into.
        journal: Where scores are kept.
        progress: Called after each evaluation.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        candidate: Candidate | AdapterCandidate,
        journal: Journal,
        progress: Callable[[], object] | None = None,
    ) -> None:
        self._evaluate, self._candidate, self._journal = evaluate, candidate, journal
        self._progress = progress or (lambda: None)

    def score(self, key: str, write: Callable[[], Any]) -> float:
        """Return the score kept under `key`, or that of what `write` writes into the candidate."""
        known = self._journal.score(key)
        if known is None:
            write()
            known = number(self._evaluate(self._candidate.state_dict))
            self._keep(key, known)
        return known

    def _keep(self, key: str, score: float) -> None:
        self._journal.record(key, score)
        self._progress()

    def in_processes(
        self,
        items: Sequence[tuple[int, Ingredient]],
        jobs: int,
        after_average: Callable[[dict[str, Tensor]], None] | None,
    ) -> None:
        """Evaluate numbered ingredients alone, those that have no score yet, in so many processes."""
        if jobs < 1:
            raise ConfigError(f"soup: jobs must be at least 1, got {jobs!r}")
        left = [(position, item) for position, item in items if self._journal.score(str(position)) is None]
        if jobs > 1 and left:
            for position, score in scores_in_processes(left, self._evaluate, after_average, jobs):
                self._keep(str(position), number(score))

    def alone(self, position: int, item: Ingredient, known: float | None = None) -> tuple[float | None, str]:
        """Return the score of one ingredient and ``""``, or None and why it is left out.

        Args:
            position: Its place among the ingredients.
            item: The ingredient.
            known: Its score, if it is known already.
        """
        key = str(position)
        known = self._journal.score(key) if known is None else known
        bad = non_finite_tensor(item) if known is not None else self._candidate.write_single(item)
        if bad:
            return None, not_finite(bad)
        known = self.score(key, lambda: None) if known is None else known
        return (known, "") if math.isfinite(known) else (None, f"left out: its metric is {known}")


def not_finite(tensor: str) -> str:
    """Return why an ingredient with a NaN or an infinity in this tensor is not used."""
    return f"left out: {tensor!r} holds a NaN or an infinity"


def number(score: Any) -> float:
    """Return what an evaluation returned as a float.

    Raises:
        ConfigError: If it is not one number.
    """
    if isinstance(score, Tensor) and score.numel() != 1:
        raise ConfigError(f"soup: evaluate must return one number, got a tensor of shape {tuple(score.shape)}")
    try:
        return float(score)
    except (TypeError, ValueError):
        raise ConfigError(f"soup: evaluate must return a number, got {score!r:.80}") from None
