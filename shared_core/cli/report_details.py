"""What is particular to a run: its layers, the path of its soup, the curve of its tickets, the stages of its chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared_core.cli import quantize_report
from shared_core.cli.run_folder import RunFolder
from shared_core.page import Cell, Plot, Section, Table, bar_plot, line_plot
from shared_core.receipt_page import Block, limited, words

Values = Mapping[str, Any]
_BARS = 60


def detail_sections(run: RunFolder) -> list[Section]:
    """Return the sections that the run's files call for."""
    sections = []
    for key, report in run.techniques.items():
        sections += _technique(key, report)
    for name, values in run.soups.items():
        sections.append(Section(f"Greedy path: {name}", _path(values)))
    of_report: dict[str, Callable[[Values], list[Section]]] = {
        "quantization": quantize_report.sections,
        "pruning": lambda values: [_options(values), *_layers("eff prune", values)],
        "shrink": _shrunk,
        "low_rank": lambda values: [_options(values), *_layers("eff low-rank", values)],
        "curve": _lottery,
        "chain": _chain,
    }
    for name, values in run.reports.items():
        sections += of_report[name](values)
    for name, values in run.exports.items():
        sections += [Section(f"Written file: {name}", [_flat(values)]), *_layers(name, values)]
    return sections


def _technique(key: str, report: Values) -> list[Section]:
    sections = _layers(key, report)
    if report.get("history") and "score" in report:
        sections.append(Section("Greedy path", _path(report)))
    if isinstance(report.get("layers"), Mapping):  # telemetry of gradients
        rows = [{"name": name, **shares} for name, shares in report["layers"].items()]
        sections += _layers(f"{key}, measured at step {report.get('measured_step')}", {"layers": rows})
    histogram = report.get("log2_histogram")
    if histogram:
        points = sorted((int(exponent), float(count)) for exponent, count in histogram.items())
        caption = f"Magnitudes of the gradients at step {report.get('measured_step')}, unscaled"
        sections.append(
            Section(
                f"{key}: gradients", [line_plot({"elements": points}, "log₂ of the magnitude", "elements", caption)]
            )
        )
    peaks = {
        "without checkpointing, planned": report.get("peak_bytes_without"),
        "planned": report.get("predicted_peak_bytes"),
        "measured": report.get("measured_peak_bytes"),
        "least possible, planned": report.get("least_peak_bytes"),
    }
    known = {name: peak / 2**20 for name, peak in peaks.items() if peak is not None}
    if known:
        sections.append(
            Section("Memory of a step", [bar_plot(known, "MiB", "Most bytes at once of activations in a step")])
        )
    return sections


def _layers(title: str, report: Values) -> list[Section]:
    """Return a table of layers or tensors, and a plot of what is told of each: noise, sparsity, or error."""
    entries = next((report[name] for name in ("per_layer", "tensors", "layers") if _is_rows(report.get(name))), None)
    if entries is None:
        return []
    names = [name for name in dict.fromkeys(name for entry in entries for name in entry) if name != "name"]
    rows: list[list[Cell]] = [
        [str(entry.get("name", "")), *(None if entry.get(name) is None else words(entry[name]) for name in names)]
        for entry in entries
    ]
    blocks: list[Block] = [*_bars(entries, title), limited(["name", *names], rows)]
    return [Section(f"Layers: {title}", blocks)]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _bars(entries: list[Values], title: str) -> list[Plot]:
    kinds = (("sqnr_db", "SQNR (dB)", False), ("sparsity", "sparsity", True), ("underflow", "share underflown", True),
             ("output_error", "error of the output", True), ("weight_error", "error of the weight", True))  # fmt: skip
    for figure, label, largest_first in kinds:
        found = {str(entry["name"]): float(entry[figure]) for entry in entries if _is_number(entry.get(figure))}
        if any(found.values()):
            told = ""
            if len(found) > _BARS:
                told = f": the {_BARS} {'highest' if largest_first else 'lowest'} of {len(found)}"
                chosen = set(sorted(found, key=lambda name: found[name], reverse=largest_first)[:_BARS])
                found = {name: value for name, value in found.items() if name in chosen}
            return [bar_plot(found, label, f"{label} by layer, {title}{told}")]
    return []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _path(values: Values) -> list[Block]:
    history = [row for row in values.get("history") or [] if isinstance(row, Mapping)]
    if not history:
        told = f"An average of {len(values.get('ingredients', []))} ingredients; no search, so there is no path."
        return [told, Table(["ingredient"], [[str(name)] for name in values.get("ingredients", [])])]

    def points(figure: str, accepted: bool | None = None) -> list[tuple[float, float]]:
        rows = [row for row in history if accepted is None or bool(row["accepted"]) == accepted]
        return [(row["order"] + 1, row[figure]) for row in rows if row.get(figure) is not None]

    curves = {
        "ingredient alone": points("single"),
        "average, accepted": points("score", True),
        "average, rejected": points("score", False),
    }
    alone = ("ingredient alone", "average, rejected")
    rows: list[list[Cell]] = [
        [row["order"] + 1, Path(str(row["name"])).name, row["single"], row["score"],
         "yes" if row["accepted"] else "no", row["reason"]]
        for row in history
    ]  # fmt: skip
    metric = values.get("metric", "held-out metric")
    members, score = len(values["ingredients"]), "unknown" if values["score"] is None else f"{values['score']:.6g}"
    return [
        f"{members} of {len(history)} ingredients are in the soup: {metric} {score}.",
        line_plot(curves, "ingredients tried", str(metric), "The search, in the order tried", marks=alone),
        limited(["order", "ingredient", "alone", "average", "in", "why"], rows),
    ]


