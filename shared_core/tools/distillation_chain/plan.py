"""Read a finished training: its model, how large that is, the results of its validations.

Who learns from whom: the stages of a chain, checked before any of them runs.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.checkpoint_formats import averaged, load_checkpoint, open_ingredient
from shared_core.distillation.config import CACHE, EMA
from shared_core.engine.receipt import figures
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, ConfigError
from shared_core.files.atomic import is_stray
from shared_core.files.journal import read_object
from shared_core.front_ends.training_command import TrainingCommand

_STATE = "trainer_state.json"
_STATISTICS = ("running_mean", "running_var")


def find_model(folder: Path, pattern: str | None = None) -> Path:
    """Return the model that a training wrote into `folder`.

    The folder itself where it holds weights, else its best ``checkpoint-*``, else the best ``.ckpt`` under it. The best
    is what the trainer says it is; the newest where it was told no metric.

    Args:
        folder: The training's output folder.
        pattern: Where in it the script writes its model, if elsewhere; of several matches the newest is taken.

    Raises:
        CheckpointError: If there is none.
    """
    if pattern is not None:
        # Of several files the newest: a script may have written others before.
        found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
        if not found:
            raise CheckpointError("chain", f"{folder} must hold a model under {pattern!r}, got nothing there")
        return found[-1]
    if any(any(folder.glob(f"{stem}*")) for stem in ("model.safetensors", "pytorch_model.bin")):
        return folder
    if checkpoints := _checkpoints(folder):
        state = _state(checkpoints[-1])
        # The trainer's own choice, if it made one: its path may be of the folder's place at that time, so the name
        # counts.
        best = folder / Path(str(state.get("best_model_checkpoint"))).name
        return best if best in checkpoints else checkpoints[-1]
    files = {file: load_checkpoint(file) for file in folder.rglob("*.ckpt") if not is_stray(file)}
    if files:
        # Every .ckpt holds its ModelCheckpoint's state: that of the newest knows the best.
        newest = max(files, key=lambda file: (_steps(files[file]), file.stat().st_mtime))
        best = Path(str(_monitor(files[newest]).get("best_model_path")))
        return next((file for file in files if file.resolve() == best.resolve()), newest)
    raise CheckpointError(
        "chain",
        f"{folder} must hold the trained model, a Transformers folder, checkpoint-* or .ckpt, got none",
        "the script must save it there (save_model, ModelCheckpoint), or say where under {out} it lies (--model)",
    )


def count_parameters(model: Path, submodule: str | None = None) -> int:
    """Return how many weights a saved model has; each tied one once, without the statistics of batch norms.

    Args:
        model: As `find_model` returns it.
        submodule: Count only these of a ``.ckpt``, where there are any.
    """
    opened = open_ingredient(model)
    # Statistics of batch norms are no weights. Ties count once, as the ingredient has them once.
    specs = {name: spec for name, spec in opened.specs.items() if not name.endswith(_STATISTICS)}
    if model.suffix == ".ckpt" and submodule:
        # A Lightning file holds the whole module: the student is a part of it.
        specs = {name: spec for name, spec in specs.items() if name.startswith(f"{submodule}.")} or specs
    return sum(math.prod(spec.shape) for spec in specs.values() if averaged(spec.dtype))


def model_metrics(folder: Path, model: Path, receipt: Mapping[str, Any]) -> dict[str, float]:
    """Return what was measured of a model: by the script itself at its end, else by the trainer when it was saved.

    Args:
        folder: The training's output folder, with ``*_results.json``, ``trainer_state.json`` or ``metrics.csv``.
        model: The model in it; figures logged after it was saved are not its own.
        receipt: Of the training, empty if there is none; its last validation counts where nothing else tells.
    """
    # From the least to the most telling: later ones take the place of earlier figures of the same name.
    found = figures(receipt.get("validation", {}))
    last: int | None = None
    checkpoint = load_checkpoint(model) if model.suffix == ".ckpt" else {}
    if checkpoint:
        last = _steps(checkpoint)
    elif model.name.startswith("checkpoint-"):
        last = int(model.name.removeprefix("checkpoint-"))
    for file in folder.rglob("metrics.csv"):
        with file.open(newline="", encoding="utf-8") as rows:
            found |= _up_to(last, map(_numbers, csv.DictReader(rows)))
    state = next(filter(None, map(_state, (model, folder, *reversed(_checkpoints(folder))))), {})
    found |= _up_to(last, state.get("log_history", ()))
    monitor = _monitor(checkpoint)
    if monitor:
        is_best = Path(str(monitor.get("best_model_path"))).resolve() == model.resolve()
        score = monitor.get("best_model_score" if is_best else "current_score")
        found |= figures({monitor["monitor"]: score})
    for file in folder.glob("*_results.json"):
        found |= figures(_object(file))
    return {name: value for name, value in sorted(found.items()) if name not in ("step", "epoch")}


def _up_to(last: int | None, entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the latest figure of each name, of entries until a step."""
    found: dict[str, float] = {}
    for entry in entries:
        # Figures of steps after this model belong to another one.
        if last is None or float(entry.get("step", 0)) <= last:
            found |= figures(entry)
    return found


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, text in row.items():
        with contextlib.suppress(ValueError, TypeError):
            found[str(name)] = float(text)
    return found


