"""`eff chain --teacher BIG --students a b -- python my_train.py …`: teacher assistants, or generations born again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand

from shared_core.cli.arguments import BESIDE, RunnerOptions, takes, training_command
from shared_core.config.options import option
from shared_core.errors import ConfigError
from shared_core.printing import echo

if TYPE_CHECKING:
    from shared_core.runs import ChainTable, Stage

_DISTILL = "distill_"


class ChainCommand(TyperCommand):
    """Takes several values after --students and --distill_*, up to the next option; what follows -- is the training."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left of the arguments, after taking out the options that have several values."""
        end = args.index("--") if "--" in args else len(args)
        several: dict[str, list[str]] = {}
        rest: list[str] = []
        values: list[str] | None = None
        for argument in args[:end]:
            name, equals, value = argument.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if argument.startswith("--"):
                takes_several = name == "students" or name.startswith(_DISTILL)
                values = several.setdefault(name, []) if takes_several else None
                if values is not None:
                    values += [value] if equals else []
                    continue
            (rest if values is None else values).append(argument)
        ctx.meta[BESIDE] = several
        return super().parse_args(ctx, [*rest, *args[end:]])


@dataclass(frozen=True, kw_only=True)
class ChainOptions(RunnerOptions):
    """Options of `eff chain`."""

    key: ClassVar[str] = "eff chain"

    command: tuple[Any, ...] = training_command(
        "the training, `python my_train.py ARGS`, with {out}, {student}, {stage} in it."
    )
    out: Path | None = option(None, "Folder of the chain; one that was stopped goes on from it.")
    teacher: str | None = option(None, "Of the first stage: folder, file or Hub name. None: from the labels alone.")
    # for --help; `ChainCommand` takes the values
    students: tuple[str, ...] = option((), "What {student} stands for, one a stage: --students medium small.")
    generations: int | None = option(None, "Instead of students: how many times the same one is trained.")
    model: str | None = option(None, "Where under {out} the script writes its model (glob), if it is not found.")
    metric: str | None = option(None, "Shown of each stage, by the trainer's name.")
    resume: bool = option(False, "Leave a half-run stage's folder to the script, which resumes by itself.")


@takes(ChainOptions)
def chain(asked: ChainOptions, given: Mapping[str, list[str]]) -> None:
    """Train students one after the other, each taught by the model of the one before, with your own script.

    Options of distillation (--distill_temperature 4 2, one value or one a stage) stand before --, or after it with one
    value. OUT holds a folder, log, recipe and receipt for each stage, and chain.json.
    """
    from shared_core.engine.receipt import is_quiet
    from shared_core.engine.registry import flags
    from shared_core.reports.console import Console
    from shared_core.runs import RunError, TeacherChain, executor_of

    out, as_json = asked.out, asked.as_json
    if out is None:
        raise ConfigError("eff chain", "--out must be given, got none", "name the folder of the chain")
    several = {name: list(values) for name, values in given.items()}
    names = several.pop("students", [])
    for name, values in several.items():
        if not values and (name not in flags() or flags()[name][1].type not in ("bool", bool)):
            raise ConfigError("eff chain", f"--{name} must have a value", f"write --{name} VALUE")
    options = {name.removeprefix(_DISTILL): values or ["true"] for name, values in several.items()}
    work = TeacherChain(
        asked.command, out, teacher=asked.teacher, students=names, generations=asked.generations, options=options,
        model=asked.model, metric=asked.metric,
        executor=executor_of(asked.executor, asked.executor_set, out, "eff chain"),
    )  # fmt: skip
    errors = Console(stderr=True, quiet=is_quiet())

    def say(text: str) -> None:
        errors.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(stage: Stage) -> None:
        student = "the student" if stage.student is None else stage.student
        learns = "trains from the labels alone" if stage.teacher is None else f"learns from {stage.teacher}"
        say(f"{stage.name}: {student} {learns}")

    def end(table: ChainTable) -> None:
        row = table.rows[-1]
        figure = table.figure(row)
        reached = "" if figure is None else f", {table.metric} {figure:.6g}"
        say(f"stage-{row.stage}: {row.parameters:,} parameters{reached}, {row.seconds:.0f} s, {out / row.model}")
        for warning in row.warnings:
            say(f"warning: {warning}")

    try:
        stream = (sys.stderr if as_json else sys.stdout).buffer
        table = work.run(resume=asked.resume, output=stream, begin=begin, end=end)
    except RunError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    if as_json:
        echo(table.json())
        return
    Console().print(table.table())
    echo(f"the last student: {out / table.rows[-1].model}; all figures: {out / 'chain.json'}")
