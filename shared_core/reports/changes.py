"""The figures of a run before and after: quality first, then size, latency and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shared_core.reports.page import Table
from shared_core.reports.run_folder import RunFolder

Values = Mapping[str, Any]
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".onnx", ".pte", ".eff")


class Change(NamedTuple):
    """A figure before and after, and what says so; None where the run does not hold it."""

    what: str
    before: float | None
    after: float | None
    source: str


def change_table(found: list[Change]) -> Table:
    """Return one row a figure."""
    rows = [
        [*change[:3], f"{change.after / change.before:.3g}×" if change.before and change.after is not None else None,
         change.source]
        for change in found
    ]  # fmt: skip
    return Table(["what", "before", "after", "after / before", "from"], rows)


_BEFORE_AFTER = [
    (name, f"{name}.before", f"{name}.after") for name in ("parameters", "loss", "bytes", "flops", "milliseconds")
]
_WITHIN_REACH = [("zeros among the weights within reach", "", "pruned"), ("sparsity", "", "sparsity")]
# what a figure is called, and where it lies before and after
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
        ("quality, float and quantised", "quality.float", "quality.quantized"),
        ("quality, float and trained quantised", "quality.float", "quality.qat"),
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
    """Return all that the run holds."""
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
    """Yield the figures that the values hold: those whose later place has a number, or a quality that is unknown."""
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
