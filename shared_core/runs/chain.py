"""Chains of students: each stage runs the user's training, with the previous stage's model as teacher."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rich.table import Table

from shared_core.distillation.config import CACHE, EMA, SELF
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, TrainingError, nearest, require
from shared_core.files.atomic import make_folder
from shared_core.files.hub_names import check_named
from shared_core.files.journal import Journal, check_same, read_object
from shared_core.front_ends.flags import check_before_imports, recipe_of
from shared_core.printing import table
from shared_core.runs.command import TrainingCommand, without_secrets
from shared_core.runs.executors import Executor, LocalExecutor
from shared_core.runs.trained_model import (
    check_distilled,
    count_parameters,
    find_model,
    model_metrics,
    usual_metric,
)

_DISTILL = "distill_"


@dataclass(frozen=True)
class Stage:
    """One training of a chain."""

    number: int
    """From 1."""
    student: str | None
    """The value of ``{student}``; None in a chain of generations."""
    teacher: str | None
    """A path or Hub name, or the previous stage's name; None: it learns from the labels only."""
    flags: Mapping[str, Any]
    """Our flags, without the teacher."""

    @property
    def name(self) -> str:
        """Name of its folder, also used in messages."""
        return f"stage-{self.number}"

    def recipe(self, teacher: str | None) -> Recipe:
        """Return the recipe that the stage trains with.

        Args:
            teacher: The path or name of its teacher; None for a stage without one.

        Raises:
            ConfigError: If a flag is wrong.
        """
        if teacher is not None:
            return recipe_of({**self.flags, "distill_teacher": teacher})
        return recipe_of({name: value for name, value in self.flags.items() if not name.startswith(_DISTILL)})

    def plan(self) -> dict[str, Any]:
        """Return as plain values what must stay the same when the chain resumes."""
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
        command: The training command. Our flags in it apply to every stage.
        teacher: The first stage's teacher: a folder, file or Hub name, ``cache:FOLDER``; None: labels only.
        students: Values of ``{student}``, one per stage; or
        generations: how often the same student is trained; by default once.
        options: Options of distillation, each with one value for all stages or one per stage with a teacher.

    Raises:
        ConfigError: If an option, flag or placeholder is wrong, or nothing would be distilled.
        CheckpointError: If the teacher does not exist or cannot be read.

    Example:
        >>> command = TrainingCommand.parse(["torchrun", "train.py", "{out}"], "chain")
        >>> [stage.teacher for stage in plan_stages(command, generations=3)]
        [None, 'stage-1', 'stage-2']
    """
    _check(command, teacher, students, generations)
    names: list[str | None] = list(students) or [None] * (generations or 1)
    teachers = [None if teacher is None else _checked_teacher(str(teacher))]
    teachers += [f"stage-{number}" for number in range(1, len(names))]
    # One value for all stages, or one per stage with a teacher. Without a first teacher, that is one stage less.
    own = _by_stage(command, options or {}, len(names) - (teacher is None))
    own = own if teacher is not None else [{}, *own]
    stages = [Stage(number, *one, {**command.flags, **own[number - 1]}) for number, one in
              enumerate(zip(names, teachers, strict=True), 1)]  # fmt: skip
    for stage in stages:  # build every recipe once now, so that a wrong option does not cost a training
        rule = "eff_recipe must have no distill section"
        require("distill" not in stage.recipe(None), "chain", rule, "pass its options as flags, --distill_…")
        check_before_imports(stage.recipe(stage.teacher))
    return stages


def _check(command: TrainingCommand, teacher: object, students: Sequence[str], generations: int | None) -> None:
    rules = (
        (generations is not None and students, "one of students and generations must be given, got both",
         "students a b, or generations 3"),
        (generations is not None and (isinstance(generations, bool) or generations < 1),
         f"generations must be at least 1, got {generations!r}", ""),
        (not command.uses("{out}"), "command must contain {out}, the stage's folder, got none",
         "write it where the script takes its output folder: --output_dir {out}"),
        (len({*students}) > 1 and not command.uses("{student}"),
         "command must contain {student}, else every stage trains the same one",
         "write it where the script takes the model: --model_name_or_path {student}"),
        (not students and command.uses("{student}"), "command must not contain {student} with generations",
         "name students instead"),
        (teacher is None and command.uses("{teacher}"),
         "command must not contain {teacher} if the first stage has none", "give the teacher"),
    )  # fmt: skip
    for is_broken, rule, remedy in rules:
        require(not is_broken, "chain", rule, remedy)


def _checked_teacher(name: str) -> str:
    """Return the first teacher: on disk as an absolute path, and for a run's folder the model in it."""
    found = []
    for part in map(str.strip, name.split(",")):
        # A copy or a moving average belongs to the same run, so it cannot be a stage's first teacher.
        rule = f"teacher must be an existing model, got {part}"
        require(part not in (SELF, EMA), "chain", rule, "the first stage can train without a teacher")
        prefix = CACHE if part.startswith(CACHE) else ""
        path = Path(part.removeprefix(prefix)).expanduser()
        if prefix:
            rule = f"the teacher cache {str(path)!r} does not exist"
            require(path.is_dir(), "chain", rule, "write it with `eff cache-teacher`", error=CheckpointError)
        else:
            check_named(part, "chain", "teacher")
        if path.exists() and not prefix:
            from shared_core.checkpoint_formats import open_ingredient

            path = find_model(path) if path.is_dir() else path
            open_ingredient(path).close()
        found.append(f"{prefix}{path.resolve()}" if path.exists() else part)
    return ",".join(found)


