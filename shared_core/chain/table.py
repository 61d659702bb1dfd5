"""The stages of a chain with what they reached: as table and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from shared_core.errors import nearest

_USUAL, _VALIDATION = ("eval_loss", "val_loss"), ("eval_", "val_")


@dataclass(frozen=True)
class ChainRow:
    """One finished stage."""

    stage: int
    student: str | None
    teacher: str | None
    """As it was given, or the stage before; None: it learned from the labels alone."""
    flags: Mapping[str, Any]
    """Our flags that it trained with, without the teacher."""
    model: str
    """Where its model lies, under the chain's folder."""
    parameters: int
    teacher_parameters: int | None
    """None without a teacher, or with a cached one."""
    batches: int
    """Micro-batches that the teacher was asked about."""
    metrics: Mapping[str, float]
    seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ChainTable:
    """The finished stages of a chain, in order."""

    rows: tuple[ChainRow, ...]
    metric: str | None
    """What is shown of each."""

    def figure(self, row: ChainRow) -> float | None:
        """Return the metric of a stage, None if it was not measured."""
        return None if self.metric is None else row.metrics.get(self.metric)

    @property
    def known(self) -> list[str]:
        """What validations reported."""
        return sorted({name for row in self.rows for name in row.metrics if name.startswith(_VALIDATION)})

    def json(self) -> str:
        """Return the stages as JSON."""
        rows = [{**asdict(row), "metric": self.figure(row)} for row in self.rows]
        return json.dumps({"metric": self.metric, "stages": rows}, indent=1)

    def table(self) -> Table:
        """Return one row a stage."""
        hint = f", --metric may be {', '.join(self.known)}" if self.metric is None and self.known else ""
        table = Table(title=f"chain{hint}", title_justify="left")
        table.add_column("stage", justify="right")
        table.add_column("student", overflow="fold")
        table.add_column("parameters", justify="right")
        table.add_column("teacher", overflow="fold")
        table.add_column(self.metric or "no metric", justify="right")
        table.add_column("seconds", justify="right")
        for row in self.rows:
            figure = self.figure(row)
            reached = "–" if figure is None else f"{figure:.6g}"
            names = (str(row.stage), row.student or "the same", f"{row.parameters:,}", row.teacher or "none")
            table.add_row(*names, reached, f"{row.seconds:.1f}")
        return table


def table_of(rows: tuple[ChainRow, ...], metric: str | None) -> ChainTable:
    """Return the table; without a metric it shows the validation loss, or the only figure of a validation."""
    known = ChainTable(rows, None).known
    usual = next((name for name in _USUAL if name in known), known[0] if len(known) == 1 else None)
    return ChainTable(rows, metric or usual)


def unknown_metric(row: ChainRow, metric: str | None) -> str | None:
    """Return what to tell where the metric that was asked for is not among a stage's."""
    if metric is None or metric in row.metrics:
        return None
    return f"stage-{row.stage}: metric {metric!r} was not found{nearest(metric, row.metrics)}"