def _lottery(curve: Values) -> list[Section]:
    labels = {"none": "winning ticket", "random_reinit": "random re-init", "random_mask": "random mask"}
    lines: dict[str, list[tuple[float, float]]] = {}
    rows: list[list[Cell]] = []
    for row in curve["rows"]:
        label = labels.get(row["control"], str(row["control"]))
        rows.append([row["round"], label if row["round"] else "dense", row["kept"], row["left"], row["quality"],
                     row["best_step"], row["reached_dense_at"], row["replay"]])  # fmt: skip
        if row["quality"] is not None:
            lines.setdefault(label, []).append((100 * row["left"], row["quality"]))
    metric = str(curve["metric"] or "nothing was measured")
    headings = ["round", "run", "weights", "share left", metric, "best at step", "dense quality at step", "replay"]
    plots: list[Block] = []
    if lines:
        ordered = {name: sorted(points) for name, points in lines.items()}
        plots = [line_plot(ordered, "weights left (%)", metric, "Quality against the weights left", log={"x": 10})]
    better = "larger" if curve["larger_is_better"] else "smaller"
    return [Section("Lottery tickets", [f"{metric}; {better} is better.", *plots, limited(headings, rows)])]


def _chain(values: Values) -> list[Section]:
    rows: list[list[Cell]] = [
        [row["stage"], row["student"] or "the same", row["parameters"], row["teacher"] or "none",
         ", ".join(f"{name} {value:.5g}" for name, value in row["metrics"].items()), round(row["seconds"], 1)]
        for row in values["stages"]
    ]  # fmt: skip
    return [Section("Chain", [limited(["stage", "student", "parameters", "teacher", "metrics", "seconds"], rows)])]


def _shrunk(values: Values) -> list[Section]:
    rows: list[list[Cell]] = [[name, values["units"].get(name), count] for name, count in values["removed"].items()]
    kept: list[list[Cell]] = [[name, words(why)] for name, why in values["kept"].items()]
    blocks: list[Block] = [limited(["group", "units", "removed"], rows), *map(str, values["notes"])]
    return [Section("Units removed", [*blocks, *([limited(["kept", "why"], kept)] if kept else [])])]


def _options(values: Values) -> Section:
    chosen = {**values.get("asked", {}), **values.get("config", {})}
    rows: list[list[Cell]] = [
        [name, words(value)] for name, value in chosen.items() if value not in (None, [], False, {})
    ]
    return Section("What was asked", [Table(["option", "value"], rows)])


def _flat(values: Values) -> Table:
    return Table(["figure", "value"], [[name, words(v)] for name, v in values.items() if not _is_rows(v)])
