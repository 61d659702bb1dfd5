"""`eff run script.py ARGS --prune_sparsity 0.8`: techniques for a training script that nobody edits."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from shared_core.errors import ConfigError, EffError
from shared_core.front_ends.finding import front_ends
from shared_core.front_ends.flags import STEPS_FLAG, STEPS_VARIABLE, _nearest_flag, asked_steps, recipe_of, take_flags
from shared_core.front_ends.unseen_steps import UnseenSteps, unseen
from shared_core.printing import echo
from shared_core.runs.child_processes import handed_on


def run(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT [FLAGS]...", help="The training script (train.py), or a module (my.train)."),
    ],
) -> None:
    """Run a script of a trainer, or a loop of accelerate, with techniques switched on by flags; it is not edited.

    Our flags (--prune_sparsity, --qat_scheme, --distill_teacher, --loss_scale_kind, --soup_kind, … , --eff_recipe FILE,
    --eff_allow_partial, and --eff_total_steps N for a loop whose scheduler does not tell them; `eff flags` lists the
    techniques') may stand anywhere after the script, which never sees them. All others are the script's, --help too,
    and so is what follows `--`. A script that starts others, as $(which trl) and accelerate.commands.launch do, hands
    the techniques on to them.
    """
    from shared_core.runs.command import is_launcher

    if script.startswith("-"):
        raise ConfigError("eff run", f"script must come before the flags, got {script!r}")
    if is_launcher(script) and "." not in script and not Path(script).is_file():
        raise ConfigError(
            "eff run",
            f"script must be a file or a module, got {script!r}",
            "put the launcher first: torchrun --nproc-per-node 2 $(which eff) run train.py ...",
        )
    ours, rest = take_flags(context.args)
    if (steps := ours.pop(STEPS_FLAG, None)) is not None:
        os.environ[STEPS_VARIABLE] = steps
        asked_steps()
    recipe = recipe_of(ours)
    asks_for_help = any(argument in ("--help", "-h") for argument in rest)
    if not recipe and not asks_for_help:
        raise ConfigError(
            "eff run",
            "at least one technique must be switched on",
            f"add a flag such as --prune_sparsity 0.8 (`eff flags` lists all){_nearest_flag(rest)}",
        )
    # a console script such as bin/trl is one of Python too
    is_file = script.endswith(".py") or Path(script).is_file()
    if is_file and not Path(script).is_file():
        raise ConfigError("eff run", f"script must be a file, got {script!r}", "check the path")
    installed = front_ends()
    if not installed:
        raise ConfigError("eff run", "needs a trainer", "pip install 'efftrain[hf]' or 'efftrain[lightning]'")
    for front_end in installed:
        front_end.install(recipe)
    if asks_for_help:
        echo(f"eff run: these are the flags of {script}; `eff flags` lists those that may stand among them")

    sys.argv = [script, *rest]
    ended_well: list[bool] = []
    atexit.register(_leave_group, ended_well)  # before the script's own, which then come first
    with handed_on(recipe, script, installed) if recipe else contextlib.nullcontext() as was_taken:
        guard = UnseenSteps(lambda: installed, script) if recipe else None
        try:
            ended = _run(script, is_file)
            ended_well.append(True)
        finally:
            if guard is not None:
                guard.remove()
        taken = any(front_end.used() for front_end in installed) or (was_taken is not None and was_taken())
        if not taken and not asks_for_help:
            raise unseen(script, "no training by any of them was seen")
    if ended is not None:
        raise ended


def _leave_group(ended_well: list[bool]) -> None:
    """Destroy a process group that the script has left: threads of gloo may abort a process that exits (torch 2.13)."""
    import torch.distributed

    from shared_core.distributed.collectives import has_group

    if ended_well and has_group():
        torch.distributed.destroy_process_group()


def _run(script: str, is_file: bool) -> SystemExit | None:
    """Run a script or module, and return what it ended with if it called ``sys.exit`` without an error."""
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
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        raise SystemExit(1) from error
    return None


def _from_script(error: BaseException) -> TracebackType | None:
    """Return the traceback as the script alone would have it."""
    entry = error.__traceback__
    for is_runpy in (False, True):
        while entry is not None and (entry.tb_frame.f_globals.get("__name__") == "runpy") is is_runpy:
            entry = entry.tb_next
    return entry
