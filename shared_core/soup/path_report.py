"""The path of a greedy soup as table, JSON and plot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from shared_core.errors import MissingExtraError
from shared_core.soup.adapter_average import AdapterWeights
from shared_core.soup.greedy import SoupResult


def path_table(result: SoupResult) -> Table:
    """Return the path as a table: one row an ingredient, in the order tried."""
    table = Table(title=f"soup of {len(result.ingredients)} of {len(result.history)}: {result.score:.6g}")
    for name, justify in (("", "right"), ("ingredient", "left"), ("alone", "right"), ("average", "right"),
                          ("in", "center"), ("why", "left")):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in result.history:
        numbers = ["–" if row[key] is None else f"{row[key]:.6g}" for key in ("single", "score")]
        table.add_row(str(row["order"] + 1), row["name"], *numbers, "✓" if row["accepted"] else "", row["reason"])
    return table


def path_json(result: SoupResult) -> str:
    """Return the path as JSON: score, ingredients, history.

    Example:
        >>> path_json(SoupResult({}, ["a"], 0.5, []))
        '{"score": 0.5, "ingredients": ["a"], "history": []}'
    """
    return json.dumps({
        "score": result.score, "ingredients": result.ingredients, "history": result.history,
        **rank_errors(result.state_dict),
    })  # fmt: skip


def rank_errors(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what cutting an average of adapters to a lower rank lost, relative to it: in all, and in each layer."""
    if not isinstance(state_dict, AdapterWeights) or not state_dict.errors:
        return {}
    return {"rank_error": state_dict.error, "rank_errors": state_dict.errors}


def path_plot(result: SoupResult, file: str | Path) -> Path:
    """Write a plot of the metric along the path and return its file.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in result.history if row["single"] is not None]
    figure = Figure(figsize=(max(5.0, 0.45 * len(rows) + 2), 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["order"] for row in rows], [row["single"] for row in rows], "o", label="ingredient alone")
    for accepted, mark, label in ((True, "^", "average, accepted"), (False, "x", "average, rejected")):
        tried = [row for row in rows if row["score"] is not None and row["accepted"] == accepted]
        axes.plot([row["order"] for row in tried], [row["score"] for row in tried], mark, label=label)
    axes.axhline(result.score, linewidth=1, linestyle="--", label=f"soup: {result.score:.5g}")
    axes.set_xticks(range(len(rows)), [Path(row["name"]).name for row in rows], rotation=45, ha="right")
    axes.set_ylabel("held-out metric")
    axes.legend()
    figure.savefig(file)
    return Path(file)


def check_matplotlib() -> None:
    """Raise `MissingExtraError` unless plots can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("soup plot", "matplotlib", "plots") from error
