"""The page of `eff report`: of one run everything, of several runs what differs.

It reads the files of a run and computes nothing anew: quality, size, latency and memory before and after, curves over
steps, and details: layers, the path of a soup, the curve of tickets, the stages of a chain.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.engine.registry import REGISTRY
from shared_core.reports import quantization_page as quantize_report
from shared_core.reports.page import Cell, Plot, Section, Table, bar_plot, can_draw, line_plot
from shared_core.reports.receipt_page import Block, asked, happened, limited, words
from shared_core.reports.run_folder import Curve, RunFolder, of_ours

Values = Mapping[str, Any]
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".onnx", ".pte", ".eff")


@dataclass(frozen=True)
class Change:
    """A figure before and after, and what says so; None where the run does not hold it."""

    what: str
    before: float | None
    after: float | None
    source: str

    def row(self) -> list[Cell]:
        """Return the cells of its row."""
        ratio = None if not self.before or self.after is None else f"{self.after / self.before:.3g}×"
        return [self.what, self.before, self.after, ratio, self.source]


def changes(run: RunFolder) -> list[Change]:
    """Return all that the run holds: quality first, then size, latency and memory."""
    reports = {"quantization": _quantization, "pruning": _pruning, "shrink": _shrunk, "low_rank": _low_rank}
    found = [*_validations(run)]
    for key, report in run.techniques.items():
        found += _technique(key, report)
    for name, values in run.reports.items():
        if name in reports:
            found += reports[name](values)
    if "curve" in run.reports:
        found += _lottery(run.reports["curve"])
    for name, values in run.soups.items():
        found += _soup(values, name)
    for name, values in run.exports.items():
        found += _export(values, name)
    return found + _files(run.path)


def _files(path: Path) -> list[Change]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kept = [file for file in files if file.is_file() and file.suffix in _WEIGHTS and not file.name.startswith("eff_")]
    return [Change(f"bytes of {file.name}", None, file.stat().st_size, "the file") for file in kept]


def change_table(found: list[Change]) -> Table:
    """Return one row a figure."""
    return Table(["what", "before", "after", "after / before", "from"], [change.row() for change in found])


def _validations(run: RunFolder) -> Iterator[Change]:
    names = run.receipt.get("validation", {}) if run.receipt else {}
    for name, last in names.items():
        if name == "epoch":
            continue
        curve = run.curves.get(name, [])
        first = curve[0][1] if len(curve) > 1 else None
        yield Change(f"{name}, first and last of the run", first, last, "validations in training")


def _technique(key: str, report: Values) -> Iterator[Change]:
    source = f"receipt, {key}"
    pairs = {
        "low_rank": [("parameters", "parameters_before", "parameters_after")],
        "activations": [("bytes of saved activations, one forward", "bytes_before", "bytes_after")],
        "cluster": [("bytes of the shared weights, as stored and as codes", "bytes", "code_bytes")],
        "checkpointing": [
            ("peak bytes of a step, planned", "peak_bytes_without", "predicted_peak_bytes"),
            ("peak bytes of a step, measured", "", "measured_peak_bytes"),
            ("bytes of activations that one backward recomputed", "", "saved_bytes"),
        ],
        "prune": [("zeros among the weights within reach", "", "pruned"), ("sparsity", "", "sparsity")],
        "lottery": [("weights left in the ticket", "numel", "kept")],
        "distill": [("parameters of the teacher", "teacher_parameters", "")],
        "average": [("bytes of the average beside the weights", "", "bytes")],
        "primary_weights": [("bytes of the float32 copies", "", "copy_bytes")],
    }
    for what, before, after in pairs.get(key, []):
        if isinstance(report.get(before or after), int | float):
            yield Change(what, _figure(report.get(before)), _figure(report.get(after)), source)
    if key == "soup" and "score" in report:
        yield from _soup(report, source)


def _soup(values: Values, source: str) -> Iterator[Change]:
    if values.get("score") is None:
        return
    path = values.get("history") or [{}]
    metric = values.get("metric", "held-out metric")
    yield Change(f"{metric}, first ingredient and soup", _figure(path[0].get("single")), values["score"], source)


def _quantization(values: Values) -> Iterator[Change]:
    source, quality = "eff quantize", values["quality"]
    for name, what in (("quantized", "quantised"), ("qat", "trained quantised")):
        if quality.get(name) is not None:
            yield Change(f"quality, float and {what}", quality["float"], quality[name], source)
    yield Change("bytes, float and codes", values["bytes"]["float"], values["bytes"]["quantized"], source)
    times = values.get("milliseconds") or {}
    for name, time in times.items():
        if name != "float32":
            yield Change(f"milliseconds of a forward, float32 and {name}", times.get("float32"), time, source)


def _pruning(values: Values) -> Iterator[Change]:
    source, quality = "eff prune", values.get("quality") or {}
    for name in ("pruned", "shrunk"):
        if name in quality:
            yield Change(f"quality, dense and {name}", quality.get("dense"), quality[name], source)
    yield Change("zeros among the weights within reach", None, values["pruned"], source)
    yield Change("sparsity", None, values["sparsity"], source)
    for name in ("bytes", "flops", "milliseconds"):
        pair = (values.get("shrink") or {}).get(name)
        if pair:
            yield Change(f"{name}, before and after --shrink", pair[0], pair[1], source)


def _shrunk(values: Values) -> Iterator[Change]:
    for name in ("parameters", "loss", "bytes", "flops", "milliseconds"):
        if values.get(name):
            yield Change(name, values[name]["before"], values[name]["after"], "eff shrink")


def _low_rank(values: Values) -> Iterator[Change]:
    source, quality = "eff low-rank", values.get("quality")
    if quality:
        yield Change("quality, dense and of low rank", quality["dense"], quality["low_rank"], source)
    for name in ("parameters", "bytes", "flops", "milliseconds"):
        if name in values:
            yield Change(name, values[name]["before"], values[name]["after"], source)


def _lottery(curve: Values) -> Iterator[Change]:
    rows = curve["rows"]
    dense, better = rows[0], 1 if curve["larger_is_better"] else -1
    tickets = [row for row in rows[1:] if row["control"] == "none" and row["quality"] is not None]
    if dense["quality"] is None or not tickets:
        return
    good = [row for row in tickets if better * row["quality"] >= better * dense["quality"]]
    chosen = min(good or tickets, key=lambda row: row["left"])
    which = "smallest winning ticket" if good else "smallest ticket, none is as good as dense"
    yield Change(f"{curve['metric']}, dense and {which}", dense["quality"], chosen["quality"], "eff lottery")
    yield Change(f"weights, dense and {which}", dense["kept"], chosen["kept"], "eff lottery")


def _export(values: Values, name: str) -> Iterator[Change]:
    file = Path(name).name.removesuffix(".eff.json")
    if "original_bytes" in values:
        yield Change(
            f"bytes of the weights, as given and in {file}", values["original_bytes"], values["file_bytes"], name
        )
    for what, key in (("largest difference of the outputs", "largest_difference"),
                      ("relative change of the outputs", "relative_change")):  # fmt: skip
        if values.get(key) is not None:
            yield Change(f"{what}, {file}", None, values[key], name)


def _figure(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


_CURVES = 12  # in one plot; more could not be told apart
_SHARES = ("underflow", "zero", "flushed", "grad_below_normal", "grad_below_subnormal")
_TIMINGS = ("_runtime", "_per_second", "_time")


@dataclass(frozen=True, eq=False)
class _Kind:
    title: str
    label: str
    has: Callable[[str], bool]
    log: Mapping[str, int] | None = None


def _named(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _is_ours(name: str) -> bool:
    return name.partition("/")[0] in REGISTRY


def _is_loss(name: str) -> bool:
    return "loss" in name and not _is_ours(name)


def _is_quality(name: str) -> bool:
    return name.startswith(("eval", "val", "test")) and not _is_loss(name)


# a figure belongs to the first kind that has it; those without a label are of many scales, and are not drawn
KINDS = (
    _Kind("Loss", "loss", _is_loss),
    _Kind("Quality in validations", "metric", _is_quality),
    _Kind("Sparsity schedule", "share of the weights within reach", _named("prune/sparsity", "lottery/left")),
    _Kind("Loss scale", "scale", _named("loss_scale/scale"), {"y": 2}),
    _Kind("Underflow", "share of the gradients' elements", _named(*(f"loss_scale/{name}" for name in _SHARES))),
    _Kind("Steps skipped", "steps", _named("loss_scale/skipped", "fp8/discarded_steps")),
    _Kind("Head-room and updates", "powers of two", _named("loss_scale/headroom", "loss_scale/update_to_weight")),
    _Kind("Loss of distillation", "loss", lambda name: name.startswith("distill/") and name.endswith("loss")),
    _Kind("Device memory", "bytes", _named("memory/allocated", "memory/largest")),
    _Kind("Other figures of the techniques", "", _is_ours),
    _Kind("Other figures that the trainer logged", "", lambda name: True),
)


def curve_sections(runs: Mapping[str, RunFolder]) -> list[Section]:
    """Return a section for each kind of curve that a run holds; a figure that never changes is in the table alone.

    Args:
        runs: Name → run; of several the names are in the legend.
    """
    found: dict[_Kind, dict[str, Curve]] = {kind: {} for kind in KINDS}
    for name, run in runs.items():
        for figure, curve in run.curves.items():
            if not figure.endswith(_TIMINGS):
                kind = next(kind for kind in KINDS if kind.has(figure))
                found[kind][_label(name, figure, len(runs))] = curve
    return [Section(kind.title, list(_blocks(kind, curves))) for kind, curves in found.items() if curves]


def _label(run: str, figure: str, number: int) -> str:
    return figure if number == 1 else f"{run}: {figure}"


def _blocks(kind: _Kind, found: Mapping[str, Curve]) -> Iterable[Block]:
    moving = {name: curve for name, curve in found.items() if len({value for _, value in curve}) > 1}
    if moving and kind.label:
        shown = dict(list(moving.items())[:_CURVES])
        told = "" if len(shown) == len(moving) else f", the first {_CURVES} of {len(moving)} curves"
        yield line_plot(shown, "step", kind.label, f"{kind.title} over the steps{told}", log=kind.log)
    rows: list[list[Cell]] = []
    for name, curve in found.items():
        values = [value for _, value in curve]
        rows.append([name, len(curve), curve[-1][0], *map(words, (values[0], values[-1], min(values), max(values)))])
    yield limited(["figure", "points", "last step", "first", "last", "lowest", "highest"], rows)


_BARS = 60


def detail_sections(run: RunFolder) -> list[Section]:
    """Return the sections that the run's files call for."""
    sections = []
    for key, report in run.techniques.items():
        sections += _technique_details(key, report)
    for name, values in run.soups.items():
        sections.append(Section(f"Greedy path: {name}", _path(values)))
    of_report: dict[str, Callable[[Values], list[Section]]] = {
        "quantization": quantize_report.sections,
        "pruning": lambda values: [_options(values), *_layers("eff prune", values)],
        "shrink": _shrunk_details,
        "low_rank": lambda values: [_options(values), *_layers("eff low-rank", values)],
        "curve": _lottery_details,
        "chain": _chain,
    }
    for name, values in run.reports.items():
        sections += of_report[name](values)
    for name, values in run.exports.items():
        sections += [Section(f"Written file: {name}", [_flat(values)]), *_layers(name, values)]
    return sections