def _object(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where it is none, or another's that holds something else."""
    with contextlib.suppress(CheckpointError):
        return read_object(file)
    return {}


def _checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def _state(folder: Path) -> dict[str, Any]:
    return _object(folder / _STATE)


def _steps(checkpoint: Any) -> int:
    return int(checkpoint.get("global_step", 0)) if isinstance(checkpoint, Mapping) else 0


def _monitor(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the first ModelCheckpoint that watches a metric, empty if none does."""
    callbacks = checkpoint.get("callbacks", {})
    states = [state for name, state in callbacks.items() if str(name).startswith("ModelCheckpoint")]
    return next((state for state in states if state.get("monitor")), {})


_DISTILL = "distill_"


@dataclass(frozen=True)
class Stage:
    """One training of a chain."""

    number: int
    """From 1."""
    student: str | None
    """The value of ``{student}``; None in a chain of generations."""
    teacher: str | None
    """A path or Hub name, or the name of the stage before; None: it learns from the labels alone."""
    flags: Mapping[str, Any]
    """Our flags, without the teacher."""

    @property
    def name(self) -> str:
        """Of its folder, and for messages."""
        return f"stage-{self.number}"

    def recipe(self, teacher: str | None) -> Recipe:
        """Return what the stage trains with.

        Args:
            teacher: The path or name that its teacher is loaded by; None for a stage without one.

        Raises:
            ConfigError: If a flag is wrong.
        """
        from shared_core.front_ends.flags import recipe_of

        if teacher is not None:
            return recipe_of({**self.flags, "distill_teacher": teacher})
        return recipe_of({name: value for name, value in self.flags.items() if not name.startswith(_DISTILL)})

    def plan(self) -> dict[str, Any]:
        """Return what must be the same when the chain goes on, as plain values."""
        return {"stage": self.number, "student": self.student, "teacher": self.teacher, "flags": dict(self.flags)}


def plan_stages(
    command: TrainingCommand,
    *,
    teacher: str | None = None,
    students: Sequence[str] = (),
    generations: int | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
) -> list[Stage]:
    """Return the stages of a chain.

    Args:
        command: The training; its flags of ours are those of every stage.
        teacher: Of the first stage: a folder, file or Hub name; ``cache:FOLDER``. None: labels alone.
        students: What ``{student}`` stands for in each stage; or
        generations: how many times the same student is trained.
        options: Options of distillation, each with one value for every stage or one for each that has a teacher.

    Raises:
        ConfigError: If an option, a flag or a sign of the command is wrong, or nothing would be distilled.
        CheckpointError: If the teacher is not there, or cannot be read.

    Example:
        >>> command = TrainingCommand.parse(["torchrun", "train.py", "{out}"], "chain")
        >>> [stage.teacher for stage in plan_stages(command, generations=3)]
        [None, 'stage-1', 'stage-2']
    """
    if (generations is None) == (not students):
        raise ConfigError("chain", "one of students and generations must be given", "students a b, or generations 3")
    if generations is not None and (isinstance(generations, bool) or generations < 1):
        raise ConfigError("chain", f"generations must be at least 1, got {generations!r}")
    names: list[str | None] = list(students) or [None] * (generations or 0)
    if teacher is None and len(names) == 1:
        raise ConfigError("chain", "one stage must have a teacher, got none", "give it, or another stage")
    _check_signs(command, names, teacher)
    teacher = None if teacher is None else _checked_teacher(teacher)
    # One value for all stages, or one a stage that has a teacher: without a first teacher, one stage less has one.
    by_stage = _by_stage(command, options or {}, len(names) - (teacher is None))
    if teacher is None:
        by_stage = [{}, *by_stage]
    stages = [
        Stage(number, student, teacher if number == 1 else f"stage-{number - 1}", {**command.flags, **own})
        for number, (student, own) in enumerate(zip(names, by_stage, strict=True), 1)
    ]
    for stage in stages:  # every recipe is built once now, so that a wrong option does not cost a training
        if "distill" in stage.recipe(None):
            raise ConfigError(
                "chain", "eff_recipe must have no distill section", "give its options as flags, --distill_…"
            )
        stage.recipe(stage.teacher)
    return stages


def _check_signs(command: TrainingCommand, names: Sequence[str | None], teacher: str | None) -> None:
    if not command.uses("{out}"):
        raise ConfigError(
            "chain",
            "command must contain {out}, the stage's folder, got none",
            "write it where the script takes its output folder: --output_dir {out}",
        )
    if len(set(names)) > 1 and not command.uses("{student}"):
        raise ConfigError(
            "chain",
            "command must contain {student}, else every stage trains the same one",
            "write it where the script takes the model: --model_name_or_path {student}",
        )
    if names[0] is None and command.uses("{student}"):
        raise ConfigError("chain", "command must not contain {student} with generations", "name students instead")
    if teacher is None and command.uses("{teacher}"):
        raise ConfigError(
            "chain", "command must not contain {teacher} where the first stage has none", "give the teacher"
        )


def _checked_teacher(name: str) -> str:
    """Return the first teacher, where it lies on disk by its absolute path and, of a run's folder, the model in it."""
    found = []
    for part in (part.strip() for part in name.split(",")):
        # A moving average is of the same run: it cannot be a stage's first teacher.
        if part == EMA:
            raise ConfigError("chain", "teacher must be a model that is there, got ema", "the first may go without one")
        prefix = CACHE if part.startswith(CACHE) else ""
        path = Path(part.removeprefix(prefix)).expanduser()
        if prefix and not path.is_dir():
            raise CheckpointError("chain", f"teacher must be a cached one that exists, got {part!r}")
        if not path.exists():
            if _looks_like_path(part):
                raise CheckpointError("chain", f"teacher must be an existing model or a Hub name, got {part!r}")
            found.append(part)
            continue
        if not prefix:
            path = find_model(path) if path.is_dir() else path
            open_ingredient(path).close()
        found.append(f"{prefix}{path.resolve()}")
    return ",".join(found)


def _looks_like_path(name: str) -> bool:
    folder, slash, _ = name.rpartition("/")
    return (
        name.startswith((".", "~"))
        or name.endswith((".ckpt", ".safetensors"))
        or (bool(slash) and ("/" in folder or Path(folder or "/").is_dir()))
    )


def _by_stage(command: TrainingCommand, options: Mapping[str, Sequence[Any]], taught: int) -> list[dict[str, Any]]:
    """Return the options of distillation of each stage that has a teacher."""
    if f"{_DISTILL}teacher" in {*command.flags, *(f"{_DISTILL}{name}" for name in options)}:
        raise ConfigError("chain", "distill_teacher must not be given, every stage has its own", "give teacher")
    for name, values in options.items():
        if f"{_DISTILL}{name}" in command.flags:
            raise ConfigError("chain", f"distill_{name} must be given once, got it before and after --")
        if len(values) not in (1, taught):
            raise ConfigError(
                "chain",
                f"distill_{name} must have one value, or one for each of the {taught} stages with a teacher, got "
                f"{len(values)}",
            )
    return [
        {f"{_DISTILL}{name}": values[index if len(values) > 1 else 0] for name, values in options.items()}
        for index in range(taught)
    ]
