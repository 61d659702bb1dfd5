"""Read what a finished run of a trainer or command left in its folder.

Curves that a trainer logged to TensorBoard are read with TensorBoard's own package.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared_core.checkpoint_formats import load_checkpoint
from shared_core.engine.receipt import RECEIPT_FILE, RECEIPT_KEY
from shared_core.errors import CheckpointError, require
from shared_core.files.journal import read_object
from shared_core.files.json_yaml import parse_json

EVENTS = "events.out.tfevents.*"


def event_curves(folders: Iterable[Path]) -> dict[str, list[tuple[int, float]]]:
    """Return tag → (step, value) for all finite scalars. If two folders have a step, the later one wins."""
    accumulators = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    points: dict[str, dict[int, float]] = {}
    for folder in folders:
        # 0: all, not a sample
        found = accumulators.EventAccumulator(str(folder), size_guidance={accumulators.SCALARS: 0}).Reload()
        for tag in found.Tags()[accumulators.SCALARS]:
            values = {event.step: event.value for event in found.Scalars(tag) if math.isfinite(event.value)}
            points.setdefault(tag, {}).update(values)
    return {tag: sorted(values.items()) for tag, values in points.items() if values}


def hugging_face_name(tag: str) -> str:
    """Return a figure's name in the trainer's own log from its name in TensorBoard.

    Example:
        >>> [hugging_face_name(tag) for tag in ("train/prune/sparsity", "eval/loss")]
        ['prune/sparsity', 'eval_loss']
    """
    kind, _, name = tag.partition("/")
    return {"train": name, "eval": f"eval_{name}", "test": f"test_{name}"}.get(kind, tag)


Values = dict[str, Any]
Curve = list[tuple[int, float]]
REPORTS = {
    "quantization": "eff_quantization.json",
    "pruning": "eff_pruning.json",
    "shrink": "eff_shrink.json",
    "low_rank": "eff_low_rank.json",
    "curve": "curve.json",
    "chain": "chain.json",
    "search": "search.json",
}
_RECEIPTS = f"{Path(RECEIPT_FILE).stem}*.json"
_LOG, _STATE, _SOUP, _COMMAND = "metrics.csv", "trainer_state.json", "soup_path.json", ".eff.json"
_SEARCH = "lottery.json"  # beside the curve of a lottery; other programs write curves too
_AXES = ("step", "epoch", "total_flos")


@dataclass
class RunFolder:
    """A run: its folder, the files that were read, and their contents."""

    path: Path
    files: list[str] = field(default_factory=list)
    receipt: Values | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    """Figure → (step, value), from the trainer's log, or from the receipt if that has later steps."""
    reports: dict[str, Values] = field(default_factory=dict)
    """Reports of commands, by the keys of `REPORTS`."""
    soups: dict[str, Values] = field(default_factory=dict)
    """Paths of soups, by file name."""
    exports: dict[str, Values] = field(default_factory=dict)
    """Reports of written files, by file name."""
    notes: list[str] = field(default_factory=list)

    @property
    def techniques(self) -> Mapping[str, Any]:
        """The report of each technique, empty without a receipt."""
        return self.receipt["techniques"] if self.receipt else {}


def read_run(path: Path) -> RunFolder:
    """Read a run's folder, or the reports beside a file that a command wrote.

    In Lightning's ``default_root_dir`` or ``lightning_logs`` this is the logger's newest version, in the Hugging Face
    Trainer's folder the newest checkpoint's log, unless the folder has its own.
    """
    run = RunFolder(path)
    with of_ours(run):
        if path.is_dir():
            _read_folder(run)
        elif path.suffix == ".ckpt":
            _read_checkpoint(run)
        elif path.match(_RECEIPTS) and (receipt := _json(run, path)) is not None:
            _take(run, receipt)
        _read_beside(run)
    rule = (
        f"{path} must be a run's folder, got one without a receipt ({RECEIPT_FILE}), a trainer's log ({_STATE}, "
        f"{_LOG}) or the report of a command"
    )
    remedy = "pass a run's output folder, a logger's folder, a .ckpt with a receipt, or a file that a command wrote"
    require(run.files, "eff report", rule, remedy, CheckpointError)
    return run


