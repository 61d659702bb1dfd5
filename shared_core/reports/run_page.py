"""The page of `eff report`: all of one run, or the differences of several; and the section of a model card.

It reads a run's files and recomputes nothing: quality, size, latency and memory before and after, curves over
steps, and details: layers, the path of a soup, the curve of tickets, the stages of a chain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared_core.engine.receipt import sentences
from shared_core.engine.registry import REGISTRY
from shared_core.printing import counted, duration
from shared_core.reports import quantization_page
from shared_core.reports.page import Block, Columns, Section, Table, bar_plot, can_draw, line_plot, markdown, table_of
from shared_core.reports.run_folder import Curve, RunFolder, of_ours


def card_section(values: Mapping[str, Any], *, has_deployment: bool = False) -> str:
    """Return the section of a model card as Markdown: what was asked, what happened, how to load the model.

    Example:
        >>> receipt = {"recipe": {"matmul": {"precision": "high"}}, "steps": {"applied": 9, "skipped": 0}}
        >>> receipt["techniques"] = {"matmul": {"active": True, "products_in": "tf32", "device": "cuda"}}
        >>> print(card_section(receipt))
        ## Efficient training
        <BLANKLINE>
        Trained with efftrain for 9 steps.
        <BLANKLINE>
        | technique | what happened |
        |---|---|
        | matmul | Multiplied float32 in tf32 on cuda. |
        <BLANKLINE>
        Options that differ from their defaults:
        <BLANKLINE>
        | technique | option | value |
        |---|---|---|
        | matmul | precision | high |
        <BLANKLINE>
        It loads as it would without efftrain: `from_pretrained` of this folder.
    """
    version = values.get("environment", {}).get("libraries", {}).get("efftrain")
    applied = counted(values["steps"]["applied"], "step")
    intro = f"Trained with efftrain{f' {version}' if version else ''} for {applied}."
    # a card is public: a teacher's name is enough, not its path, and notes may name folders
    recipe = {
        key: {
            name: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
            for name, value in options.items()
        }
        for key, options in values["recipe"].items()
    }
    figures = [[key, " ".join(sentences(key, report))] for key, report in values["techniques"].items()]
    table = Table(["technique", "what happened"], figures)
    blocks: list[Block] = [intro, table, "Options that differ from their defaults:", asked(recipe)]
    return "\n\n".join([markdown(Section("Efficient training", blocks)), *_loading(recipe, has_deployment)])


def _loading(recipe: Mapping[str, Any], has_deployment: bool) -> list[str]:
    """Return how to load a saved model, as Markdown."""
    found = [REGISTRY[key].config_class.how_to_load(recipe[key]) for key in recipe if key in REGISTRY]
    lines = [line for line in found if line] or [
        "It loads as it would without efftrain: `from_pretrained` of this folder."
    ]
    if has_deployment:
        lines.append(
            "Next to the weights, `eff_deployment.json` has what quantized inference needs, such as ranges of inputs: "
            "`eff export FOLDER --out model.onnx` reads it (`--format` has other runtimes)."
        )
    return lines


def asked(recipe: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the options that differ from their defaults. If none does, say that the technique was on."""
    rows: list[list[Any]] = []
    for key, options in recipe.items():
        usual = _defaults(key)
        chosen = [(name, value) for name, value in options.items() if name not in usual or value != usual[name]]
        rows += [[key, name, "none" if value is None else value] for name, value in chosen] or [
            [key, "all options", "at their defaults"]
        ]
    return Table(["technique", "option", "value"], rows)


def _defaults(key: str) -> dict[str, Any]:
    if key not in REGISTRY:  # from a newer version
        return {}
    found = {}
    for field in dataclasses.fields(REGISTRY[key].config_class):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        found[field.name] = list(made) if isinstance(made, tuple) else made  # a receipt is JSON
    return found


def achieved(values: Mapping[str, Any]) -> list[Block]:
    """Return steps and time, and one row per technique with what it did."""
    steps, planned = values["steps"], values["steps"].get("planned")
    of = "" if planned in (None, steps["applied"]) else f" of {planned:,} planned"
    skipped = f", skipped {steps['skipped']:,}" if steps["skipped"] else ""
    time = duration(float(values["wall_seconds"]))
    text = f"{'Finished' if values['finished'] else 'Stopped'} after {counted(steps['applied'], 'step')}{of}{skipped}"
    rows = [
        [key, " ".join(sentences(key, report)), duration(float(values["seconds"].get(key, 0.0)))]
        for key, report in values["techniques"].items()
    ]
    return [f"{text}, in {time}.", *([Table(["technique", "what happened", "own time"], rows)] if rows else [])]


