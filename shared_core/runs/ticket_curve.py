"""Quality against weights left: the rows of a lottery search, as table, JSON, CSV and plot."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from shared_core.errors import ConfigError, nearest
from shared_core.files.atomic import atomic_write
from shared_core.libraries import optional
from shared_core.runs.rows import Mode, is_larger_better, table_of, usual_metric

_LABELS = {"none": "winning ticket", "random_reinit": "random re-init", "random_mask": "random mask"}


@dataclass(frozen=True)
class CurveRow:
    """One run of a search."""

    round: int
    control: str
    kept: int
    """Weights left, of those within reach."""
    left: float
    """Their share."""
    quality: float | None
    """The metric at the end, or the best one; None if nothing was measured."""
    best_step: int | None
    """The step of the best validation, which is where early stopping would end."""
    reached_dense_at: int | None
    """The first validated step that is as good as the dense run's quality; None if there is none."""
    replay: str | None
    """Whether the steps up to k were those of the dense run bit for bit."""
    folder: str
    """Under the search's folder."""


@dataclass(frozen=True)
class TicketCurve:
    """The runs of a search, the dense one first, and what their quality is."""

    rows: tuple[CurveRow, ...]
    metric: str | None
    larger_is_better: bool

    @property
    def smallest_winning(self) -> CurveRow | None:
        """The sparsest ticket that is as good as the dense run, None if no ticket is."""
        dense = self.rows[0].quality
        good = [
            row for row in self.rows
            if row.control == "none" and row.round > 0 and _is_as_good(row.quality, dense, self.larger_is_better)
        ]  # fmt: skip
        return min(good, key=lambda row: row.left, default=None)

    def table(self) -> Table:
        """Return one row a run."""
        columns = ["round", "run", "weights left", "%", "quality", "best at step", "dense quality at step", "replay"]
        rows = []
        for row in self.rows:
            label = "dense" if row.round == 0 else _LABELS[row.control]
            weights = (f"{row.kept:,}", f"{100 * row.left:.2f}")
            measured = (row.quality, row.best_step, row.reached_dense_at)
            rows.append((row.round, label, *weights, *measured, row.replay or ""))
        return table_of(f"lottery tickets: {self.metric or 'nothing was measured'}", columns, ("run", "replay"), rows)

    def json(self) -> str:
        """Return the curve as JSON."""
        told = {"metric": self.metric, "larger_is_better": self.larger_is_better}
        return json.dumps({**told, "rows": [asdict(row) for row in self.rows]}, indent=1)

    def csv(self) -> str:
        """Return the rows as CSV, with a heading."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(CurveRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return text.getvalue()

    def plot(self, file: Path | str) -> Path:
        """Draw quality against weights left, a line for tickets and for each control, and return the file.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        optional("matplotlib", "plots", "lottery plot")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        dense = self.rows[0]
        if dense.quality is not None:
            axes.axhline(dense.quality, linewidth=1, linestyle="--", color="grey", label=f"dense: {dense.quality:.5g}")
        for control, label in _LABELS.items():
            rows = [row for row in self.rows if row.control == control and row.quality is not None]
            # Tickets have the dense run as their first point, which alone is no line.
            if len(rows) > (control == "none"):
                points = sorted((100 * row.left, row.quality) for row in rows)
                axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_inverted(True)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("weights left (%)")
        axes.set_ylabel(self.metric or "")
        axes.legend()
        with atomic_write(file) as temporary:
            figure.savefig(temporary)
        return Path(file)


def curve_of(
    results: Sequence[tuple[int, str, Path, dict[str, Any]]],
    *,
    metric: str | None = None,
    mode: Mode = "auto",
    quality: Literal["last", "best"] = "last",
) -> TicketCurve:
    """Return the curve of finished runs.

    Args:
        results: Round, control, folder and what ``round.json`` in it holds; the dense run first.
        metric: As the trainer names it. By default ``eval_loss`` or ``val_loss``, or the only one there is.
        mode: Whether it is better when larger; ``auto``: not for losses and errors.
        quality: Of a run: the metric of its last validation, or of its best one.
    """
    name = _metric(results[0][3], metric)
    larger = name is not None and is_larger_better(name, mode)
    dense = None
    rows: list[CurveRow] = []
    for number, control, folder, result in results:
        history = _history(result, name, larger)
        best = (max if larger else min)(history, key=lambda point: point[1], default=None)
        reached = best if quality == "best" else history[-1] if history else None
        dense = dense if rows else reached
        rows.append(
            CurveRow(
                round=number,
                control=control,
                kept=result["kept"],
                left=result["kept"] / result["numel"],
                quality=reached[1] if reached else None,
                best_step=best[0] if best else None,
                reached_dense_at=next(
                    (step for step, value in history if dense and _is_as_good(value, dense[1], larger)), None
                ),
                replay=result["replay"],
                folder=folder.name,
            )
        )
    return TicketCurve(tuple(rows), name, larger)


def _metric(dense: dict[str, Any], metric: str | None) -> str | None:
    known = sorted({name for entry in dense["history"] for name in entry["metrics"]})
    if metric is not None and metric not in known:
        told = f" ({dense['unmeasured']})" if dense.get("unmeasured") else nearest(metric, known)
        raise ConfigError("lottery", f"metric must be one that validation reports, got {metric!r}{told}")
    metric = metric or usual_metric(known)
    if metric is None and known:
        raise ConfigError("lottery", "metric must be chosen, got none", f"it may be {', '.join(known)}")
    return metric


def _history(result: dict[str, Any], metric: str | None, larger: bool) -> list[tuple[int, float]]:
    worst = -math.inf if larger else math.inf
    points = [(int(entry["step"]), float(entry["metrics"][metric])) for entry in result["history"]
              if metric in entry["metrics"]]  # fmt: skip
    # A diverged validation must not compare as best, nor as "as good as dense": every comparison with NaN is False.
    return [(step, worst if math.isnan(value) else value) for step, value in points]


def _is_as_good(value: float | None, than: float | None, larger: bool) -> bool:
    if value is None or than is None:
        return False
    return value >= than if larger else value <= than
