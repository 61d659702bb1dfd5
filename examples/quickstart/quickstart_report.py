"""Measure the files that the quickstart's commands wrote, and show them in two tables and a plot."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
from matplotlib import rc_context
from matplotlib.figure import Figure
from onnx_files import batches_of, hits_of, milliseconds, sessions_of
from rich.console import Console
from rich.table import Table
from transformers import DataCollatorWithPadding

from shared_core.errors import TrainingError
from shared_core.hardware import environment

sys.path.append(str(Path(__file__).resolve().parents[1] / "stories"))
import less_memory_lm

MEMORY = ("--steps", "8")
"""Options of less_memory_lm.py."""
YOURS = """\
The same for your own script of the Hugging Face Trainer, Lightning or accelerate, which stays as it is:
  eff run train.py YOUR FLAGS --distill_teacher TEACHER --prune_sparsity 0.75 --prune_granularity neuron
  eff shrink YOUR_OUTPUT --out small
  eff run train.py YOUR FLAGS, from small --qat_scheme int8 && eff export YOUR_OUTPUT --out model.onnx"""


def measure(rows: Sequence[dict[str, Any]], test: Any, tokenizer: Any, length: int, rounds: int = 40) -> None:
    """Add to each row what its ``model.onnx`` shows: accuracy with one standard error of the test set, kB, ms."""
    files = [Path(row["folder"]) / "model.onnx" for row in rows]
    sessions = sessions_of(files)
    batches = batches_of(test, DataCollatorWithPadding(tokenizer, "max_length", length, None, "np"))
    many = {name: value[:32] for name, value in batches[0].items()}
    times = milliseconds(sessions, many, rounds)
    for row, file, session, taken in zip(rows, files, sessions, times, strict=True):
        share = float(hits_of(session, batches).mean())
        row["accuracy"], row["test_examples"] = share, len(test)
        row["standard_error"] = math.sqrt(share * (1 - share) / len(test))
        row["file_bytes"], row["latency_ms"] = file.stat().st_size, taken


def memory(folder: Path, options: Sequence[str]) -> None:
    """Write ``memory.json``: the MiB that a step of a language model's training holds, one flag more a row."""
    runs = {name: flags for name, flags in less_memory_lm.ROWS.items() if name != "packed activations"}
    rows, before = [], {}
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        measured = less_memory_lm.main([*options, "--out", str(folder)], runs)
    for name, held, _, _ in measured:
        added = {flag: value for flag, value in runs[name].items() if flag not in before}
        flags = less_memory_lm.flags_of(added or {"distill_teacher": folder / "teacher"})
        rows.append({"name": name.strip(". "), "flags": flags, "mib": sum(held.values())})
        before = runs[name]
    folder.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")


def memory_meanwhile(folder: Path) -> Callable[[], list[dict[str, Any]]]:
    """Start `memory` in a process of its own, and return the function that waits for its rows.

    It counts bytes, so that another core can do it while this one trains. It ends with this process.
    """
    # a process that is forked would share torch's threads
    process = multiprocessing.get_context("spawn").Process(target=memory, args=(folder, MEMORY), daemon=True)
    process.start()

    def rows() -> list[dict[str, Any]]:
        process.join()
        if process.exitcode:
            raise TrainingError("memory", f"the process must end with 0, got {process.exitcode}", "its error is above")
        return json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))

    return rows


def show(rows: Sequence[dict[str, Any]], memory_rows: Sequence[dict[str, Any]], folder: Path, console: Console) -> None:
    """Print the tables of the rows, and write ``results.json`` and ``quickstart.png`` into `folder`."""
    base = next((row for row in rows if row["name"] == "student"), rows[0])
    table = Table(title=f"model.onnx of each row, onnxruntime {onnxruntime.__version__}, one thread, 32 texts")
    table.add_column("run")
    table.add_column("added")
    for column in ("accuracy % ± standard error", "file (kB)", "", "latency (ms)", ""):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            row.get("added", ""),
            f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f}",
            f"{row['file_bytes'] / 1000:,.0f}",
            f"{row['file_bytes'] / base['file_bytes']:.2f} x",
            f"{row['latency_ms']:.2f}",
            f"{row['latency_ms'] / base['latency_ms']:.2f} x",
        )
    console.print(table)
    console.print(f"{rows[0]['test_examples']:,} test examples, used neither for training nor for choosing")
    if memory_rows:
        table = Table(title="training a language model: weights, gradients, optimizer and activations at their peak")
        table.add_column("each row's flags beside those above")
        for column in ("MiB", ""):
            table.add_column(column, justify="right")
        for row in memory_rows:
            table.add_row(row["flags"], f"{row['mib']:.1f}", f"{row['mib'] / memory_rows[0]['mib']:.2f} x")
        console.print(table)
    results = {"environment": environment(), "rows": list(rows), "memory": list(memory_rows)}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot(rows, folder / "quickstart.png")
    console.print(f"results: {folder / 'results.json'}, plot: {folder / 'quickstart.png'}")


# where a point's name stands, in points from its marker
PLACES = {
    "teacher": (-4, -20), "student": (9, -4), "distilled": (9, -13), "soup": (4, 9), "pruned": (0, 9), "int8": (0, -20),
}  # fmt: skip


@rc_context({"font.size": 12})
def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the way from teacher and student to the last row: accuracy against latency and against size.

    A row's ``standard_error`` is its error bar. Latency is relative to the student.
    """
    shown = {row["name"]: row for row in rows if row["name"] != "best of a sweep"}
    base = shown.get("student", rows[0])
    way = [row for row in shown.values() if row["name"] != "teacher"]
    arrows = list(itertools.pairwise(way))
    if "teacher" in shown and len(way) > 1:
        arrows.append((shown["teacher"], way[1]))
    figure = Figure(figsize=(6, 6), layout="constrained")
    for axes, key, scale, label in zip(
        figure.subplots(2, 1, sharey=True),
        ("latency_ms", "file_bytes"),
        (base["latency_ms"], 1000),
        ("latency (student = 1)", "file (kB)"),
        strict=True,
    ):
        for start, end in arrows:
            axes.annotate(
                "", (end[key] / scale, 100 * end["accuracy"]), (start[key] / scale, 100 * start["accuracy"]),
                arrowprops={"arrowstyle": "->", "color": "#9aa3ab", "shrinkA": 5, "shrinkB": 4, "linewidth": 1.3,
                            "linestyle": "--" if start["name"] == "teacher" else "-"},
            )  # fmt: skip
        for row in shown.values():
            at = row[key] / scale, 100 * row["accuracy"]
            last = row is rows[-1]
            axes.errorbar(
                *at, yerr=100 * row["standard_error"] or None, fmt="o", markersize=7, capsize=4,
                color="#0b6e4f" if last else "#5f6b76",
            )  # fmt: skip
            x, y = PLACES.get(row["name"], (9, -4))
            if row["name"] == "teacher" and row[key] == max(each[key] for each in rows):
                x, y = 9, -2  # nothing is to the right of it
            axes.annotate(
                row["name"], at, (x, y), textcoords="offset points", ha="left" if x > 0 else "center",
                weight="bold" if last else "normal",
            )  # fmt: skip
        axes.set(xlabel=label, ylabel="test accuracy (%)")
        axes.set_xlim(0, 1.25 * max(row[key] for row in rows) / scale)
        axes.set_ylim(0, 1.2 * max(100 * row["accuracy"] for row in rows))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130, facecolor="white")
