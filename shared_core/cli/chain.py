"""`eff chain --teacher BIG --students a b -- python my_train.py …`: teacher assistants, or generations born again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from shared_core.cli.arguments import ExecutorName, ExecutorOptions
from shared_core.errors import ConfigError
from shared_core.printing import echo

if TYPE_CHECKING:
    from shared_core.runs import ChainTable, Stage

_OPTIONS = "shared_core.runs.chain.options"
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
        ctx.meta[_OPTIONS] = several
        return super().parse_args(ctx, [*rest, *args[end:]])


def chain(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the training, `python my_train.py ARGS`, with {out}, {student}, {stage} in it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the chain; one that was stopped goes on from it.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Of the first stage: folder, file or Hub name. None: from the labels alone.")
    ] = None,
    students: Annotated[  # for --help; `ChainCommand` takes the values
        list[str] | None, typer.Option(help="What {student} stands for, one a stage: --students medium small.")
    ] = None,
    generations: Annotated[
        int | None, typer.Option(help="Instead of students: how many times the same one is trained.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where under {out} the script writes its model (glob), if it is not found.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Shown of each stage, by the trainer's name.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave a half-run stage's folder to the script, which resumes by itself.")
    ] = False,
    executor: ExecutorName = "local",
    executor_set: ExecutorOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and the training's output to stderr.")] = False,
) -> None:
    """Train students one after the other, each taught by the model of the one before, with your own script.

    Options of distillation (--distill_temperature 4 2, one value or one a stage) stand before --, or after it with one
    value. OUT holds a folder, log, recipe and receipt for each stage, and chain.json.
    """
    from shared_core.engine.receipt import is_quiet
    from shared_core.engine.registry import flags
    from shared_core.reports.console import Console
    from shared_core.runs import RunError, TeacherChain, executor_of

    if out is None:
        raise ConfigError("eff chain", "--out must be given, got none", "name the folder of the chain")
    several = {name: list(values) for name, values in context.meta[_OPTIONS].items()}
    names = several.pop("students", [])
    for name, values in several.items():
        if not values and (name not in flags() or flags()[name][1].type not in ("bool", bool)):
            raise ConfigError("eff chain", f"--{name} must have a value", f"write --{name} VALUE")
    options = {name.removeprefix(_DISTILL): values or ["true"] for name, values in several.items()}
    work = TeacherChain(
        command or [], out, teacher=teacher, students=names, generations=generations, options=options, model=model,
        metric=metric, executor=executor_of(executor, executor_set or [], out, "eff chain"),
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
        table = work.run(resume=resume, output=(sys.stderr if as_json else sys.stdout).buffer, begin=begin, end=end)
    except RunError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    if as_json:
        echo(table.json())
        return
    Console().print(table.table())
    echo(f"the last student: {out / table.rows[-1].model}; all figures: {out / 'chain.json'}")