def _by_stage(command: TrainingCommand, options: Mapping[str, Sequence[Any]], taught: int) -> list[dict[str, Any]]:
    """Return the distillation options of each stage with a teacher."""
    is_own = "teacher" in options or f"{_DISTILL}teacher" in command.flags
    require(not is_own, "chain", "distill_teacher must not be given: every stage has its own", "use teacher")
    for name, values in options.items():
        is_twice = f"{_DISTILL}{name}" in command.flags
        require(not is_twice, "chain", f"distill_{name} must be given once, got it before and after --")
        rule = f"must have one value, or one for each of the {taught} stages with a teacher, got {len(values)}"
        require(len(values) in (1, taught), "chain", f"distill_{name} {rule}")
    return [
        {f"{_DISTILL}{name}": values[index if len(values) > 1 else 0] for name, values in options.items()}
        for index in range(taught)
    ]


JOURNAL_FILE = "chain.json"
_VALIDATION = ("eval_", "val_")


@dataclass(frozen=True)
class ChainRow:
    """A finished stage."""

    stage: int
    student: str | None
    teacher: str | None
    """Its teacher as given, or the previous stage; None: it learned from the labels only."""
    flags: Mapping[str, Any]
    """Our flags that it trained with, without the teacher."""
    model: str
    """Path of its model, relative to the chain's folder."""
    parameters: int
    teacher_parameters: int | None
    """None without a teacher, or with a cached one."""
    batches: int
    """Micro-batches that the teacher processed."""
    metrics: Mapping[str, float]
    seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ChainTable:
    """The finished stages of a chain, in order."""

    rows: tuple[ChainRow, ...]
    chosen: str | None = None
    """The requested metric."""

    @property
    def metric(self) -> str | None:
        """The metric shown for each row: by default the validation loss, or a validation's only figure."""
        return self.chosen or usual_metric(self.known)

    def figure(self, row: ChainRow) -> float | None:
        """Return the metric of a stage, None if it was not measured."""
        return row.metrics.get(self.metric or "")

    @property
    def known(self) -> list[str]:
        """Names of the metrics that validations reported."""
        return sorted({name for row in self.rows for name in row.metrics if name.startswith(_VALIDATION)})

    def json(self) -> str:
        """Return the stages as JSON."""
        rows = [{**asdict(row), "metric": self.figure(row)} for row in self.rows]
        return json.dumps({"metric": self.metric, "stages": rows}, indent=1)

    def table(self) -> Table:
        """Return one row per stage."""
        hint = f", --metric may be {', '.join(self.known)}" if self.metric is None and self.known else ""
        columns = ["stage", "student", "parameters", "teacher", self.metric or "no metric", "seconds"]
        rows = []
        for row in self.rows:
            names = (row.stage, row.student or "the same", f"{row.parameters:,}", row.teacher or "none")
            rows.append((*names, self.figure(row), f"{row.seconds:.1f}"))
        return table(f"chain{hint}", ("student", "teacher"), columns, rows)


