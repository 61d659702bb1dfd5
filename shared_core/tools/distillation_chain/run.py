"""The stages of a chain with what they reached: as table and JSON.

A chain run: stage after stage in fresh processes, journalled, so that it goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from shared_core.engine.receipt import VARIABLE as RECEIPT_VARIABLE
from shared_core.errors import CheckpointError, ConfigError, TrainingError, nearest
from shared_core.files.atomic import clean_strays, make_folder
from shared_core.files.journal import check_same, locked, read_object, write_object
from shared_core.front_ends.executors import Executor, Run
from shared_core.front_ends.training_command import TrainingCommand, without_secrets
from shared_core.tools.distillation_chain.plan import Stage, count_parameters, find_model, model_metrics, plan_stages

_USUAL, _VALIDATION = ("eval_loss", "val_loss"), ("eval_", "val_")


@dataclass(frozen=True)
class ChainRow:
    """One finished stage."""

    stage: int
    student: str | None
    teacher: str | None
    """As it was given, or the stage before; None: it learned from the labels alone."""
    flags: Mapping[str, Any]
    """Our flags that it trained with, without the teacher."""
    model: str
    """Where its model lies, under the chain's folder."""
    parameters: int
    teacher_parameters: int | None
    """None without a teacher, or with a cached one."""
    batches: int
    """Micro-batches that the teacher was asked about."""
    metrics: Mapping[str, float]
    seconds: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ChainTable:
    """The finished stages of a chain, in order."""

    rows: tuple[ChainRow, ...]
    metric: str | None
    """The metric that is shown of each row."""

    def figure(self, row: ChainRow) -> float | None:
        """Return the metric of a stage, None if it was not measured."""
        return None if self.metric is None else row.metrics.get(self.metric)

    @property
    def known(self) -> list[str]:
        """Names of the metrics that validations reported."""
        return sorted({name for row in self.rows for name in row.metrics if name.startswith(_VALIDATION)})

    def json(self) -> str:
        """Return the stages as JSON."""
        rows = [{**asdict(row), "metric": self.figure(row)} for row in self.rows]
        return json.dumps({"metric": self.metric, "stages": rows}, indent=1)

    def table(self) -> Table:
        """Return one row a stage."""
        hint = f", --metric may be {', '.join(self.known)}" if self.metric is None and self.known else ""
        table = Table(title=f"chain{hint}", title_justify="left")
        table.add_column("stage", justify="right")
        table.add_column("student", overflow="fold")
        table.add_column("parameters", justify="right")
        table.add_column("teacher", overflow="fold")
        table.add_column(self.metric or "no metric", justify="right")
        table.add_column("seconds", justify="right")
        for row in self.rows:
            figure = self.figure(row)
            reached = "–" if figure is None else f"{figure:.6g}"
            names = (str(row.stage), row.student or "the same", f"{row.parameters:,}", row.teacher or "none")
            table.add_row(*names, reached, f"{row.seconds:.1f}")
        return table


def table_of(rows: tuple[ChainRow, ...], metric: str | None) -> ChainTable:
    """Return the table; without a metric it shows the validation loss, or the only figure of a validation."""
    known = ChainTable(rows, None).known
    usual = next((name for name in _USUAL if name in known), known[0] if len(known) == 1 else None)
    return ChainTable(rows, metric or usual)


JOURNAL_FILE = "chain.json"
_LOCK_FILE = ".chain.lock"
_FORMAT = 1
_LAST_LINES = 15
_POLL_SECONDS = 0.1