def happened(values: Mapping[str, Any]) -> list[Block]:
    """Return the techniques that were left out and why, notes and the environment."""
    reports = values["techniques"]
    left = [[key, name, why] for key, report in reports.items() for name, why in report.get("left_out", {}).items()]
    environment = values["environment"]
    found = {
        "device": environment["device"], "trainer": values["front_end"], "python": environment["python"],
        **environment["libraries"], "float32 products": environment.get("float32_matmul_precision", "none"),
    }  # fmt: skip
    return [
        *([Table(["technique", "left out", "why"], left)] if left else []),
        *map(str, values["notes"]),
        Table(["environment", "version"], list(found.items())),
    ]


Values = Mapping[str, Any]
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".onnx", ".pte", ".eff")


class Change(NamedTuple):
    """A figure before and after, and its source; None if the run does not have it."""

    what: str
    before: float | None
    after: float | None
    source: str


def change_table(found: list[Change]) -> Table:
    """Return one row per figure."""
    rows = [
        [*change[:3], f"{change.after / change.before:.3g}×" if change.before and change.after is not None else None,
         change.source]
        for change in found
    ]  # fmt: skip
    return Table(["what", "before", "after", "after / before", "from"], rows)


_BEFORE_AFTER = [
    (name, f"{name}.before", f"{name}.after") for name in ("parameters", "loss", "bytes", "flops", "milliseconds")
]
_WITHIN_REACH = [("zeros among the prunable weights", "", "pruned"), ("sparsity", "", "sparsity")]
# name of a figure, and its keys before and after
_TECHNIQUES = {
    "low_rank": [("parameters", "parameters_before", "parameters_after")],
    "activations": [("bytes of saved activations, one forward", "bytes_before", "bytes_after")],
    "cluster": [("bytes of the shared weights, as stored and as codes", "bytes", "code_bytes")],
    "checkpointing": [
        ("peak bytes of a step, planned", "peak_bytes_without", "predicted_peak_bytes"),
        ("peak bytes of a step, measured", "", "measured_peak_bytes"),
        ("bytes of activations that one backward recomputed", "", "saved_bytes"),
    ],
    "prune": _WITHIN_REACH,
    "lottery": [("weights left in the ticket", "numel", "kept")],
    "distill": [("parameters of the teacher", "teacher_parameters", "")],
    "average": [("bytes of the average beside the weights", "", "bytes")],
    "primary_weights": [("bytes of the float32 copies", "", "copy_bytes")],
}
_COMMANDS = {
    "quantization": ("eff quantize", [
        ("quality, float and PTQ", "quality.float", "quality.quantized"),
        ("quality, float and QAT", "quality.float", "quality.qat"),
        ("bytes, float and codes", "bytes.float", "bytes.quantized"),
        *(
            (f"milliseconds of a forward, float32 and {name}", "milliseconds.float32", f"milliseconds.{name}")
            for name in ("bfloat16", "int8 reference", "torchao")
        ),
    ]),
    "pruning": ("eff prune", [
        *((f"quality, dense and {name}", "quality.dense", f"quality.{name}") for name in ("pruned", "shrunk")),
        *_WITHIN_REACH,
        *(
            (f"{name}, before and after --shrink", f"shrink.{name}.0", f"shrink.{name}.1")
            for name in ("bytes", "flops", "milliseconds")
        ),
    ]),
    "shrink": ("eff shrink", _BEFORE_AFTER),
    "low_rank": ("eff low-rank", [("quality, dense and of low rank", "quality.dense", "quality.low_rank"),
                                  *_BEFORE_AFTER]),
}  # fmt: skip
_EXPORTS = [
    ("bytes of the weights, as given and in {file}", "original_bytes", "file_bytes"),
    ("largest difference of the outputs, {file}", "", "largest_difference"),
    ("relative change of the outputs, {file}", "", "relative_change"),
]


