"""What a finished training left: its model, the model's size, its validations, and the metric for comparing runs."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from shared_core.errors import CheckpointError, TrainingError, require
from shared_core.files.atomic import is_stray
from shared_core.files.journal import read_object
from shared_core.printing import listed
from shared_core.soup.config import larger_is_better

_STATISTICS = ("running_mean", "running_var")


def find_model(folder: Path, pattern: str | None = None, where: str = "chain", flag: str = "--model") -> Path:
    """Return the model that a training wrote into `folder`.

    That is the folder itself if it has weights, else its best ``checkpoint-*``, else the best ``.ckpt`` in it. The
    trainer decides which is best. Without a metric it is the newest.

    Args:
        folder: The output folder of the training.
        pattern: A glob in it, to use instead.
        where: The calling command, for errors.
        flag: Its option for the glob, for errors.
    """
    if pattern is not None:
        # Of several files the newest: a script may have written others before.
        found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
        require(found, where, f"{folder} has no model under {pattern!r}", "", CheckpointError)
        return found[-1]
    if any(any(folder.glob(f"{stem}*")) for stem in ("model.safetensors", "pytorch_model.bin")):
        return folder
    if checkpoints := _checkpoints(folder):
        state = _state(checkpoints[-1])
        # The trainer's own choice, if it made one. Its path may refer to an earlier location of the folder, so only the
        # name counts.
        best = folder / Path(str(state.get("best_model_checkpoint"))).name
        return best if best in checkpoints else checkpoints[-1]
    from shared_core.checkpoint_formats import load_checkpoint

    files = {file: load_checkpoint(file) for file in folder.rglob("*.ckpt") if not is_stray(file)}
    if files:
        # Every .ckpt has its ModelCheckpoint's state: the newest one's knows the best.
        newest = max(files, key=lambda file: (_steps(files[file]), file.stat().st_mtime))
        best = Path(str(_monitor(files[newest]).get("best_model_path")))
        return next((file for file in files if file.resolve() == best.resolve()), newest)
    raise CheckpointError(
        where,
        f"{folder} has no trained model (a Transformers folder, checkpoint-* or .ckpt)",
        f"the script must save it there (save_model, ModelCheckpoint), or pass its path under {{out}} ({flag})",
    )


def count_parameters(model: Path, submodule: str | None = None) -> int:
    """Return the number of weights of a saved model. Tied ones count once, batch norm statistics don't count."""
    from shared_core.checkpoint_formats import averaged, open_ingredient

    opened = open_ingredient(model)
    # Statistics of batch norms are not weights. Ties count once, as the ingredient stores them once.
    specs = {name: spec for name, spec in opened.specs.items() if not name.endswith(_STATISTICS)}
    if model.suffix == ".ckpt" and submodule:
        # A Lightning file holds the whole module, and the student is a part of it.
        specs = {name: spec for name, spec in specs.items() if name.startswith(f"{submodule}.")} or specs
    return sum(math.prod(spec.shape) for spec in specs.values() if averaged(spec.dtype))


def model_metrics(folder: Path, model: Path, receipt: Mapping[str, Any]) -> dict[str, float]:
    """Return a model's metrics: from the script's end, else from the trainer when the model was saved."""
    from shared_core.checkpoint_formats import load_checkpoint
    from shared_core.engine.observers.history import numeric_metrics

    # From the least to the most reliable: later ones replace earlier figures of the same name.
    found = numeric_metrics(receipt.get("validation", {}))
    last = int(model.name.removeprefix("checkpoint-")) if model.name.startswith("checkpoint-") else None
    checkpoint = load_checkpoint(model) if model.suffix == ".ckpt" else {}
    last = _steps(checkpoint) if checkpoint else last
    for file in folder.rglob("metrics.csv"):
        with file.open(newline="", encoding="utf-8") as rows:
            found |= _up_to(last, map(_numbers, csv.DictReader(rows)))
    state = next(filter(None, map(_state, (model, folder, *reversed(_checkpoints(folder))))), {})
    found |= _up_to(last, state.get("log_history", ()))
    if monitor := _monitor(checkpoint):
        is_best = Path(str(monitor.get("best_model_path"))).resolve() == model.resolve()
        score = monitor.get("best_model_score" if is_best else "current_score")
        found |= numeric_metrics({monitor["monitor"]: score})
    for file in folder.glob("*_results.json"):
        found |= numeric_metrics(_object(file))
    return {name: value for name, value in sorted(found.items()) if name not in ("step", "epoch")}


