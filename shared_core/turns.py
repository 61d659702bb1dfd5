"""Whose turn it is: for each verb of a step, the techniques that do something then."""

from __future__ import annotations

from collections.abc import Mapping

from shared_core.technique import FINISH_ORDER, Technique, in_order, overrides

_STEP = ("before_optimizer_step", "after_optimizer_step", "skipped_optimizer_step")
_VERBS = (
    "forward", "loss", *_STEP, "before_eval", "after_eval", "before_save", "after_save", "evaluated", "constrain",
)  # fmt: skip


Turns = dict[str, list[tuple[str, Technique]]]


def driven(techniques: Mapping[str, Technique]) -> Turns:
    """Return, for each verb of every step or so, the techniques that do something then, in the order of their turns.

    Args:
        techniques: Recipe key → technique, in the order of composition.
    """
    turns = {
        verb: [(key, technique) for key, technique in techniques.items() if overrides(technique, verb)]
        for verb in _VERBS
    }
    # Gradients are made private before another technique reads them: what it makes of them then gives nothing away.
    turns["before_optimizer_step"].sort(key=lambda turn: turn[0] != "dp")
    return turns


def leave_out(turns: Turns, key: str, verb: str) -> None:
    """Ask a technique no more for one verb; a round that is under way goes on as it began."""
    turns[verb] = [turn for turn in turns[verb] if turn[0] != key]


def to_finish(techniques: Mapping[str, Technique]) -> list[str]:
    """Return the keys in the order in which a run's end is told."""
    return in_order(techniques, FINISH_ORDER)
