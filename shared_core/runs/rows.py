"""Rows of runs: the metric that they are compared by, and their table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from rich.table import Table

from shared_core.soup.config import larger_is_better

Mode = Literal["auto", "max", "min"]
_LOSSES = ("eval_loss", "val_loss")


def usual_metric(known: Iterable[str]) -> str | None:
    """Return the validation loss, or the only metric that there is; None: it must be chosen.

    Example:
        >>> usual_metric(["f1", "val_loss"]), usual_metric(["f1"]), usual_metric(["f1", "accuracy"])
        ('val_loss', 'f1', None)
    """
    names = sorted(known)
    return next((name for name in _LOSSES if name in names), names[0] if len(names) == 1 else None)


def is_larger_better(metric: str, mode: str) -> bool:
    """Return whether a metric is better when larger; with mode ``auto`` its name tells."""
    return mode == "max" if mode != "auto" else larger_is_better(metric)


def table_of(title: str, columns: Sequence[str], texts: Collection[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table for a terminal; figures that were not measured are dashes."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
