"""The fits of measured curves, and the page and the plot that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

AXES = ("parameters", "tokens", "vocabulary", "rank", "ingredients", "blocks", "examples")
COMMENT = "<!-- written by `make cost`; change benchmarks/cost_page.py instead -->"
INTRODUCTION = """\
# What a technique costs, and how the cost grows

Each row is one size growing while the others stay; the fit tells what to expect of a larger run. A power law n^k with
k = 1 doubles where n doubles, k = 0.5 grows by 1.41; a line a + b·n has a part that does not grow. "For comparison"
marks what the technique takes the place of. What a whole step costs beside its peers is measured by `make bench`, the
memory of a planned run is told by `eff plan` ([scale](scale.md)).

![measured growth, relative to the smallest size](cost.svg)
"""
METHOD = """\
## How it was measured

{device}, one thread, {versions}, on {date}, by `make cost`. Times are medians of CPU time (`time.process_time`) of one
process, differences are paired in turn; memory is that of torch's CPU allocator at its peak, or of all live tensors.
Layers are linear, {layers} of them and square; chunked distillation has 128 features on both sides; soups accept every
checkpoint. Constants are this processor's, exponents mostly not: where something falls out of a cache, or temporaries
become so large that the allocator hands them back to the system each time, an exponent lies above its law; overheads of
small sizes lower it. No GPU was measured.
"""


def power_law(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return (c, k) of ``c·n^k``, by least squares of the logarithms.

    Example:
        >>> [round(value, 3) for value in power_law([1, 10, 100], [2, 20, 200])]
        [2.0, 1.0]
    """
    k, log_c = np.polyfit(np.log(sizes), np.log(values), 1)
    return float(np.exp(log_c)), float(k)


def line(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) of ``a + b·n``, by least squares of relative errors.

    Example:
        >>> [round(value, 3) for value in line([1, 2, 4], [5, 7, 11])]
        [3.0, 2.0]
    """
    b, a = np.polyfit(sizes, values, 1, w=1 / np.asarray(values, dtype=float))
    return float(a), float(b)


def fit_text(curve: Mapping[str, Any]) -> str:
    unit = curve["unit"]
    if curve["law"] == "power":
        return f"n^{power_law(curve['sizes'], curve['values'])[1]:.2f}"
    a, b = line(curve["sizes"], curve["values"])
    if abs(b) * curve["sizes"][-1] < 0.02 * a:
        return f"{a:.3g} {unit}, flat"
    return f"{a:.3g} {unit} {'-' if b < 0 else '+'} {_each(abs(b), unit)}·n"


def _each(value: float, unit: str) -> str:
    """Return a small time or memory in the unit in which it has digits before the point."""
    ladder = (
        [("ms", 1.0), ("µs", 1e3), ("ns", 1e6)] if unit == "ms" else [("MiB", 1.0), ("KiB", 2.0**10), ("B", 2.0**20)]
    )
    name, factor = next(((name, factor) for name, factor in ladder if value * factor >= 0.9995), ladder[-1])
    return f"{value * factor:.3g} {name}"


def _size(size: int) -> str:
    return f"{size / 2**20:g} Mi" if size >= 1 << 20 else f"{size}"


def page(result: Mapping[str, Any]) -> str:
    """Return the page of a result, as it stands in ``docs/cost.md``."""
    parts = [COMMENT, INTRODUCTION]
    for axis in AXES:
        rows = [
            f"## With {axis}\n",
            "| technique | what | n | measured | fit | at the largest, each | expected |",
            "|---|---|---|---|---|---|---|",
        ]
        for curve in result["curves"]:
            if curve["axis"] != axis:
                continue
            sizes, values, unit = curve["sizes"], curve["values"], curve["unit"]
            cells = (
                f"`{curve['technique']}`",
                curve["quantity"],
                ", ".join(map(_size, sizes)),
                f"{', '.join(f'{value:.3g}' for value in values)} {unit}",
                fit_text(curve),
                _each(values[-1] / sizes[-1], unit),
                curve["why"],
            )
            rows.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(rows) + "\n")
    again = "".join(f"`{key}` was measured again: {told}.\n" for key, told in result["about"].get("again", {}).items())
    parts.append(METHOD.format(**result["about"]) + again)
    return "\n".join(parts)


def figures(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what `eff explain` estimates by: per technique the curves over parameters, as ``a + c·n^k``.

    Curves for comparison are left out. So are those over other sizes, which do not follow from a model alone.
    """
    laws: dict[str, list[dict[str, Any]]] = {}
    for curve in result["curves"]:
        if curve["axis"] == "parameters" and "for comparison" not in curve["quantity"]:
            if curve["law"] == "power":
                a, (c, k) = 0.0, power_law(curve["sizes"], curve["values"])
            else:
                (a, c), k = line(curve["sizes"], curve["values"]), 1.0
            law = {name: float(f"{value:.4g}") for name, value in (("a", a), ("c", c), ("k", k))}
            laws.setdefault(curve["technique"], []).append(
                {"what": curve["quantity"], "unit": curve["unit"], **law, "largest": curve["sizes"][-1]}
            )
    return laws


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Draw each curve relative to its smallest size, times as lines, memory dashed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.hashsalt": "efftrain", "svg.fonttype": "none"}  # the same file from the same numbers, in text
    figure = Figure(figsize=(14, 10), layout="constrained")
    for place, (axis, panel) in enumerate(zip(AXES, figure.subplots(2, 4).flat, strict=False)):
        curves = [curve for curve in result["curves"] if curve["axis"] == axis]
        largest = max(curve["sizes"][-1] / curve["sizes"][0] for curve in curves)
        panel.plot([1, largest], [1, largest], color="0.8", linewidth=6, zorder=0, label="n")
        for color, curve in zip(mpl.colormaps["tab20"].colors, curves, strict=False):
            x = np.asarray(curve["sizes"]) / curve["sizes"][0]
            y = np.asarray(curve["values"]) / curve["values"][0]
            style = "-" if curve["unit"] == "ms" else "--"
            panel.plot(
                x, y, style, color=color, marker="o", markersize=3, label=f"{curve['technique']}: {curve['quantity']}"
            )
        panel.set(xscale="log", yscale="log", title=f"with {axis}", ylabel="" if place % 4 else "times the smallest's")
        for one in (panel.xaxis, panel.yaxis):
            one.set_ticks([1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32])
            one.set_ticks([], minor=True)
        panel.legend(fontsize=6.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.axes[-1].set_axis_off()
    figure.savefig(file, metadata={"Date": None})
