"""The path of a greedy soup as table, JSON and plot.

The diagnosis of a soup's ingredients as table and plot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from torch import Tensor

from shared_core.files.atomic import atomic_write
from shared_core.libraries import optional
from shared_core.soup.adapters import AdapterWeights
from shared_core.soup.diagnosis import ALPHAS, Diagnosis
from shared_core.soup.greedy import SoupResult


def path_table(result: SoupResult) -> Table:
    """Return the path as a table: one row an ingredient, in the order tried.

    Args:
        result: As `greedy_soup` returns it.
    """
    table = Table(title=f"soup of {len(result.ingredients)} of {len(result.history)}: {result.score:.6g}")
    logged = any("logged" in row for row in result.history)
    for name, justify in (("", "right"), ("ingredient", "left"), *([("logged", "right")] if logged else []),
                          ("alone", "right"), ("average", "right"), ("in", "center"), ("why", "left")):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in result.history:
        keys = (*(["logged"] if logged else []), "single", "score")
        numbers = ["–" if row[key] is None else f"{row[key]:.6g}" for key in keys]
        table.add_row(str(row["order"] + 1), row["name"], *numbers, "✓" if row["accepted"] else "", row["reason"])
    return table


def path_dict(result: SoupResult) -> dict[str, Any]:
    """Return the path as plain values: score, ingredients, history, and the first member's metric if taken twice."""
    # an evaluation that gives NaN the second time is one that JSON has no number for
    repeat = result.repeat and [score if math.isfinite(score) else None for score in result.repeat]
    return {
        "score": result.score, "ingredients": result.ingredients, "history": result.history, "repeat": repeat,
        **rank_errors(result.state_dict),
    }  # fmt: skip


def path_json(result: SoupResult) -> str:
    """Return `path_dict` as JSON.

    Args:
        result: As `greedy_soup` returns it.

    Example:
        >>> path_json(SoupResult({}, ["a"], 0.5, []))
        '{"score": 0.5, "ingredients": ["a"], "history": [], "repeat": null}'
    """
    return json.dumps(path_dict(result))


def noise_of(result: SoupResult) -> str | None:
    """Return a line about an evaluation that gave equal weights two metrics, None if it did not.

    Args:
        result: As `greedy_soup` returns it.

    Example:
        >>> noise_of(SoupResult({}, ["a"], 0.5, [], repeat=(0.5, 0.5))) is None
        True
    """
    if result.repeat is None or result.repeat[0] == result.repeat[1]:
        return None
    first, second = result.repeat
    return (
        f"evaluation is not deterministic: {result.ingredients[0]} got {first:.6g}, then {second:.6g}; gains of "
        f"{abs(first - second):.2g} may be chance: fix its seed, evaluate in eval mode, or ask for more (min_delta)"
    )


def rank_errors(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what cutting an average of adapters to a lower rank lost, relative to it: in all, and in each layer."""
    if not isinstance(state_dict, AdapterWeights) or not state_dict.errors:
        return {}
    return {"rank_error": state_dict.error, "rank_errors": state_dict.errors}


def path_plot(result: SoupResult, file: str | Path) -> Path:
    """Write a plot of the metric along the path and return its file.

    Args:
        result: As `greedy_soup` returns it.
        file: Its ending names the format, one that matplotlib writes.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    optional("matplotlib", "plots", "soup plot")
    from matplotlib.figure import Figure

    rows = [row for row in result.history if not row["reason"].startswith("left out")]
    figure = Figure(figsize=(max(5.0, 0.45 * len(rows) + 2), 4), layout="constrained")
    axes = figure.subplots()
    alone = [row for row in rows if row["single"] is not None]
    axes.plot([row["order"] for row in alone], [row["single"] for row in alone], "o", label="ingredient alone")
    for accepted, mark, label in ((True, "^", "average, accepted"), (False, "x", "average, rejected")):
        tried = [row for row in rows if row["score"] is not None and row["accepted"] == accepted]
        axes.plot([row["order"] for row in tried], [row["score"] for row in tried], mark, label=label)
    axes.axhline(result.score, linewidth=1, linestyle="--", label=f"soup: {result.score:.5g}")
    axes.set_xticks(range(len(rows)), [Path(row["name"]).name for row in rows], rotation=45, ha="right")
    axes.set_ylabel("held-out metric")
    axes.legend()
    with atomic_write(file) as temporary:
        figure.savefig(temporary)
    return Path(file)


def diagnosis_table(found: Diagnosis) -> Table:
    """Return one row an ingredient: metric, distances, and metrics on the way to it from the best one.

    Args:
        found: As `diagnose` returns it.
    """
    left_out = [f"{_short(name)} {reason}" for name, reason in found.left_out.items()]
    table = Table(
        title=f"uniform soup of {len(found.names)}: {found.uniform:.6g}", box=box.SIMPLE, padding=(0, 1, 0, 0),
        caption="\n".join(left_out) or None, caption_justify="left",
    )  # fmt: skip
    ways = [f"α {alpha:g}" for alpha in ALPHAS[1:-1]]
    table.add_column("ingredient", min_width=12, overflow="fold")
    for name in ("alone", "from mean", "to best", *ways, "barrier"):
        table.add_column(name, justify="right", overflow="fold")
    best = found.names.index(found.best)
    for i, name in enumerate(found.names):
        numbers = [found.metrics[i], found.from_mean[i], found.distances[i][best]]
        if i != best:
            numbers += [*found.paths[name][1:-1], found.barriers[name]]
        ends = [] if i != best else [*[""] * len(ways), "the best"]
        table.add_row(_short(name), *(f"{number:.4g}" for number in numbers), *ends)
    return table


def _short(name: str) -> str:
    return "/".join(Path(name).parts[-2:])


def diagnosis_plot(found: Diagnosis, file: str | Path) -> Path:
    """Write a plot of the ways from the best ingredient to the others, and of all distances; return its file.

    Args:
        found: As `diagnose` returns it.
        file: Its ending names the format, one that matplotlib writes.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    optional("matplotlib", "plots", "soup plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    ways, matrix = figure.subplots(1, 2)
    for name, path in found.paths.items():
        ways.plot(ALPHAS, path, "o-", label=Path(name).name)
    ways.axhline(found.uniform, linewidth=1, linestyle="--", color="black", label="uniform soup")
    ways.set(xlabel=f"α from {Path(found.best).name}", ylabel="held-out metric")
    ways.legend(fontsize="small")
    labels = [Path(name).name for name in found.names]
    image = matrix.imshow(found.distances)
    matrix.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    matrix.set_yticks(range(len(labels)), labels)
    figure.colorbar(image, ax=matrix, label="L2 distance")
    with atomic_write(file) as temporary:
        figure.savefig(temporary)
    return Path(file)