@contextlib.contextmanager
def of_ours(*runs: RunFolder) -> Iterator[None]:
    """Convert a reader's error into one that names the files."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        files = "; ".join(f"{run.path}: {', '.join(run.files)}" for run in runs)
        rule = f"cannot read files that efftrain should have written: {error!r} in {files}"
        raise CheckpointError("eff report", rule) from error


def _read_folder(run: RunFolder) -> None:
    versions = [run.path]
    if not (run.path / RECEIPT_FILE).is_file():
        versions = _newest(run.path, "version_*") or _newest(run.path, "*/version_*")
    home = next((at for at in versions if any(any(at.glob(name)) for name in (RECEIPT_FILE, _LOG, EVENTS))), None)
    home = home or run.path
    if len(versions) > 1:
        run.notes.append(
            f"{home.relative_to(run.path)} is the newest of {len(versions)} versions with a logger's files"
        )
    if (receipt := _json(run, home / RECEIPT_FILE)) is not None:
        _take(run, receipt)
        if others := sorted(file.name for file in home.glob(_RECEIPTS) if file.name != RECEIPT_FILE):
            run.notes.append(f"receipts of other runs in this folder: {', '.join(others)}")
    states = [folder / _STATE for folder in (run.path, *_newest(run.path, "checkpoint-*"))]
    state = next((file for file in states if file.is_file()), None)
    _read_events(run, home, of_hugging_face=state is not None or (receipt or {}).get("front_end") == "hf")
    if state is not None:
        _add(run, _curves((_json(run, state) or {}).get("log_history", [])))
    elif receipt is not None and receipt.get("front_end") == "hf":
        run.notes.append(f"no {_STATE} here, so the trainer's log is missing; trainer.save_state() writes it")
    if (home / _LOG).is_file():
        _add(run, _curves(_csv(run, home / _LOG)))
    for name, file in REPORTS.items():
        is_foreign = name == "curve" and not (run.path / _SEARCH).is_file()
        if not is_foreign and (found := _json(run, run.path / file)) is not None:
            run.reports[name] = found


def _read_checkpoint(run: RunFolder) -> None:
    text = load_checkpoint(run.path).get(RECEIPT_KEY)
    if text is not None:
        run.files.append(run.path.name)
        _take(run, dict(parse_json(text)))
        run.notes.append("the receipt is from the step at which this checkpoint was saved")


def _take(run: RunFolder, receipt: Values) -> None:
    run.receipt = receipt
    for points in receipt.get("history", {}).values():
        _add(run, _curves(points))


def _read_events(run: RunFolder, home: Path, *, of_hugging_face: bool) -> None:
    found = [*home.glob(EVENTS), *(home.glob(f"runs/*/{EVENTS}") if of_hugging_face else ())]
    files = sorted(found, key=lambda file: file.name)  # names begin with the time in seconds
    try:
        curves = event_curves(dict.fromkeys(file.parent for file in files)) if files else {}
    except ImportError:
        run.notes.append("TensorBoard's events were not read, because it is not installed (pip install tensorboard)")
        return
    run.files += [_name(run, file) for file in files]
    renamed = {hugging_face_name(tag) if of_hugging_face else tag: curve for tag, curve in curves.items()}
    _add(run, {name: curve for name, curve in renamed.items() if name not in _AXES})


def _read_beside(run: RunFolder) -> None:
    of_folder = run.path.is_dir()
    folder, stem = (run.path, "*") if of_folder else (run.path.parent, run.path.stem)
    soups = sorted(folder.glob(f"*{_SOUP}")) if of_folder else [folder / f"{stem}_{_SOUP}"]
    exports = sorted(folder.glob(f"*{_COMMAND}")) if of_folder else [folder / f"{run.path.name}{_COMMAND}"]
    for files, into in ((soups, run.soups), (exports, run.exports)):
        for file in files:
            if (found := _json(run, file)) is not None:
                into[file.name] = found


def _newest(folder: Path, pattern: str) -> list[Path]:
    """Return folders whose names end in a number, the largest number first."""
    found = [(int(number[0]), path) for path in folder.glob(pattern) if (number := re.findall(r"\d+$", path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def _json(run: RunFolder, file: Path) -> Values | None:
    if not file.is_file():
        return None
    run.files.append(_name(run, file))
    return read_object(file, "choose another folder")


def _csv(run: RunFolder, file: Path) -> list[Values]:
    run.files.append(_name(run, file))
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return [{name: _number(text) for name, text in row.items() if name} for row in csv.DictReader(stream)]
    except (OSError, ValueError, csv.Error) as error:
        raise CheckpointError(file, f"file must be a log of Lightning's CSVLogger, got {error}") from error


def _name(run: RunFolder, file: Path) -> str:
    return str(file.relative_to(run.path if run.path.is_dir() else run.path.parent))


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _curves(entries: list[Values]) -> dict[str, Curve]:
    """Return name → (step, value) for all finite numbers in entries with a step."""
    curves: dict[str, Curve] = {}
    for entry in entries:
        step = entry.get("step")
        if not isinstance(step, int | float):
            continue
        for name, value in entry.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in _AXES and number and math.isfinite(value):
                curves.setdefault(name, []).append((int(step), float(value)))
    return curves


def _add(run: RunFolder, curves: dict[str, Curve]) -> None:
    """Add curves of a log, except those that end earlier than known ones (from a checkpoint or a resumed run)."""
    for name, curve in curves.items():
        known = run.curves.get(name)
        if known is None or curve[-1][0] - curve[0][0] >= known[-1][0] - known[0][0]:
            run.curves[name] = curve