def _technique_details(key: str, report: Values) -> list[Section]:
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
        what = f"A merge ({values['kind']})" if "kind" in values else "An average"
        told = f"{what} of {len(values.get('ingredients', []))} ingredients; no search, so there is no path."
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


def _lottery_details(curve: Values) -> list[Section]:
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


def _shrunk_details(values: Values) -> list[Section]:
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


_NO_PLOTS = "Plots are not drawn, because matplotlib is not installed: pip install 'efftrain[plots]'."


def page_of(runs: Sequence[RunFolder]) -> tuple[str, list[Section]]:
    """Return title and sections.

    Raises:
        CheckpointError: If a file does not hold what this library writes.
    """
    with of_ours(*runs):
        title, sections = _one(runs[0]) if len(runs) == 1 else _several(runs)
    return title, [*([] if can_draw() else [Section("Plots", [_NO_PLOTS])]), *sections]


def as_values(run: RunFolder) -> dict[str, Any]:
    """Return what `eff report --json` prints of a run beside its receipt.

    Raises:
        CheckpointError: If a file does not hold what this library writes.
    """
    with of_ours(run):
        found = [vars(change) for change in changes(run)]
    return {
        "path": str(run.path),
        "files": run.files,
        "notes": run.notes,
        "changes": found,
        "curves": run.curves,
        **run.reports,
        "soups": run.soups,
        "exports": run.exports,
    }


