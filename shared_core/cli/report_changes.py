"""Before and after: what the files of a run say of quality, size, latency and memory. Nothing is computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.cli.run_folder import RunFolder
from shared_core.page import Cell, Table

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
        "share": [("bytes of the shared weights, as stored and as codes", "bytes", "code_bytes")],
        "checkpointing": [
            ("peak bytes of a step, planned", "peak_bytes_without", "predicted_peak_bytes"),
            ("peak bytes of a step, measured", "", "measured_peak_bytes"),
            ("bytes of activations that one backward recomputed", "", "saved_bytes"),
        ],
        "prune": [("zeros among the weights within reach", "", "pruned"), ("sparsity", "", "sparsity")],
        "ticket": [("weights left in the ticket", "numel", "kept")],
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
    for name in ("bytes", "flops", "milliseconds"):
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