def changes(run: RunFolder) -> list[Change]:
    """Return all figures of the run."""
    found = [*_validations(run)]
    for key, report in run.techniques.items():
        found += _pairs(report, _TECHNIQUES.get(key, ()), f"receipt, {key}")
        if key == "soup":
            found += _soup(report, f"receipt, {key}")
    for name, values in run.reports.items():
        source, pairs = _COMMANDS.get(name, ("", []))
        found += _pairs(values, pairs, source)
    found += _lottery(run.reports.get("curve"))
    for name, values in run.soups.items():
        found += _soup(values, name)
    for name, values in run.exports.items():
        file = Path(name).name.removesuffix(".eff.json")
        found += _pairs(values, [(what.format(file=file), *paths) for what, *paths in _EXPORTS], name)
    files = sorted(run.path.iterdir()) if run.path.is_dir() else [run.path]
    kept = [file for file in files if file.is_file() and file.suffix in _WEIGHTS and not file.name.startswith("eff_")]
    return found + [Change(f"bytes of {file.name}", None, file.stat().st_size, "the file") for file in kept]


def _pairs(values: Values, pairs: Iterable[tuple[str, ...]], source: str) -> Iterator[Change]:
    """Yield the figures in the values: those with a number afterwards, or a quality that is unknown."""
    for what, before, after in pairs:
        figures = _at(values, before), _at(values, after)
        judged, _, name = after.partition(".")
        is_unknown = judged == "quality" and name in (values.get("quality") or {})
        if figures[bool(after)] is not None or is_unknown:
            yield Change(what, *figures, source)


def _at(values: Any, path: str) -> float | None:
    for part in path.split("."):
        if isinstance(values, list | tuple) and part.isdigit():
            values = dict(enumerate(values)).get(int(part))
        else:
            values = values.get(part) if isinstance(values, Mapping) else None
    return values if isinstance(values, int | float) else None


def _validations(run: RunFolder) -> Iterator[Change]:
    names = run.receipt.get("validation", {}) if run.receipt else {}
    for name, last in names.items():
        if name != "epoch":
            curve = run.curves.get(name, [])
            first = curve[0][1] if len(curve) > 1 else None
            yield Change(f"{name}, first and last of the run", first, last, "validations in training")


def _soup(values: Values, source: str) -> Iterator[Change]:
    if values.get("score") is not None:
        first = _at((values.get("history") or [{}])[0], "single")
        metric = values.get("metric", "held-out metric")
        yield Change(f"{metric}, first ingredient and soup", first, values["score"], source)


def _lottery(curve: Values | None) -> Iterator[Change]:
    if curve is None:
        return
    dense, better = curve["rows"][0], 1 if curve["larger_is_better"] else -1
    tickets = [row for row in curve["rows"][1:] if row["control"] == "none" and row["quality"] is not None]
    if dense["quality"] is None or not tickets:
        return
    good = [row for row in tickets if better * row["quality"] >= better * dense["quality"]]
    chosen = min(good or tickets, key=lambda row: row["left"])
    which = "smallest winning ticket" if good else "smallest ticket, none is as good as dense"
    yield Change(f"{curve['metric']}, dense and {which}", dense["quality"], chosen["quality"], "eff lottery")
    yield Change(f"weights, dense and {which}", dense["kept"], chosen["kept"], "eff lottery")


_NO_PLOTS = "Plots are not drawn, because matplotlib is not installed: pip install 'efftrain[plots]'."


def page_of(runs: Sequence[RunFolder]) -> tuple[str, list[Section]]:
    """Return the title and sections."""
    with of_ours(*runs):
        title, sections = _one(runs[0]) if len(runs) == 1 else _several(runs)
    return title, [*([] if can_draw() else [Section("Plots", [_NO_PLOTS])]), *sections]


def as_values(run: RunFolder) -> dict[str, Any]:
    """Return what `eff report --json` prints of a run in addition to its receipt."""
    with of_ours(run):
        found = [change._asdict() for change in changes(run)]
    return {
        "path": str(run.path), "files": run.files, "notes": run.notes, "changes": found, "curves": run.curves,
        **run.reports, "soups": run.soups, "exports": run.exports,
    }  # fmt: skip


def _one(run: RunFolder) -> tuple[str, list[Section]]:
    found = changes(run)
    table = change_table(found) if found else "The files of this run have no figures from before and after."
    sections = [Section("Before and after", [table])]
    if run.receipt:
        recipe: list[Block] = ["No technique was switched on."]
        if run.receipt["recipe"]:
            text = "All other options have their defaults. eff_receipt.json has every one."
            recipe = [asked(run.receipt["recipe"]), text]
        sections = [
            Section("What was achieved", achieved(run.receipt)),
            *sections,
            Section("What was asked", recipe),
            Section("Notes and environment", happened(run.receipt)),
        ]
    read = Section("Where this comes from", [f"Read: {', '.join(run.files)}.", *run.notes])
    name = run.path.resolve().name
    return f"Run {name}", [*sections, *_curve_sections({name: run}), *_details(run), read]


