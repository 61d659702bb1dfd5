"""Quality against weights left: the rows of a search, as table, JSON, CSV and plot."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from shared_core.errors import ConfigError, nearest
from shared_core.files.atomic import atomic_write
from shared_core.libraries import optional

_SMALLER_IS_BETTER = frozenset({"loss", "perplexity", "ppl", "error", "err", "wer", "cer", "mae", "mse", "rmse", "nll"})
_USUAL = ("eval_loss", "val_loss")
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
        if dense is None:
            return None
        tickets = [row for row in self.rows if row.control == "none" and row.round > 0 and row.quality is not None]
        good = [row for row in tickets if _as_good(float(row.quality or 0.0), dense, self.larger_is_better)]
        return min(good, key=lambda row: row.left, default=None)

    def table(self) -> Table:
        """Return one row a run."""
        table = Table(title=f"lottery tickets: {self.metric or 'nothing was measured'}", title_justify="left")
        for name in ("round", "run", "weights left", "%", "quality", "best at step", "dense quality at step", "replay"):
            table.add_column(name, justify="left" if name in ("run", "replay") else "right", overflow="fold")
        for row in self.rows:
            quality, best, reached = (
                "–" if value is None else f"{value:.6g}" for value in (row.quality, row.best_step, row.reached_dense_at)
            )
            label = "dense" if row.round == 0 else _LABELS[row.control]
            numbers = (f"{row.kept:,}", f"{100 * row.left:.2f}", quality, best, reached)
            table.add_row(str(row.round), label, *numbers, row.replay or "")
        return table

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
    mode: Literal["auto", "max", "min"] = "auto",
    quality: Literal["last", "best"] = "last",
) -> TicketCurve:
    """Return the curve of finished runs.

    Args:
        results: Round, control, folder and what ``round.json`` in it holds; the dense run first.
        metric: As the trainer names it. By default ``eval_loss`` or ``val_loss``, or the only one there is.
        mode: Whether it is better when larger; ``auto``: not for losses and errors.
        quality: Of a run: the metric of its last validation, or of its best one.

    Raises:
        ConfigError: If no validation reported the metric, or it must be chosen.
    """
    name = _metric(results[0][3], metric)
    larger = name is not None and (mode == "max" if mode != "auto" else not _is_loss(name))
    histories = [_history(result, name, larger) for *_, result in results]
    dense = _quality(histories[0], quality, larger)
    rows = []
    for (number, control, folder, result), history in zip(results, histories, strict=True):
        # NaN became the worst value in `_history`: it never wins here.
        best = max(history, key=lambda point: point[1] if larger else -point[1], default=None)
        reached = None
        if dense is not None:
            reached = next((step for step, value in history if _as_good(value, dense, larger)), None)
        rows.append(
            CurveRow(
                round=number,
                control=control,
                kept=result["kept"],
                left=result["kept"] / result["numel"],
                quality=_quality(history, quality, larger),
                best_step=best[0] if best else None,
                reached_dense_at=reached,
                replay=result["replay"],
                folder=folder.name,
            )
        )
    return TicketCurve(tuple(rows), name, larger)


def _metric(dense: dict[str, Any], metric: str | None) -> str | None:
    known = sorted({name for entry in dense["history"] for name in entry["metrics"]})
    if metric is not None:
        if metric not in known:
            told = f" ({dense['unmeasured']})" if dense.get("unmeasured") else nearest(metric, known)
            raise ConfigError("lottery", f"metric must be one that validation reports, got {metric!r}{told}")
        return metric
    usual = next((name for name in _USUAL if name in known), None)
    if usual is None and len(known) > 1:
        raise ConfigError("lottery", "metric must be chosen, got none", f"it may be {', '.join(known)}")
    return usual or (known[0] if known else None)


def _is_loss(name: str) -> bool:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return any(word in _SMALLER_IS_BETTER or word.endswith("loss") for word in words)


def _history(result: dict[str, Any], metric: str | None, larger: bool) -> list[tuple[int, float]]:
    worst = -math.inf if larger else math.inf
    points = [(int(entry["step"]), float(entry["metrics"][metric])) for entry in result["history"]
              if metric in entry["metrics"]]  # fmt: skip
    # A diverged validation must not compare as best, nor as "as good as dense": every comparison with NaN is False.
    return [(step, worst if math.isnan(value) else value) for step, value in points]


def _quality(history: list[tuple[int, float]], which: str, larger: bool) -> float | None:
    if not history:
        return None
    return history[-1][1] if which == "last" else (max if larger else min)(value for _, value in history)


def _as_good(value: float, than: float, larger: bool) -> bool:
    return value >= than if larger else value <= than
