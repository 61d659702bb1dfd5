"""`eff run`, `try`, `lottery`, `chain` and `report`: run unmodified training scripts, and report their results."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer
from typer.core import TyperCommand

from shared_core.cli.arguments import BESIDE, RunnerOptions, takes, training_command
from shared_core.cli.loading import check_path
from shared_core.config.options import checked, option
from shared_core.config.training_time import Position
from shared_core.errors import CheckpointError, ConfigError, EffError, require
from shared_core.files.user_code import is_module
from shared_core.front_ends.finding import front_ends
from shared_core.front_ends.flags import (
    STEPS_FLAG,
    STEPS_VARIABLE,
    asked_steps,
    check_before_imports,
    check_spelling,
    recipe_of,
    take_flags,
)
from shared_core.front_ends.unseen_steps import UnseenSteps, unseen
from shared_core.lottery_ticket.config import RESULT_FILE, TicketOptions
from shared_core.printing import echo, is_quiet
from shared_core.runs.child_processes import handed_on

if TYPE_CHECKING:
    from shared_core.runs import ChainTable, LotterySearch, Stage, TicketCurve


def _refuse_resume(arguments: list[str]) -> None:
    """Refuse to resume a checkpoint of techniques without any: its weights may have other names and values."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, _, value = argument.partition("=")
        if name.replace("-", "_") != "__resume_from_checkpoint":
            continue
        from shared_core.engine.saving.state_file import STATE_FILE, sessions_at  # which imports torch

        folder = Path(value or following)
        if (folder / STATE_FILE).is_file():  # else it may be any file of the script's
            keys = sorted(key for state in sessions_at(folder, with_tensors=False) for key in state["recipe"])
            rule = f"{folder} must be resumed with the techniques it was trained with ({', '.join(keys)}), got none"
            require(not keys, "eff run", rule, "repeat their flags, or start a new run", CheckpointError)


_Script = Annotated[
    str, typer.Argument(metavar="SCRIPT [FLAGS]...", help="The training script (train.py), or a module (my.train).")
]


def run(context: typer.Context, script: _Script) -> None:
    """Run your training script, unedited, with the techniques that flags switch on.

    The script uses a trainer, Accelerate or Fabric. Put the flags anywhere after it: --prune_sparsity, --qat_scheme and
    others (see `eff flags`), --eff_recipe FILE, --eff_allow_partial, and --eff_total_steps N for a loop without a
    scheduler. The script gets all other flags, including --help, and everything after `--`. Techniques also apply to
    scripts that it starts, as $(which trl) and accelerate.commands.launch do.
    """
    from shared_core.runs.command import is_launcher

    require(not script.startswith("-"), "eff run", f"script must come before the flags, got {script!r}")
    is_command = is_launcher(script) and "." not in script and not Path(script).is_file()
    remedy = "put the launcher first: torchrun --nproc-per-node 2 $(which eff) run train.py ..."
    require(not is_command, "eff run", f"script must be a file or a module, got {script!r}", remedy)
    ours, rest = take_flags(context.args, script)
    if (steps := ours.pop(STEPS_FLAG, None)) is not None:
        os.environ[STEPS_VARIABLE] = steps
        asked_steps()
    check_spelling(context.args, script, "eff run")
    recipe = recipe_of(ours)
    asks_for_help = any(argument in ("--help", "-h") for argument in rest)
    if not recipe:
        _refuse_resume(rest)
    is_file = _check_script(script, "eff run")
    check_before_imports(recipe)
    installed = front_ends() if recipe else []
    rule = "needs a trainer"
    require(installed or not recipe, "eff run", rule, "pip install 'efftrain[hf]' or 'efftrain[lightning]'")
    for front_end in installed:
        front_end.install(recipe)
    if asks_for_help:
        echo(f"eff run: these are the flags of {script}; `eff flags` lists the techniques' flags that you can add")
    elif not recipe and os.environ.get("RANK", "0") == "0":
        echo(f"eff run: no technique is switched on: {script} runs as it is", err=True)

    sys.argv = [script, *rest]
    ended_well: list[bool] = []
    atexit.register(_leave_group, ended_well)  # registered before the script's handlers, so it runs after them
    with handed_on(recipe, script, installed) if recipe else contextlib.nullcontext() as was_taken:
        guard = UnseenSteps(lambda: installed, script) if recipe else None
        try:
            ended = _run(script, is_file)
            ended_well.append(True)
        finally:
            if guard is not None:
                guard.remove()
        taken = any(front_end.used() for front_end in installed) or (was_taken is not None and was_taken())
        if recipe and not taken and not asks_for_help:
            raise unseen(script, "none of them trained anything")
    if ended is not None:
        raise ended


