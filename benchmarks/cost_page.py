"""The fits of measured curves, and the page and the plot that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

AXES = ("parameters", "tokens", "vocabulary", "rank", "ingredients", "blocks", "examples")
COMMENT = "<!-- written by `make cost`; change benchmarks/cost_page.py instead -->"
INTRODUCTION = """\
# What a technique costs

Plan a run before you start it:

```
eff plan recipe.yaml --params 70e9 --gpus 64 --length 4096 --micro-batch 1 --memory 80 --bandwidth 50
eff plan --model path/to/config.json --gpus 8 --strategy ddp --precision 16-true --json
eff explain recipe.yaml --model path/to/folder --measure 10
```

`eff plan` prints the memory of each device, its peak, and the bytes sent per optimizer step. The exit code is 1 if the
peak exceeds `--memory`. [How it counts](#memory-of-a-planned-run). `eff explain --measure` trains a few steps here, and
prints by how much each technique lengthens a step.

![Measured growth of time and memory, relative to the smallest size](cost.svg)

The table shows how the cost of a technique grows with one size n, while the others stay fixed. Use the fit to estimate
a larger run: n^1 doubles when n doubles, and a + b·n has a part that does not grow. Rows "for comparison" show what
the technique replaces.

{date}, {device}, one thread, {versions}, by `make cost`.
Times are medians of CPU time. Memory is the peak of torch's CPU allocator, or all live tensors. The model is {layers}
square linear layers. No GPU was measured. [All sizes](../benchmarks/results/cost.json).
{again}"""
PLAN = """\
## Memory of a planned run

`eff plan` prints the formula of each line:

| letter | meaning |
|---|---|
| P, w | parameters, and bytes per stored weight: 4, or 2 with `16-true` |
| m | bytes of optimizer state per parameter: 2w with AdamW, w with SGD and momentum, 2 with 8-bit AdamW |
| c | bytes per number in computation: 2, or 4 with `fp32` |
| a | bytes of activations per token, block and unit of width: 79 with `fp32`, 54 with `mixed`, 42 with `16-true` |
| N, R | shards, processes |
| T, s, A | tokens per device and forward pass, tokens per example, micro-batches per step |
| L, h, V, r | blocks, their width, vocabulary, low rank |

- With `--model`, parameters are counted on the config's class if transformers has it, otherwise by formula.
- The peak is an upper bound: activations are freed while gradients appear.
- The constant a was measured on a Llama, without attention scores. Eager attention (`--attention eager`, or a class
  without fused attention) adds 3·c·T·L·s·heads. That fits BERT, Llama, Gemma 2 and GPT-2, and is a
  third of what DeBERTa stores.
- With FSDP2, the plan reduces gradients in every micro-batch. Trainers that wait for the last one send less and keep
  whole gradients.

The plan agrees with a decoder in two processes (within 1 %) and with activations of a Llama (within 10 %), by `python
benchmarks/speed/scale.py`. FSDP2's gathered blocks, autocast's copies and FP8 casts need a GPU and were not measured.
In Python, use `plan` of `shared_core.contrib.planning`, which may change in any version.
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
    about = result["about"]
    again = "".join(f"`{key}` was measured again: {when}.\n" for key, when in about.get("again", {}).items())
    parts = [COMMENT, INTRODUCTION.format(**{**about, "again": again})]
    rows = ["| what | n | cost at the largest n | fit |", "|---|---|---|---|"]
    for axis in AXES:
        for curve in result["curves"]:
            if curve["axis"] != axis:
                continue
            cells = (
                f"`{curve['technique']}`: {curve['quantity']}",
                axis,
                f"{curve['values'][-1]:.3g} {curve['unit']} at {_size(curve['sizes'][-1])}",
                fit_text(curve),
            )
            rows.append(f"| {' | '.join(cells)} |")
    parts.append("\n".join(rows) + "\n")
    return "\n".join([*parts, PLAN])


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