class StageError(TrainingError):
    """A stage's training failed.

    Args:
        message: What happened, with the last lines of the stage's log.
        exit_code: Of the training, as a shell would tell it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.args = (message, exit_code)  # what unpickling calls it with
        self.exit_code = exit_code


class TeacherChain:
    """A chain of students, each taught by the model of the stage before, over the user's own training.

    Students of falling size are teacher assistants; the same student again and again is born again.

    Args:
        command: ``["python", "my_train.py", …]`` runs as under `eff run`. ``{out}`` in an argument stands for the
            stage's folder, ``{student}`` for its student, ``{teacher}`` for its teacher's path, ``{stage}`` for its
            number, ``{recipe}`` for the file of its recipe.
        folder: Everything is written into it. A chain that was stopped, or killed, goes on from it.
        teacher: Of the first stage: folder, file or Hub name. None: that stage learns from the labels alone.
        students: What ``{student}`` stands for, stage after stage; or
        generations: How many times the same student is trained.
        options: Options of distillation by name, each with one value or one for each stage that has a teacher.
        model: Where under ``{out}`` the script writes its model, as a glob; by default it is looked for.
        metric: What the table shows; by default the validation loss.
        executor: Starts the stages elsewhere; None: here.

    Raises:
        ConfigError: If an option or the command is wrong.
        CheckpointError: If the teacher cannot be read, or the folder is of another chain.

    Source: Mirzadeh et al. 2019, arXiv:1902.03393; Furlanello et al. 2018, arXiv:1805.04770.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path | str,
        *,
        teacher: Path | str | None = None,
        students: Sequence[str] = (),
        generations: int | None = None,
        options: Mapping[str, Sequence[Any]] | None = None,
        model: str | None = None,
        metric: str | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.folder, self._executor = Path(folder), executor
        self._command = TrainingCommand.parse(command, "chain")
        first = None if teacher is None else str(teacher)
        self.stages = plan_stages(
            self._command, teacher=first, students=students, generations=generations, options=options
        )
        # A comma separates several teachers.
        if "," in str(self.folder.resolve()):
            raise ConfigError(
                "chain", f"out must have no comma in its path, which separates teachers, got {self.folder}"
            )
        self._plan = {"format": _FORMAT, "command": without_secrets(command)}
        self._model, self.metric = model, metric
        self._trained: dict[str, Any] = {}
        self._rows = self._finished_rows()

    @property
    def table(self) -> ChainTable:
        """The finished stages."""
        return table_of(tuple(self._rows), self.metric)

    def run(
        self,
        *,
        resume: bool = False,
        output: Callable[[bytes], object] | None = None,
        begin: Callable[[Stage], object] | None = None,
        end: Callable[[ChainTable], object] | None = None,
    ) -> ChainTable:
        """Run what is not finished, and return the table of all stages.

        Args:
            resume: Leave the folder of a half-run stage as it is, for a script that goes on from what it finds there;
                by default the stage starts anew in an empty one.
            output: Called with what the training prints, as it comes; it is in the stage's log in any case.
            begin: Called with a stage before it runs.
            end: Called with the table after every stage.

        Raises:
            StageError: If a training failed.
            TrainingError: If it was not distilled, somebody works on this chain now, or a finished stage did not log
                the metric.
            CheckpointError: If it left no model.
        """
        clean_strays(make_folder(self.folder))
        with locked(self.folder / _LOCK_FILE, "chain", "chain") as lock:
            # Read again under the lock: another process may have finished stages meanwhile.
            self._rows = self._finished_rows()
            self._write()
            self._check_metric()
            for stage in self.stages[len(self._rows) :]:
                if begin is not None:
                    begin(stage)
                self._rows.append(self._trained_before(stage) or self._run(stage, resume, lock, output))
                self._trained = {}
                self._write()
                self._check_metric()
                if end is not None:
                    end(self.table)
        return self.table

    def _check_metric(self) -> None:
        lacks = next((row for row in self._rows if self.metric is not None and self.metric not in row.metrics), None)
        if lacks is not None:
            raise TrainingError(
                "chain",
                f"metric must be one that stage-{lacks.stage} logged, got {self.metric!r}"
                f"{nearest(str(self.metric), lacks.metrics)}",
                "run the chain again with that name: finished stages are kept",
            )

    def _trained_before(self, stage: Stage) -> ChainRow | None:
        """Return a stage that was trained to its end, but whose model was not found; None if it still is not."""
        # The training ended, but its model was not found (a wrong --model): it need not be trained again.
        if self._trained and stage.plan().items() <= self._trained.items():
            with contextlib.suppress(CheckpointError):
                return self._row(stage, self._trained["seconds"])
        return None

    def _run(self, stage: Stage, resume: bool, lock: int, output: Callable[[bytes], object] | None) -> ChainRow:
        out = self.folder / stage.name
        log, receipt = self._beside(stage, "log"), self._beside(stage, "receipt.json")
        if out.exists() and not resume:
            shutil.rmtree(out)
        make_folder(out)
        # A receipt of an earlier try must not stand for this one.
        receipt.unlink(missing_ok=True)
        previous = None if stage.number == 1 else self.folder / self._rows[-1].model
        teacher = stage.teacher if previous is None else str(previous.resolve())
        stands_for = {
            "{student}": stage.student or "",
            "{out}": str(out.resolve()),
            "{teacher}": teacher or "",
            "{stage}": str(stage.number),
        }
        started = time.monotonic()
        with log.open("ab" if resume else "wb") as written:
            # With resume the log grows: show only what is new.
            before = written.tell()
            process = self._command.start(
                stage.recipe(teacher),
                self._beside(stage, "yaml"),
                stands_for,
                lock,
                environment={RECEIPT_VARIABLE: str(receipt.resolve())},
                executor=self._executor,
                log=log,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        code = _follow(process, log, before, output)
        if code:
            raise StageError(
                f"chain: {stage.name} must end well, but `{shlex.join(self._command.arguments)}` ended with exit code "
                f"{code}; started again, the chain goes on from here. The end of {log}:\n{_tail(log)}",
                code if code > 0 else 128 - code,
            )
        # On disk before its model is looked for: the costly part is over.
        self._trained = {**stage.plan(), "seconds": round(time.monotonic() - started, 1)}
        self._distilled(stage)
        self._write()
        return self._row(stage, self._trained["seconds"])

    def _row(self, stage: Stage, seconds: float) -> ChainRow:
        out = self.folder / stage.name
        told = self._distilled(stage)
        model = find_model(out, self._model)
        parameters = count_parameters(model, self.stages[-1].flags.get("distill_student"))
        of_teacher = told.get("teacher_parameters")
        return ChainRow(
            **stage.plan(),
            model=str(model.relative_to(self.folder)),
            parameters=parameters,
            teacher_parameters=of_teacher,
            batches=int(told.get("batches", 0)),
            metrics=model_metrics(out, model, self._receipt(stage)),
            seconds=seconds,
            warnings=tuple(_size_warning(stage, parameters, of_teacher)),
        )

    def _receipt(self, stage: Stage) -> dict[str, Any]:
        file = self._beside(stage, "receipt.json")
        return read_object(file) if file.is_file() else {}

    def _beside(self, stage: Stage, suffix: str) -> Path:
        return self.folder / f"{stage.name}.{suffix}"

    def _distilled(self, stage: Stage) -> Mapping[str, Any]:
        """Return what the receipt tells of distillation; an error if it should have been and was not."""
        if stage.teacher is None:
            return {}
        told: Mapping[str, Any] = self._receipt(stage).get("techniques", {}).get("distill", {})
        if not told.get("batches"):
            found = "its receipt tells of no batch" if told else "no receipt of distillation was written"
            raise TrainingError(
                "chain",
                f"{stage.name} must learn from its teacher, but {found}",
                "the command must train to its end with the Hugging Face Trainer or Lightning, and take its recipe: "
                "`python my_train.py` does, any other command must take it from the file that EFF_RECIPE and "
                "{recipe} name",
            )
        return told

    def _finished_rows(self) -> list[ChainRow]:
        file = self.folder / JOURNAL_FILE
        if not file.exists():
            if self.folder.exists() and not self.folder.is_dir():
                raise CheckpointError("chain", f"out must be a folder, got the file {self.folder}")
            odd = sorted(path.name for path in self.folder.glob("[!.]*"))
            if odd:
                raise CheckpointError(
                    "chain",
                    f"out must be new, empty or hold a chain, got {self.folder} with {odd[0]!r} and no {JOURNAL_FILE}",
                    "give another folder",
                )
            return []
        known = read_object(file)
        stages, self._trained = known.pop("stages", None), known.pop("trained", {})
        check_same(file, known, self._plan, "chain")
        names = [field.name for field in fields(ChainRow)]
        if not isinstance(stages, list) or any(not isinstance(row, dict) or set(row) != set(names) for row in stages):
            raise CheckpointError(file, "file must hold the stages of a chain", "it is damaged, remove it")
        rows = [ChainRow(**{**row, "warnings": tuple(row["warnings"])}) for row in stages]
        for row, values, stage in zip(rows, stages, self.stages, strict=False):
            plan = stage.plan()
            check_same(file, {name: values[name] for name in plan}, plan, "chain")
            # A stage's model is the next one's teacher.
            if not (self.folder / row.model).exists():
                raise CheckpointError(
                    file,
                    f"the model of {stage.name} must be there, got none at {self.folder / row.model}",
                    "put it back, or give another folder",
                )
        if len(rows) > len(self.stages):
            raise CheckpointError(
                file,
                f"chain must have at least the {len(rows)} stages that are finished, got {len(self.stages)}",
                "give the same ones or more, or another folder",
            )
        return rows

    def _write(self) -> None:
        rows = [asdict(row) for row in self._rows]
        write_object(self.folder / JOURNAL_FILE, {**self._plan, "stages": rows, "trained": self._trained}, private=True)


def _follow(process: Run, log: Path, start: int, output: Callable[[bytes], object] | None) -> int:
    """Return the exit code of a process, after showing what it wrote into its log from `start` on.

    The process writes into the file and not into a pipe of ours, so its log is whole if this process is killed.
    """
    with process, log.open("rb") as read:
        read.seek(start)
        try:
            while True:
                code = process.poll()  # before reading: what was written last must be shown
                written = read.read()
                if written and output is not None:
                    output(written)
                if code is not None:
                    return code
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            raise


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return "\n".join(f"  {line}" for line in [line for line in lines if line.strip()][-_LAST_LINES:])


def _size_warning(stage: Stage, parameters: int, of_teacher: int | None) -> list[str]:
    if stage.student is None or of_teacher is None or parameters < of_teacher:
        return []
    return [
        f"{stage.name}: {stage.student} has {parameters:,} parameters, not fewer than its teacher's {of_teacher:,}; an "
        "assistant helps where it lies between its teacher and the next student in size"
    ]