def validations(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric that a running or finished training has logged in its folder."""
    found: dict[int, float] = {}
    for file in folder.rglob("metrics.csv"):
        with contextlib.suppress(OSError), file.open(newline="", encoding="utf-8") as rows:
            entries = [_numbers(row) for row in csv.DictReader(rows)]
            found |= {int(one["step"]): one[metric] for one in entries if {"step", metric} <= one.keys()}
    for state in filter(None, map(_state, (*_checkpoints(folder), folder))):
        entries = [one for one in state.get("log_history", ()) if {"step", metric} <= one.keys()]
        found |= {int(one["step"]): float(one[metric]) for one in entries}
    return sorted(found.items())


def check_distilled(receipt: Mapping[str, Any], where: str, name: str) -> Mapping[str, Any]:
    """Return what a run's receipt says of distillation.

    Raises:
        TrainingError: If the run did not learn from its teacher.
    """
    report: Mapping[str, Any] = receipt.get("techniques", {}).get("distill", {})
    found = "its receipt has no distilled batch" if report else "its receipt has no distillation"
    remedy = (
        "the command must train to its end with the Hugging Face Trainer or Lightning, and use its recipe: "
        "`python my_train.py` does, any other command must read it from the file that EFF_RECIPE and {recipe} name"
    )
    require(report.get("batches"), where, f"{name} must learn from its teacher, but {found}", remedy, TrainingError)
    return report


def check_bits(receipt: Mapping[str, Any], bits: Mapping[str, int], where: str, name: str) -> None:
    """Raise `TrainingError` unless a run's receipt has these bits of each layer's weight."""
    layers = receipt.get("techniques", {}).get("qat", {}).get("per_layer", ())
    trained = {one.get("name"): one.get("weight_bits") for one in layers if isinstance(one, Mapping)}
    wrong = [layer for layer, width in bits.items() if trained.get(layer) != width]
    rule = f"{name} must be trained with the planned bits, but the receipt has others for {listed(wrong, 3)}"
    require(not wrong, where, rule, "the script must train the model that it loads, with all layers", TrainingError)


def _up_to(last: int | None, entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the latest figure of each name among entries up to a step."""
    from shared_core.engine.observers.history import numeric_metrics

    found: dict[str, float] = {}
    for entry in entries:
        # Figures of later steps belong to another model.
        if last is None or float(entry.get("step", 0)) <= last:
            found |= numeric_metrics(entry)
    return found


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, text in row.items():
        with contextlib.suppress(ValueError, TypeError):
            found[str(name)] = float(text)
    return found


def _checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _state(folder: Path) -> dict[str, Any]:
    return _object(folder / "trainer_state.json")


def _object(file: Path) -> dict[str, Any]:
    """Return a JSON file's object, empty if there is none or it holds something else."""
    with contextlib.suppress(CheckpointError):
        return read_object(file)
    return {}


def _steps(checkpoint: Any) -> int:
    return int(checkpoint.get("global_step", 0)) if isinstance(checkpoint, Mapping) else 0


def _monitor(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the first ModelCheckpoint that watches a metric, empty if none does."""
    callbacks = checkpoint.get("callbacks", {})
    states = [state for name, state in callbacks.items() if str(name).startswith("ModelCheckpoint")]
    return next((state for state in states if state.get("monitor")), {})


Mode = Literal["auto", "max", "min"]
_LOSSES = ("eval_loss", "val_loss")


def usual_metric(known: Iterable[str]) -> str | None:
    """Return the validation loss, or the only metric. None means that it must be chosen.

    Example:
        >>> usual_metric(["f1", "val_loss"]), usual_metric(["f1"]), usual_metric(["f1", "accuracy"])
        ('val_loss', 'f1', None)
    """
    names = sorted(known)
    return next((name for name in _LOSSES if name in names), names[0] if len(names) == 1 else None)


def is_larger_better(metric: str, mode: str) -> bool:
    """Return True if a metric is better when larger. With mode ``auto`` its name decides."""
    return mode == "max" if mode != "auto" else larger_is_better(metric)