class TeacherChain:
    """A chain of students over the user's own training, each taught by the previous stage's model.

    With students of falling size these are teacher assistants; with the same student each time, born-again networks.

    Args:
        command: ``["python", "my_train.py", …]`` runs as under `eff run`. In an argument, ``{out}`` is the stage's
            folder, ``{student}`` its student, ``{teacher}`` its teacher's path, ``{stage}`` its number, ``{recipe}``
            the file of its recipe.
        folder: Everything is written here. A chain that was stopped or killed resumes from it.
        model: A glob for the model under ``{out}``; by default it is searched.
        metric: The metric in the table; by default the validation loss.
        executor: Starts the stages elsewhere; None: on this machine.
        plan: The stages as `plan_stages` takes them: teacher, students or generations, options.

    Raises:
        ConfigError: If an option or the command is wrong.
        CheckpointError: If the teacher cannot be read, or the folder belongs to another chain.

    Source: Mirzadeh et al. 2019, arXiv:1902.03393; Furlanello et al. 2018, arXiv:1805.04770.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path | str,
        *,
        model: str | None = None,
        metric: str | None = None,
        executor: Executor | None = None,
        **plan: Any,
    ) -> None:
        self.folder, self._executor, self._model, self.metric = Path(folder), executor, model, metric
        self._command = TrainingCommand.parse(command, "chain")
        self.stages = plan_stages(self._command, **plan)
        rule = f"out must have no comma in its path, which separates teachers, got {self.folder}"
        require("," not in str(self.folder.resolve()), "chain", rule)
        shown = {"command": without_secrets(command)}
        self._journal = Journal(self.folder / JOURNAL_FILE, "chain", "chain", shown, own="[!.]*")
        self._rows: list[ChainRow] = []
        self._trained: dict[str, Any] = {}  # a stage that has trained but has no row yet
        self._read()

    @property
    def table(self) -> ChainTable:
        """The finished stages."""
        return ChainTable(tuple(self._rows), self.metric)

    def run(
        self,
        *,
        resume: bool = False,
        output: BinaryIO | None = None,
        begin: Callable[[Stage], object] = lambda stage: None,
        end: Callable[[ChainTable], object] = lambda table: None,
    ) -> ChainTable:
        """Run the unfinished stages, and return the table of all stages.

        Args:
            resume: Keep the folder of a half-run stage, for a script that resumes from it. By default the stage
                starts anew in an empty folder.
            output: Stream for the training's output; the stage's log always has it.
            begin: Called with a stage before it runs.
            end: Called with the table after every stage.

        Raises:
            RunError: If a training failed.
            TrainingError: If a stage was not distilled, another process works on this chain, or a finished stage did
                not log the metric.
            CheckpointError: If a stage left no model.
        """
        with self._journal.locked() as lock:
            self._read()  # again under the lock: another process may have finished stages since
            self._write()
            self._check_metric()
            for stage in self.stages[len(self._rows) :]:
                begin(stage)
                row = self._trained_before(stage)
                if row is None:
                    self._train(stage, resume, self._executor or LocalExecutor("chain", lock), output)
                    row = self._row(stage)
                self._rows.append(row)
                self._trained = {}
                self._write()
                self._check_metric()
                end(self.table)
        return self.table

    def _check_metric(self) -> None:
        for row in self._rows:
            hint = nearest(self.metric or "", row.metrics)
            rule = f"metric must be one that stage-{row.stage} logged, got {self.metric!r}{hint}"
            remedy = "run the chain again with that name: finished stages are kept"
            require(self.metric is None or self.metric in row.metrics, "chain", rule, remedy, TrainingError)

    def _trained_before(self, stage: Stage) -> ChainRow | None:
        """Return the row of a stage that has trained, but whose model was not found then (a wrong --model)."""
        if self._trained and stage.plan().items() <= self._trained.items():
            with contextlib.suppress(CheckpointError):
                return self._row(stage)
        return None

    def _train(self, stage: Stage, resume: bool, executor: Executor, output: BinaryIO | None) -> None:
        from shared_core.engine.receipt import VARIABLE as RECEIPT_VARIABLE

        out = self.folder / stage.name
        log, file, receipt = (out.with_name(f"{out.name}.{end}") for end in ("log", "yaml", "receipt.json"))
        if not resume:
            log.unlink(missing_ok=True)
            if out.exists():
                shutil.rmtree(out)
        make_folder(out)
        receipt.unlink(missing_ok=True)  # an earlier attempt's must not count for this one
        teacher = str((self.folder / self._rows[-1].model).resolve()) if self._rows else stage.teacher
        signs = {"student": stage.student, "out": out.resolve(), "teacher": teacher, "stage": stage.number}
        stands_for = {f"{{{name}}}": str(value or "") for name, value in signs.items()}
        started = time.monotonic()
        self._command.start(
            stage.name, stage.recipe(teacher), file, stands_for, log, executor,
            {RECEIPT_VARIABLE: str(receipt.resolve())},
        ).finish(output)  # fmt: skip
        # On disk before its model is searched: the costly part is done.
        self._trained = {**stage.plan(), "seconds": round(time.monotonic() - started, 1)}
        self._distilled(stage)
        self._write()

    def _row(self, stage: Stage) -> ChainRow:
        report, out = self._distilled(stage), self.folder / stage.name
        model = find_model(out, self._model)
        parameters = count_parameters(model, self.stages[-1].flags.get("distill_student"))
        of_teacher = report.get("teacher_parameters")
        return ChainRow(
            **stage.plan(),
            model=str(model.relative_to(self.folder)),
            parameters=parameters,
            teacher_parameters=of_teacher,
            batches=int(report.get("batches", 0)),
            metrics=model_metrics(out, model, self._receipt(stage)),
            seconds=self._trained["seconds"],
            warnings=tuple(_size_warnings(stage, parameters, of_teacher)),
        )

    def _receipt(self, stage: Stage) -> dict[str, Any]:
        file = self.folder / f"{stage.name}.receipt.json"
        return read_object(file) if file.is_file() else {}

    def _distilled(self, stage: Stage) -> Mapping[str, Any]:
        """Return the receipt's report of distillation. Raise an error if it is missing but required."""
        if stage.teacher is None:
            return {}
        return check_distilled(self._receipt(stage), "chain", stage.name)

    def _read(self) -> None:
        """Read the finished stages, and one that has trained but has no row yet."""
        noted, file = self._journal.read("stages", "trained"), self._journal.file
        self._trained = noted.get("trained") or {}
        try:
            self._rows = [ChainRow(**{**row, "warnings": tuple(row["warnings"])}) for row in noted.get("stages", ())]
        except (TypeError, KeyError) as error:
            raise CheckpointError(file, "file must hold the stages of a chain", "it is damaged, remove it") from error
        for row, stage in zip(self._rows, self.stages, strict=False):
            plan = stage.plan()
            check_same(file, {name: getattr(row, name) for name in plan}, plan, "chain")
            # A stage's model is the next one's teacher.
            model = self.folder / row.model
            rule = f"the model of {stage.name} is missing: {model}"
            require(model.exists(), file, rule, "restore it, or choose another folder", CheckpointError)
        rule = f"chain must have at least the {len(self._rows)} finished stages, got {len(self.stages)}"
        remedy = "pass the same stages or more, or choose another folder"
        require(len(self._rows) <= len(self.stages), file, rule, remedy, CheckpointError)

    def _write(self) -> None:
        self._journal.write(stages=[asdict(row) for row in self._rows], trained=self._trained)


def _size_warnings(stage: Stage, parameters: int, of_teacher: int | None) -> Iterator[str]:
    if stage.student is not None and of_teacher is not None and parameters >= of_teacher:
        yield (
            f"{stage.name}: {stage.student} has {parameters:,} parameters, not fewer than its teacher's "
            f"{of_teacher:,}; an assistant helps if its size is between its teacher's and the next student's"
        )
