"""The candidates of a search: their costs and qualities, the Pareto front, and its table and picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from shared_core.files.atomic import atomic_write
from shared_core.libraries import optional
from shared_core.printing import table
from shared_core.runs.candidates import CostKind

State = Literal["cut", "trained", "stopped", "too costly", "impossible"]
_UNITS: Mapping[str, str] = {
    "bytes": "bytes", "flops": "FLOPs", "latency": "milliseconds", "onnxruntime": "milliseconds"
}  # fmt: skip


@dataclass(frozen=True)
class SearchRow:
    """A candidate that was proposed."""

    name: str
    """Name of its folder."""
    sizes: Mapping[str, int]
    state: State
    """``cut``: measured, but not trained yet; ``stopped``: its validations were among the worst."""
    cost: float | None = None
    """Bytes, FLOPs or milliseconds."""
    share: float | None = None
    """The cost divided by the uncut model's."""
    noise: float = 0.0
    """Half of the 95 % confidence interval of the share."""
    parameters: int | None = None
    """Counted in the file of the trained model."""
    quality: float | None = None
    """The metric; None if it was not measured, or is not finite."""
    metrics: Mapping[str, float] | None = None
    validations: tuple[tuple[int, float], ...] = ()
    """Steps and values of the metric in training."""
    model: str | None = None
    """Path of the trained model, relative to the search's folder."""
    seconds: float = 0.0
    """Seconds of training."""
    note: str = ""
    """Why it is impossible."""


@dataclass(frozen=True)
class SearchTable:
    """The candidates of a search so far."""

    rows: tuple[SearchRow, ...]
    kind: CostKind
    limit: float
    metric: str | None
    larger_is_better: bool = True

    @property
    def front(self) -> tuple[SearchRow, ...]:
        """The Pareto front, from the cheapest to the best: no other trained candidate is both cheaper and better.

        A candidate that is cheaper by no more than the noise of the measurement, but worse, is left out.
        """
        sign = 1 if self.larger_is_better else -1
        points = [(row.share, -sign * row.quality, row) for row in self.rows
                  if row.share is not None and row.quality is not None]  # fmt: skip
        found: list[SearchRow] = []
        best = math.inf
        for share, loss, row in sorted(points, key=lambda point: point[:2]):
            if loss >= best:
                continue
            while found and share - (found[-1].share or 0) < row.noise + found[-1].noise:
                found.pop()
            found.append(row)
            best = loss
        return tuple(found)

    @property
    def best(self) -> SearchRow | None:
        """The best candidate within the limit; of equally good ones the cheapest. None without one."""
        return next((row for row in reversed(self.front) if fits(row, self.limit)), None)

    def json(self) -> str:
        """Return the front and all candidates as JSON."""
        report: dict[str, Any] = {"metric": self.metric, "larger_is_better": self.larger_is_better, "cost": self.kind}
        rows = [asdict(row) for row in self.rows]
        report |= {"limit": self.limit, "front": [row.name for row in self.front]}
        return json.dumps({**report, "rows": rows}, indent=1)

    def table(self) -> Table:
        """Return one row per candidate of the front."""
        sizes = [*self.rows[0].sizes] if self.rows else []
        columns = ["candidate", *sizes, "parameters", _UNITS[self.kind], "of the uncut", self.metric or "no metric"]
        rows = []
        for row in self.front:
            noise = f" ± {100 * row.noise:.1f}" if row.noise else ""
            cost = f"{row.cost:,.4g}" if _UNITS[self.kind] == "milliseconds" else f"{row.cost:,.0f}"
            share = f"{100 * (row.share or 0):.1f}{noise} %"
            rows.append((row.name, *row.sizes.values(), f"{row.parameters:,}", cost, share, row.quality))
        return table("Pareto front", ("candidate",), columns, rows)

    def plot(self, file: Path | str) -> Path:
        """Draw quality against cost, with a line through the front. Return the file.

        Args:
            file: A ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        optional("matplotlib", "plots", "search plot")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        points = [(100 * row.share, row.quality) for row in self.rows
                  if row.share is not None and row.quality is not None]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), "o", color="grey", markersize=4, label="trained")
            front = [(100 * (row.share or 0), row.quality) for row in self.front]
            axes.plot(*zip(*front, strict=True), "o-", label="Pareto front")
        axes.axvline(100 * self.limit, linewidth=1, linestyle="--", color="grey", label="limit")
        axes.set_xlabel(f"{_UNITS[self.kind]} (% of the uncut model's)")
        axes.set_ylabel(self.metric or "")
        axes.legend()
        with atomic_write(file) as temporary:
            figure.savefig(temporary)
        return Path(file)


def fits(row: SearchRow, limit: float) -> bool:
    """Return True if a candidate's cost is within the limit, with its noise."""
    return row.share is not None and row.share + row.noise <= limit