def _check_script(script: str, where: str) -> bool:
    """Return True if a script is a file, False for a module."""
    is_there = Path(script).is_file()
    # a console script such as bin/trl is a Python script too
    is_file = script.endswith(".py") or is_there
    require(is_there or not is_file, where, f"script must be a file, got {script!r}", "check the path")
    rule = f"script must be a file or a module, got {script!r}"
    require(is_file or is_module(script), where, rule, "check its name")
    return is_file


def _leave_group(ended_well: list[bool]) -> None:
    """Destroy a process group that the script left: gloo threads may abort an exiting process (torch 2.13)."""
    if not ended_well or "torch.distributed" not in sys.modules:
        return
    import torch.distributed

    from shared_core.distributed.collectives import has_group

    if has_group():
        torch.distributed.destroy_process_group()


def _run(script: str, is_file: bool) -> SystemExit | None:
    """Run a script or module. Return the `SystemExit` if it called ``sys.exit`` without an error."""
    try:
        if is_file:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
        else:
            sys.path.insert(0, "")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except EffError:
        raise
    except SystemExit as end:
        if end.code in (None, 0):
            return end
        raise
    except Exception as error:
        traceback = _from_script(error)
        if traceback is None and not is_file:  # runpy found no such module
            rule = f"script must be a file or a module, got {script!r}"
            raise ConfigError("eff run", rule, "check its name") from error
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        raise SystemExit(1) from error
    return None


def _from_script(error: BaseException) -> TracebackType | None:
    """Return the part of the traceback in the script."""
    entry = error.__traceback__
    for is_runpy in (False, True):
        while entry is not None and (entry.tb_frame.f_globals.get("__name__") == "runpy") is is_runpy:
            entry = entry.tb_next
    return entry


TRY_PAGE, TRY_RESULT = "eff_try.html", "eff_try.json"


