"""What the quickstart shows: figures measured on the finished model, one table, one plot."""

from __future__ import annotations

import itertools
import json
import statistics
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from shared_core.engine.receipt import environment
from shared_core.quantization import convert

NOTES = """\
file: model.safetensors in fp32; after int8 training, the codes and scales of convert(), whose accuracy is shown
zipped: that file in a zip archive (deflate); zeros make it smaller, but no dense matrix product faster
latency: one example, one thread, median; after int8 training, of the fp32 weights that hold the codes' values"""


def measure(trainer: Any, test: Any, folder: Path) -> dict[str, Any]:
    """Return accuracy on the test split, size on disk, sparsity and latency of the model that a run ended with."""
    model = trainer.model.eval()
    quantized = "qat" in trainer.session.recipe
    # After quantization-aware training the model that counts is the one that computes on integers.
    deployed = convert(model) if quantized else model
    file = folder / "model.safetensors"
    if quantized:
        file = folder / "model_int8.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in deployed.state_dict().items()}, file)
    matrices = [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)]
    zeros, total = sum(int((matrix == 0).sum()) for matrix in matrices), sum(matrix.numel() for matrix in matrices)
    return {
        "accuracy": accuracy(deployed, test, trainer.data_collator),
        "test_examples": len(test),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "file": file.name,
        "file_bytes": file.stat().st_size,
        "zipped_bytes": zipped(file),
        "linear_sparsity": zeros / total,
        "latency_ms": latency_ms(model, trainer.data_collator([test[0]])),
    }


@torch.no_grad()
def accuracy(model: nn.Module, data: Any, collator: Any) -> float:
    """Return the share of examples whose label gets the largest logit."""
    hits = 0
    for batch in DataLoader(data, batch_size=128, collate_fn=collator):
        labels = batch.pop("labels")
        hits += int((model(**batch).logits.argmax(-1) == labels).sum())
    return hits / len(data)


def zipped(file: Path) -> int:
    """Return the bytes of the zip archive (deflate) that this writes beside the file."""
    archive = file.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        out.write(file, file.name)
    return archive.stat().st_size


@torch.no_grad()
def latency_ms(model: nn.Module, batch: Any, repeats: int = 60) -> float:
    """Return the median time of one forward of one example, on one thread."""
    batch.pop("labels")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            model(**batch)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 1000 * statistics.median(times[repeats // 6 :])


def show(rows: Sequence[dict[str, Any]], folder: Path, console: Console) -> None:
    """Print the table of the rows, and write ``results.json`` and ``quickstart.png`` into `folder`."""
    test_examples = rows[0]["test_examples"]
    table = Table(title=f"accuracy on {test_examples:,} test examples, used neither for training nor for choosing")
    table.add_column("run")
    for column in (
        "accuracy %",
        "parameters",
        "file (kB)",
        "zipped (kB)",
        "zeros in linear layers",
        "latency (ms)",
        "training (s)",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{100 * row['accuracy']:.1f}",
            f"{row['parameters']:,}",
            f"{row['file_bytes'] / 1000:,.0f}",
            f"{row['zipped_bytes'] / 1000:,.0f}",
            f"{100 * row['linear_sparsity']:.1f} %",
            f"{row['latency_ms']:.2f}",
            f"{row['train_seconds']:.1f}",
        )
    console.print(table)
    console.print(NOTES)
    results = {"environment": environment(), "rows": list(rows)}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot(rows, folder / "quickstart.png")
    console.print(f"results: {folder / 'results.json'}, plot: {folder / 'quickstart.png'}")


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw accuracy against size, the sparsity that each run logged, and the path of the soup."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    size, schedule, soup = figure.subplots(1, 3)
    for row, mark in zip(rows, itertools.cycle("osD^vP*"), strict=False):
        size.plot(row["zipped_bytes"] / 1000, 100 * row["accuracy"], mark, markersize=9, alpha=0.8, label=row["name"])
    size.set(xlabel="zipped model (kB)", ylabel="test accuracy (%)", title="accuracy against size")
    size.set_xlim(left=0)
    size.margins(0.12)
    size.legend()
    runs = [row for row in rows if "prune" in row["recipe"] and "soup" not in row["recipe"]]
    for row, style in zip(runs, itertools.cycle(("-", "--", ":")), strict=False):
        points = [(entry["step"], 100 * entry["prune/sparsity"]) for entry in row["log"] if "prune/sparsity" in entry]
        schedule.plot(*(zip(*points, strict=True) if points else ([], [])), style, linewidth=2.5, label=row["name"])
    schedule.set(xlabel="step", ylabel="zeros (%)", title="zeros among the prunable weights", ylim=(0, 100))
    if schedule.lines:
        schedule.legend(loc="lower right")
    history = [entry for row in rows for entry in row["soup"].get("history", []) if entry["single"] is not None]
    names = [f"step {Path(entry['name']).name.removeprefix('checkpoint-')}" for entry in history]
    soup.plot(names, [100 * entry["single"] for entry in history], "o", markersize=8, label="this checkpoint alone")
    for accepted, mark in ((True, "^"), (False, "x")):
        tried = [
            (name, 100 * entry["score"])
            for name, entry in zip(names, history, strict=True)
            if entry["score"] is not None and entry["accepted"] == accepted
        ]
        soup.plot(
            *(zip(*tried, strict=True) if tried else ([], [])),
            mark,
            markersize=8,
            label=f"the average with it, {'kept' if accepted else 'rejected'}",
        )
    soup.set(xlabel="tried in this order, best alone first", ylabel="validation accuracy (%)", title="greedy soup")
    soup.tick_params(axis="x", labelrotation=30)
    soup.margins(0.1)
    bottom, top = soup.get_ylim()
    soup.set_ylim(top=top + 0.4 * (top - bottom))  # room for the legend
    if history:
        soup.legend(loc="upper right")
    figure.savefig(file, dpi=120)