def _several(runs: Sequence[RunFolder]) -> tuple[str, list[Section]]:
    names = names_of([run.path for run in runs])
    named = dict(zip(names, runs, strict=True))
    figures: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for name, run in named.items():
        for change in changes(run):
            figures.setdefault(change.what, {})[name] = change.before if change.after is None else change.after
        for technique, option, value in asked((run.receipt or {}).get("recipe", {})).rows:
            options.setdefault(f"{technique}.{option}", {})[name] = value

    def beside(heading: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
        return Table([heading, *names], [[row, *map(cells.get, names)] for row, cells in rows.items()])

    sections = [
        Section("Runs", [_overview(named)]),
        Section("Figures", ["Values after training. A dash means that the run has none.", beside("figure", figures)]),
        Section("Options", ["A dash means the default, or a technique that is off.", beside("option", options)]),
        *_curve_sections(named),
    ]
    notes = [f"{name}: {note}" for name, run in named.items() for note in run.notes]
    return f"{len(runs)} runs", [*sections, *([Section("Notes", notes)] if notes else [])]


def _overview(runs: Mapping[str, RunFolder]) -> Table:
    rows = []
    for name, run in runs.items():
        receipt = run.receipt or {}
        steps = receipt.get("steps", {})
        rows.append([name, ", ".join(receipt.get("recipe", {})) or None, steps.get("applied"),
                     steps.get("skipped"), receipt.get("wall_seconds"), ", ".join(run.files)])  # fmt: skip
    return Table(["run", "techniques", "steps", "skipped", "seconds", "read"], rows)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the distinguishing parts of paths: each without the common folder.

    Example:
        >>> names_of([Path("runs/a/out"), Path("runs/b/out")])
        ['a/out', 'b/out']
    """
    whole = [str(path.resolve()) for path in paths]
    shared = os.path.commonpath([str(Path(name).parent) for name in whole])
    return [str(Path(name).relative_to(shared)) for name in whole]


# -- curves

_CURVES = 12  # in one plot; more are hard to tell apart
_SHARES = ("underflow", "zero", "flushed", "grad_below_normal", "grad_below_subnormal")
_TIMINGS = ("_runtime", "_per_second", "_time")


def _is_ours(name: str) -> bool:
    return name.partition("/")[0] in REGISTRY


def _is_loss(name: str) -> bool:
    return "loss" in name and not _is_ours(name)


# title, axis label, and which figures belong there: a figure goes to the first kind that matches. Kinds without a
# label mix scales and are not drawn
_KINDS: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("Loss", "loss", _is_loss),
    ("Quality in validations", "metric", lambda name: name.startswith(("eval", "val", "test"))),
    ("Sparsity schedule", "share of the prunable weights", {"prune/sparsity", "lottery/left"}.__contains__),
    ("Loss scale", "scale", "loss_scale/scale".__eq__),
    ("Underflow", "share of the gradients' elements", {f"loss_scale/{name}" for name in _SHARES}.__contains__),
    ("Steps skipped", "steps", {"loss_scale/skipped", "fp8/discarded_steps"}.__contains__),
    ("Head-room and updates", "powers of two", {"loss_scale/headroom", "loss_scale/update_to_weight"}.__contains__),
    ("Loss of distillation", "loss", lambda name: name.startswith("distill/") and name.endswith("loss")),
    ("Device memory", "bytes", {"memory/allocated", "memory/largest"}.__contains__),
    ("Other figures of the techniques", "", _is_ours),
    ("Other figures that the trainer logged", "", lambda name: True),
)


def _curve_sections(runs: Mapping[str, RunFolder]) -> list[Section]:
    """Return a section for each kind of curve in the runs. With several runs, the legend has their names."""
    found: dict[str, dict[str, Curve]] = {title: {} for title, *_ in _KINDS}
    for name, run in runs.items():
        for figure, curve in run.curves.items():
            if not figure.endswith(_TIMINGS):
                title = next(title for title, _, has in _KINDS if has(figure))
                found[title][figure if len(runs) == 1 else f"{name}: {figure}"] = curve
    return [Section(title, _curves(title, label, found[title])) for title, label, _ in _KINDS if found[title]]


def _curves(title: str, label: str, found: Mapping[str, Curve]) -> list[Block]:
    """Return a plot and a table. A constant figure is only in the table."""
    blocks: list[Block] = []
    moving = {name: curve for name, curve in found.items() if len({value for _, value in curve}) > 1}
    if moving and label:
        text = "" if len(moving) <= _CURVES else f", the first {_CURVES} of {len(moving)} curves"
        log = {"y": 2} if title == "Loss scale" else None
        shown = dict(list(moving.items())[:_CURVES])
        blocks.append(line_plot(shown, "step", label, f"{title} over the steps{text}", log=log))
    rows = []
    for name, curve in found.items():
        values = [value for _, value in curve]
        rows.append([name, len(curve), curve[-1][0], values[0], values[-1], min(values), max(values)])
    return [*blocks, Table(["figure", "points", "last step", "first", "last", "lowest", "highest"], rows)]


# -- details


def _details(run: RunFolder) -> list[Section]:
    """Return the sections for the run's files."""
    sections = []
    for key, report in run.techniques.items():
        sections += _technique(key, report)
    for name, values in run.soups.items():
        sections.append(Section(f"Greedy path: {name}", _path(values)))
    of_report: dict[str, Callable[[Values], list[Section]]] = {
        "quantization": quantization_page.sections,
        "pruning": lambda values: [_options(values), *_layers("eff prune", values)],
        "shrink": _shrunk,
        "low_rank": lambda values: [_options(values), *_layers("eff low-rank", values)],
        "curve": _tickets,
        "chain": _chain,
        "search": _searched,
    }
    for name, values in run.reports.items():
        sections += of_report[name](values)
    for name, values in run.exports.items():
        flat = [
            (key.replace("_", " "), "none" if value is None else value)
            for key, value in values.items()
            if not _is_rows(value)
        ]
        sections += [Section(f"Written file: {name}", [Table(["figure", "value"], flat)]), *_layers(name, values)]
    return sections


def _technique(key: str, report: Values) -> list[Section]:
    sections = _layers(key, report)
    step = report.get("measured_step")
    if report.get("history") and "score" in report:
        sections.append(Section("Greedy path", _path(report)))
    if isinstance(report.get("layers"), Mapping):  # telemetry of gradients
        rows = [{"name": name, **shares} for name, shares in report["layers"].items()]
        sections += _layers(f"{key}, measured at step {step}", {"layers": rows})
    if report.get("log2_histogram"):
        points = sorted((int(exponent), float(count)) for exponent, count in report["log2_histogram"].items())
        caption = f"Magnitudes of the gradients at step {step}, unscaled"
        plot = line_plot({"elements": points}, "log₂ of the magnitude", "elements", caption)
        sections.append(Section(f"{key}: gradients", [plot]))
    peaks = {
        "without checkpointing, planned": "peak_bytes_without", "planned": "predicted_peak_bytes",
        "measured": "measured_peak_bytes", "least possible, planned": "least_peak_bytes",
    }  # fmt: skip
    known = {name: report[peak] / 2**20 for name, peak in peaks.items() if report.get(peak) is not None}
    if known:
        plot = bar_plot(known, "MiB", "Most bytes at once of activations in a step")
        sections.append(Section("Memory of a step", [plot]))
    return sections


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _layers(title: str, report: Values) -> list[Section]:
    """Return a table of layers or tensors, and a plot of their noise, sparsity or error."""
    entries = next((report[name] for name in ("per_layer", "tensors", "layers") if _is_rows(report.get(name))), None)
    if entries is None:
        return []
    names = ["name", *dict.fromkeys(name for entry in entries for name in entry if name != "name")]
    headings = [name.replace("_", " ") for name in names]
    table = Table(headings, [[entry.get(name) for name in names] for entry in entries])
    return [Section(f"Layers: {title}", [*_bars(entries, title), table])]


def _bars(entries: Iterable[Values], title: str) -> Iterable[Block]:
    kinds = {"sqnr_db": "SQNR (dB)", "sparsity": "sparsity", "underflow": "share underflown",
             "output_error": "error of the output", "weight_error": "error of the weight"}  # fmt: skip
    for figure, label in kinds.items():
        found = {str(entry["name"]): float(entry[figure]) for entry in entries if _is_finite(entry.get(figure))}
        if any(found.values()):
            return [bar_plot(found, label, f"{label} by layer, {title}", lowest=figure == "sqnr_db")]
    return []


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _path(values: Values) -> list[Block]:
    history = [row for row in values.get("history") or [] if isinstance(row, Mapping)]
    members = values.get("ingredients", [])
    if not history:
        what = f"A merge ({values['kind']})" if "kind" in values else "An average"
        text = f"{what} of {len(members)} ingredients; no search, so there is no path."
        return [text, Table(["ingredient"], [[str(name)] for name in members])]
    curves: dict[str, list[tuple[float, float]]] = {
        name: [(row["order"] + 1, row[figure]) for row in rows if row.get(figure) is not None]
        for name, figure, rows in (
            ("ingredient alone", "single", history),
            ("average, accepted", "score", [row for row in history if row["accepted"]]),
            ("average, rejected", "score", [row for row in history if not row["accepted"]]),
        )
    }
    metric = str(values.get("metric", "held-out metric"))
    score = "unknown" if values["score"] is None else f"{values['score']:.6g}"
    alone = ("ingredient alone", "average, rejected")
    columns: Columns = {
        "order": lambda row: row["order"] + 1, "ingredient": lambda row: Path(str(row["name"])).name,
        "alone": "single", "average": "score", "in": lambda row: "yes" if row["accepted"] else "no", "why": "reason",
    }  # fmt: skip
    return [
        f"{len(values['ingredients'])} of {len(history)} ingredients are in the soup: {metric} {score}.",
        line_plot(curves, "ingredients tried", metric, "The search, in the order tried", marks=alone),
        table_of(history, columns),
    ]


def _tickets(curve: Values) -> list[Section]:
    labels = {"none": "winning ticket", "random_reinit": "random re-init", "random_mask": "random mask"}
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in curve["rows"]:
        if row["quality"] is not None:
            name = labels.get(row["control"], str(row["control"]))
            lines.setdefault(name, []).append((100 * row["left"], row["quality"]))
    metric = str(curve["metric"] or "nothing was measured")
    columns: Columns = {
        "round": "round",
        "run": lambda row: labels.get(row["control"], str(row["control"])) if row["round"] else "dense",
        "weights": "kept", "share left": "left", metric: "quality", "best at step": "best_step",
        "dense quality at step": "reached_dense_at", "replay": "replay",
    }  # fmt: skip
    ordered = {name: sorted(points) for name, points in lines.items()}
    plot = line_plot(ordered, "weights left (%)", metric, "Quality against the weights left", log={"x": 10})
    text = f"{metric}; {'larger' if curve['larger_is_better'] else 'smaller'} is better."
    return [Section("Lottery tickets", [text, *([plot] if lines else []), table_of(curve["rows"], columns)])]


def _chain(values: Values) -> list[Section]:
    columns: Columns = {
        "stage": "stage", "student": lambda row: row["student"] or "the same", "parameters": "parameters",
        "teacher": lambda row: row["teacher"] or "none",
        "metrics": lambda row: ", ".join(f"{name} {value:.5g}" for name, value in row["metrics"].items()),
        "seconds": lambda row: round(row["seconds"], 1),
    }  # fmt: skip
    return [Section("Chain", [table_of(values["stages"], columns)])]


def _searched(values: Values) -> list[Section]:
    columns: Columns = {
        "candidate": "name", **{size: functools.partial(_size_of, size) for size in values["sizes"]},
        "parameters": "parameters", values["cost"]: "cost",
        "share": lambda row: None if row["share"] is None else round(row["share"], 4),
        str(values["metric"]): "quality", "state": "state", "front": lambda row: row["name"] in values["front"],
    }  # fmt: skip
    return [Section("Search", [table_of(values["rows"], columns)])]


def _size_of(name: str, row: Values) -> Any:
    return row["sizes"][name]


def _shrunk(values: Values) -> list[Section]:
    removed = [[name, values["units"].get(name), count] for name, count in values["removed"].items()]
    kept = [Table(["kept", "why"], list(values["kept"].items()))] if values["kept"] else []
    blocks: list[Block] = [Table(["group", "units", "removed"], removed), *map(str, values["notes"]), *kept]
    return [Section("Units removed", blocks)]


def _options(values: Values) -> Section:
    chosen = {**values.get("asked", {}), **values.get("config", {})}
    rows = [row for row in chosen.items() if row[1] not in (None, [], False, {})]
    return Section("What was asked", [Table(["option", "value"], rows)])
