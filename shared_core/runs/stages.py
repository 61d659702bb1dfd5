"""Who learns from whom in a chain of students: its stages, checked before any of them runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.checkpoint_formats import open_ingredient
from shared_core.distillation.config import CACHE, EMA
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, ConfigError
from shared_core.front_ends.flags import recipe_of
from shared_core.runs.command import TrainingCommand
from shared_core.runs.trained_model import find_model

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
        if teacher is not None:
            return recipe_of({**self.flags, "distill_teacher": teacher})
        return recipe_of({name: value for name, value in self.flags.items() if not name.startswith(_DISTILL)})

    def plan(self) -> dict[str, Any]:
        """Return what must be the same when the chain goes on, as plain values."""
        return {"stage": self.number, "student": self.student, "teacher": self.teacher, "flags": dict(self.flags)}


def plan_stages(
    command: TrainingCommand,
    *,
    teacher: Path | str | None = None,
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
    _check(command, teacher, students, generations)
    names: list[str | None] = list(students) or [None] * (generations or 0)
    teachers = [None if teacher is None else _checked_teacher(str(teacher))]
    teachers += [f"stage-{number}" for number in range(1, len(names))]
    # One value for all stages, or one a stage that has a teacher: without a first teacher, one stage less has one.
    own = _by_stage(command, options or {}, len(names) - (teacher is None))
    own = own if teacher is not None else [{}, *own]
    stages = [Stage(number, *one, {**command.flags, **own[number - 1]}) for number, one in
              enumerate(zip(names, teachers, strict=True), 1)]  # fmt: skip
    for stage in stages:  # every recipe is built once now, so that a wrong option does not cost a training
        if "distill" in stage.recipe(None):
            told = "eff_recipe must have no distill section"
            raise ConfigError("chain", told, "give its options as flags, --distill_…")
        stage.recipe(stage.teacher)
    return stages


def _check(command: TrainingCommand, teacher: object, students: Sequence[str], generations: int | None) -> None:
    number = len(students) or generations
    rules = (
        ((generations is None) == (not students), "one of students and generations must be given",
         "students a b, or generations 3"),
        (generations is not None and (isinstance(generations, bool) or generations < 1),
         f"generations must be at least 1, got {generations!r}", ""),
        (teacher is None and number == 1, "one stage must have a teacher, got none", "give it, or another stage"),
        (not command.uses("{out}"), "command must contain {out}, the stage's folder, got none",
         "write it where the script takes its output folder: --output_dir {out}"),
        (len({*students}) > 1 and not command.uses("{student}"),
         "command must contain {student}, else every stage trains the same one",
         "write it where the script takes the model: --model_name_or_path {student}"),
        (not students and command.uses("{student}"), "command must not contain {student} with generations",
         "name students instead"),
        (teacher is None and command.uses("{teacher}"),
         "command must not contain {teacher} where the first stage has none", "give the teacher"),
    )  # fmt: skip
    for is_broken, rule, remedy in rules:
        if is_broken:
            raise ConfigError("chain", rule, remedy)


def _checked_teacher(name: str) -> str:
    """Return the first teacher, where it lies on disk by its absolute path and, of a run's folder, the model in it."""
    found = []
    for part in map(str.strip, name.split(",")):
        # A moving average is of the same run: it cannot be a stage's first teacher.
        if part == EMA:
            raise ConfigError("chain", "teacher must be a model that is there, got ema", "the first may go without one")
        prefix = CACHE if part.startswith(CACHE) else ""
        path = Path(part.removeprefix(prefix)).expanduser()
        if prefix and not path.is_dir():
            raise CheckpointError("chain", f"teacher must be a cached one that exists, got {part!r}")
        if not path.exists() and _looks_like_path(part):
            raise CheckpointError("chain", f"teacher must be an existing model or a Hub name, got {part!r}")
        if path.exists() and not prefix:
            path = find_model(path) if path.is_dir() else path
            open_ingredient(path).close()
        found.append(f"{prefix}{path.resolve()}" if path.exists() else part)
    return ",".join(found)


def _looks_like_path(name: str) -> bool:
    folder, slash, _ = name.rpartition("/")
    is_path = name.startswith((".", "~")) or name.endswith((".ckpt", ".safetensors"))
    return is_path or (bool(slash) and ("/" in folder or Path(folder or "/").is_dir()))


def _by_stage(command: TrainingCommand, options: Mapping[str, Sequence[Any]], taught: int) -> list[dict[str, Any]]:
    """Return the options of distillation of each stage that has a teacher."""
    if f"{_DISTILL}teacher" in {*command.flags, *(f"{_DISTILL}{name}" for name in options)}:
        raise ConfigError("chain", "distill_teacher must not be given, every stage has its own", "give teacher")
    for name, values in options.items():
        if f"{_DISTILL}{name}" in command.flags:
            raise ConfigError("chain", f"distill_{name} must be given once, got it before and after --")
        if len(values) not in (1, taught):
            told = f"must have one value, or one for each of the {taught} stages with a teacher, got {len(values)}"
            raise ConfigError("chain", f"distill_{name} {told}")
    return [
        {f"{_DISTILL}{name}": values[index if len(values) > 1 else 0] for name, values in options.items()}
        for index in range(taught)
    ]