def try_out(
    context: typer.Context,
    script: _Script,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 200,
    repeats: Annotated[int, typer.Option(help="Runs per technique, each with a plain run.")] = 1,
    eval_batches: Annotated[
        int,
        typer.Option("--eval-batches", help="Maximum number of validation batches; 0: all."),
    ] = 100,
    metric: Annotated[
        str | None, typer.Option(help="Metric to compare, as the trainer names it. Default: a loss.")
    ] = None,
    mode: Annotated[str, typer.Option(help="Whether a larger (max) or smaller (min) metric is better.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the page, its JSON and the runs' logs.")] = Path("eff_try"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare techniques on your own script: a few hundred steps with and without each of them.

    Put technique flags (--prune_sparsity, --qat_scheme, …, or --eff_recipe FILE) after the script, as in eff run, and
    options of eff try before it. Each technique runs in turn with a baseline, in separate processes. The trainer writes
    to a temporary folder, whose path replaces {out}. Code after the training is not run.
    """
    from shared_core.cli.arguments import bar
    from shared_core.files.atomic import atomic_write, make_folder
    from shared_core.files.json_yaml import json_text
    from shared_core.reports.page import write_page
    from shared_core.reports.try_page import print_findings, try_page
    from shared_core.runs import TryOut, chosen_metric, findings

    require(not script.startswith("-"), "eff try", f"script must come before its flags, got {script!r}")
    flags, rest = take_flags(context.args, script, "eff try")
    check_spelling(context.args, script, "eff try")
    recipe = recipe_of(flags)
    remedy = "add a flag such as --prune_sparsity 0.8 (`eff flags` lists all)"
    require(recipe, "eff try", "at least one technique must be switched on", remedy)
    checked(mode, Literal["auto", "min", "max"], "eff try", "--mode")
    _check_script(script, "eff try")
    work = TryOut(script, rest, recipe, out, steps=steps, repeats=repeats, eval_batches=eval_batches)
    make_folder(out)
    with (
        stoppable("eff try", f"the logs of its runs are in {out / 'logs'}".__str__),
        bar(f"trying, {len(work.pairs)} pairs of runs") as advance,
    ):
        pairs = work.run(advance, lambda plain: chosen_metric(plain, metric, mode))
    found = findings(pairs, metric=metric, mode=mode)
    report = {"script": script, "steps": steps, "recipe": recipe.to_dict(), **found.as_dict()}
    text = json_text(report)
    with atomic_write(out / TRY_RESULT) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    write_page(out / TRY_PAGE, *try_page(found, script, steps, work.block))
    if as_json:
        echo(text)
        return
    print_findings(found)
    echo(f"all figures, and how they were judged: {out / TRY_PAGE} (also as .md and .json)")


@dataclass(frozen=True, kw_only=True)
class LotteryOptions(TicketOptions, RunnerOptions):
    """Options of `eff lottery`."""

    key: ClassVar[str] = "eff lottery"
    technique: ClassVar[str] = "lottery"

    command: tuple[Any, ...] = training_command(
        "your training command, `python my_train.py ARGS`. {round} is replaced by the run's name."
    )
    out: Path = option(help="Folder of the search. A stopped search continues from it.")
    rounds: int = option(10, "Number of sparse runs after the dense one.", low=1)
    rewind_to: Position | None = option(
        None, "Step k to rewind to: 500, 0.05 (of the run) or 2ep. Default: 0.", flag_type=str
    )
    controls: tuple[str, ...] = option(
        (), "Also train this control: random_reinit or random_mask. Repeatable.", flag="--control"
    )
    control_rounds: tuple[int, ...] = option((), "Train controls only in these rounds, such as 5,10.", flag_type=str)
    metric: str | None = option(None, "Validation metric of the curve, as the trainer names it.")
    mode: Literal["auto", "max", "min"] = option("auto", "Whether a larger (max) or smaller (min) metric is better.")
    quality: Literal["last", "best"] = option("last", "Which validation of a run to compare.")
    plot: Path | None = option(None, "Also plot the curve to this file (.png, .svg, .pdf).")

    def search(self) -> LotterySearch:
        """Return the search that is asked for."""
        from shared_core.runs import LotterySearch

        own = ("rounds", "rewind_to", "controls", "control_rounds", "metric", "mode", "quality")
        names = {*own, *(field.name for field in dataclasses.fields(TicketOptions))} - {"out"}
        return LotterySearch(**{name: getattr(self, name) for name in names})


@takes(LotteryOptions)
def lottery(asked: LotteryOptions) -> None:
    """Search for winning lottery tickets: repeat your training, each time with fewer weights.

    Every run starts in a fresh process with its own seeds and data order. OUT holds a folder per run,
    tickets (safetensors), curve.json, curve.csv and curve.png.
    """
    from shared_core.reports.page import Console, check_plot
    from shared_core.runs import executor_of

    out, as_json, plot = asked.out, asked.as_json, asked.plot
    if plot is not None:
        check_plot(plot, asked.key)
    search = asked.search()
    errors = Console(stderr=True, quiet=is_quiet())

    def progress(curve: TicketCurve) -> None:
        row = curve.rows[-1]
        reached = "" if row.quality is None else f", {curve.metric} {row.quality:.6g}"
        errors.print(f"{row.folder}: {100 * row.left:.2f} % of the weights{reached}", markup=False, highlight=False)

    def kept() -> str:
        return f"{len([*out.glob(f'*/{RESULT_FILE}')])} runs are finished in {out}; {GOES_ON}"

    with stoppable(asked.key, kept):
        curve = search.run_command(
            asked.command, out, output=(sys.stderr if as_json else sys.stdout).buffer, progress=progress,
            executor=executor_of(asked.executor, asked.executor_set, out, asked.key),
        )  # fmt: skip
    if plot is not None:
        curve.plot(plot)
    if as_json:
        echo(curve.json())
        return
    Console().print(curve.table())
    best = curve.smallest_winning
    if best is not None:
        ticket = out / f"round-{best.round - 1:02d}" / "ticket.safetensors"
        echo(f"sparsest ticket as good as the dense run: {100 * best.left:.2f} % of the weights, {ticket}")
    echo(f"wrote {out / 'curve.json'}, .csv and, with matplotlib, .png")


DISTILL, GOES_ON = "distill_", "the same command goes on from there"


@contextlib.contextmanager
def stoppable(where: str, kept: Callable[[], str]) -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C in this block, and say what is kept."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        # keep ignored signals ignored, for nohup
        asked = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
        before = {number: signal.signal(number, stop) for number in asked}
    try:
        yield
    except KeyboardInterrupt as end:
        number = end.args[0] if end.args else signal.SIGINT
        echo(f"{where}: stopped, and its training with it; {kept()}", err=True)
        raise typer.Exit(128 + number) from end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has one


class ChainCommand(TyperCommand):
    """Accepts several values after --students and --distill_*. The training command follows --."""

    several: ClassVar[tuple[str, ...]] = ("students",)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the remaining arguments without the options that have several values."""
        end = args.index("--") if "--" in args else len(args)
        several: dict[str, list[str]] = {}
        rest: list[str] = []
        values: list[str] | None = None
        for argument in args[:end]:
            name, equals, value = argument.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if argument.startswith("--"):
                takes_several = name in self.several or name.startswith(DISTILL)
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
        "your training command, `python my_train.py ARGS`, with {out}, {student} or {stage}."
    )
    out: Path = option(help="Folder of the chain. A stopped chain continues from it.")
    teacher: str | None = option(None, "First teacher: folder, file or Hub name. Default: none, only labels.")
    # for --help; `ChainCommand` takes the values
    students: tuple[str, ...] = option((), "Values of {student}, one per stage: --students medium small.")
    generations: int | None = option(None, "Instead of --students: how often to train the same student. Default: once.")
    model: str | None = option(None, "Glob for the model that the script writes in {out}, if it is not found.")
    metric: str | None = option(None, "Metric to show per stage, as the trainer names it.")
    resume: bool = option(False, "Keep the folder of an unfinished stage. Your script must resume by itself.")


@takes(ChainOptions)
def chain(asked: ChainOptions, given: Mapping[str, list[str]]) -> None:
    """Train a series of students with your own script, each taught by the one before.

    Put distillation flags before --, with one value or one per stage (--distill_temperature 4 2), or after it, with one
    value. OUT holds chain.json, and a folder, log, recipe and receipt per stage.
    """
    from shared_core.engine.registry import flags
    from shared_core.reports.page import Console
    from shared_core.runs import RunError, TeacherChain, executor_of

    out, as_json = asked.out, asked.as_json
    several = {name: list(values) for name, values in given.items()}
    names = several.pop("students", [])
    for name, values in several.items():
        is_switch = name in flags() and flags()[name][1].type in ("bool", bool)
        asked.require(values or is_switch, f"--{name} must have a value", f"write --{name} VALUE")
    options = {name.removeprefix(DISTILL): values or ["true"] for name, values in several.items()}
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
        if len(work.stages) == 1 and stage.teacher is None:
            unused = sorted({f"--{name}" for name in (*several, *stage.flags) if name.startswith(DISTILL)})
            learns += "" if stage.recipe(None) else ", and no technique is switched on"
            learns += f"; {', '.join(unused)} has no use without a teacher" if unused else ""
        say(f"{stage.name}: {student} {learns}")

    def end(table: ChainTable) -> None:
        row = table.rows[-1]
        figure = table.figure(row)
        reached = "" if figure is None else f", {table.metric} {figure:.6g}"
        say(f"stage-{row.stage}: {row.parameters:,} parameters{reached}, {row.seconds:.0f} s, {out / row.model}")
        for warning in row.warnings:
            say(f"warning: {warning}")

    def kept() -> str:
        return f"{len(work.table.rows)} of {len(work.stages)} stages are finished in {out}; {GOES_ON}"

    try:
        stream = (sys.stderr if as_json else sys.stdout).buffer
        with stoppable(asked.key, kept):
            table = work.run(resume=asked.resume, output=stream, begin=begin, end=end)
    except RunError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    if as_json:
        echo(table.json())
        return
    Console().print(table.table())
    echo(f"the last student: {out / table.rows[-1].model}; all figures: {out / 'chain.json'}")


PAGE = "eff_report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Output folders of runs, loggers or commands, or files that commands wrote. Several are compared."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"The .html page to write, with a copy as .md. Default: {PAGE} in the folder, or here for several."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rewrite the page until the run ends.")] = False,
    seconds: Annotated[int, typer.Option(help="Seconds between pages, with --watch.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. Write the page only with --out.")] = False,
) -> None:
    """Write a page about one or several runs: results, options, curves and layers.

    The page is a single file without external resources. Plots need matplotlib.
    """
    require(not (watch and as_json), "eff report", "--watch cannot be combined with --json, got both", "leave one out")
    for run in runs if not watch else ():
        check_path(run, "eff report", "RUNS")
    from shared_core.engine.receipt import Receipt
    from shared_core.files.json_yaml import json_text
    from shared_core.reports.page import check_place, write_page
    from shared_core.reports.run_folder import of_ours, read_run
    from shared_core.reports.run_page import as_values, page_of

    rule = f"runs must differ, got {' '.join(map(str, runs))}"
    require(len({run.resolve() for run in runs}) == len(runs), "eff report", rule, "name each once")
    if out is not None:
        check_place(out, "eff report: --out")
    if watch:
        _watch(runs, out, seconds)
    found = [read_run(run) for run in runs]
    if out is None and not as_json:
        home = Path() if len(runs) > 1 else runs[0] if runs[0].is_dir() else runs[0].parent
        out = home / PAGE
        check_place(out, "eff report: the page")
    with of_ours(*found):
        receipts = [Receipt(run.receipt).text() for run in found if run.receipt is not None]
    if out is not None:
        write_page(out, *page_of(found))
    if as_json:
        values = [{**(run.receipt or {}), "report": as_values(run)} for run in found]
        echo(json_text(values[0] if len(values) == 1 else {"runs": values}))
        return
    for text in receipts:
        echo(text)
    echo(f"Wrote {out!s}, and the same as .md.")


def _watch(runs: list[Path], out: Path | None, seconds: int) -> None:
    """Rewrite the page until all runs have finished, or until interrupted."""
    from shared_core.errors import CheckpointError
    from shared_core.reports.page import write_page
    from shared_core.reports.run_folder import read_run
    from shared_core.reports.run_page import page_of

    target = out or (Path() if len(runs) > 1 else runs[0]) / PAGE
    seen = ""
    while True:
        try:
            found = [read_run(run) for run in runs]
        except CheckpointError:  # nothing exists yet, or a log is being written
            found = []
        if found and all(run.receipt is not None and run.receipt.get("finished") for run in found):
            return
        steps = [max((curve[-1][0] for curve in run.curves.values()), default=0) for run in found]
        text = f"step {', '.join(f'{step:,}' for step in steps)}" if found else "nothing is logged yet"
        if absent := [str(run) for run in runs if not run.exists()]:
            text += f"; waiting for {', '.join(absent)}, which does not exist yet"
        if found:
            write_page(target, *page_of(found), refresh=seconds)
            text += f": {target!s}"
        if text != seen:
            echo(text)
            seen = text
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            if found:
                return
            raise