def _one(run: RunFolder) -> tuple[str, list[Section]]:
    found = changes(run)
    table: list[Block] = (
        [change_table(found)] if found else ["The files of this run hold no figure of before and after."]
    )
    sections = [Section("Before and after", table)]
    if run.receipt:
        sections.insert(0, Section("What was asked", _recipe(run.receipt)))
        sections.append(Section("What happened", happened(run.receipt)))
    read = Section("Where this comes from", [f"Read: {', '.join(run.files)}.", *run.notes])
    name = run.path.resolve().name
    return f"Run {name}", [*sections, *curve_sections({name: run}), *detail_sections(run), read]


def _recipe(receipt: dict[str, Any]) -> list[Block]:
    if not receipt["recipe"]:
        return ["No technique was switched on."]
    return [asked(receipt["recipe"]), "All other options have their defaults; eff_receipt.json names every one."]


def _several(runs: Sequence[RunFolder]) -> tuple[str, list[Section]]:
    names = names_of([run.path for run in runs])
    named = dict(zip(names, runs, strict=True))
    overview: list[list[Cell]] = []
    figures: dict[str, dict[str, Cell]] = {}
    options: dict[str, dict[str, Cell]] = {}
    for name, run in named.items():
        receipt = run.receipt or {}
        steps = receipt.get("steps", {})
        overview.append([name, ", ".join(receipt.get("recipe", {})) or None, steps.get("applied"),
                         steps.get("skipped"), receipt.get("wall_seconds"), ", ".join(run.files)])  # fmt: skip
        for change in changes(run):
            figures.setdefault(change.what, {})[name] = change.before if change.after is None else change.after
        for technique, option, value in asked(receipt.get("recipe", {})).rows:
            options.setdefault(f"{technique}.{option}", {})[name] = value
    sections = [
        Section("Runs", [Table(["run", "techniques", "steps", "skipped", "seconds", "read"], overview)]),
        Section(
            "Figures",
            [
                "Those after; a dash where a run does not hold one.",
                _side_by_side("figure", figures, names),
            ],
        ),
        Section(
            "Options", ["A dash: the default, or a technique that is off.", _side_by_side("option", options, names)]
        ),
        *curve_sections(named),
    ]
    notes = [f"{name}: {note}" for name, run in named.items() for note in run.notes]
    return f"{len(runs)} runs", [*sections, *([Section("Notes", notes)] if notes else [])]


def _side_by_side(heading: str, rows: dict[str, dict[str, Cell]], names: list[str]) -> Table:
    return limited([heading, *names], [[row, *(cells.get(name) for name in names)] for row, cells in rows.items()])


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return what sets paths apart: each without the folder that all lie in.

    Example:
        >>> names_of([Path("runs/a/out"), Path("runs/b/out")])
        ['a/out', 'b/out']
    """
    whole = [str(path.resolve()) for path in paths]
    shared = os.path.commonpath([str(Path(name).parent) for name in whole])
    return [str(Path(name).relative_to(shared)) for name in whole]
