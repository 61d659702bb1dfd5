"""`eff run script.py ARGS --prune_sparsity 0.8`: techniques for a training script that nobody edits."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from shared_core.errors import CompatibilityError, ConfigError, EffError
from shared_core.front_ends.finding import front_ends
from shared_core.front_ends.flags import _nearest_flag, recipe_of, take_flags

if TYPE_CHECKING:
    pass


def run(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT [FLAGS]...", help="The training script (train.py), or a module (my.train)."),
    ],
) -> None:
    """Run a training script of either trainer with techniques switched on by flags; the script is not edited.

    Our flags (--prune_sparsity, --qat_scheme, --distill_teacher, --loss_scale_kind, --soup_kind, … , --eff_recipe FILE
    and --eff_allow_partial; `eff flags` lists the techniques') may stand anywhere after the script, which never sees
    them. All others are the script's, --help too, and so is what follows `--`.
    """
    if script.startswith("-"):
        raise ConfigError("eff run", f"script must come before the flags, got {script!r}")
    ours, rest = take_flags(context.args)
    recipe = recipe_of(ours)
    asks_for_help = any(argument in ("--help", "-h") for argument in rest)
    if not recipe and not asks_for_help:
        raise ConfigError(
            "eff run",
            "at least one technique must be switched on",
            f"add a flag such as --prune_sparsity 0.8 (`eff flags` lists all){_nearest_flag(rest)}",
        )
    is_file = script.endswith(".py")
    if is_file and not Path(script).is_file():
        raise ConfigError("eff run", f"script must be a file, got {script!r}", "check the path")
    installed = front_ends()
    if not installed:
        raise ConfigError("eff run", "needs a trainer", "pip install 'efftrain[hf]' or 'efftrain[lightning]'")
    for front_end in installed:
        front_end.install(recipe)
    if asks_for_help:
        typer.echo(f"eff run: these are the flags of {script}; `eff flags` lists those that may stand among them")

    sys.argv = [script, *rest]
    try:
        if is_file:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
        else:
            sys.path.insert(0, "")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except EffError:
        raise
    except Exception as error:
        traceback = _from_script(error)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        raise SystemExit(1) from error
    if not any(front_end.used() for front_end in installed):
        raise CompatibilityError(
            "eff run",
            f"{script} must train with the Hugging Face Trainer or Lightning, but no training by either was seen",
            "nothing was switched on",
        )


def _from_script(error: BaseException) -> TracebackType | None:
    """Return the traceback as the script alone would have it."""
    entry = error.__traceback__
    for is_runpy in (False, True):
        while entry is not None and (entry.tb_frame.f_globals.get("__name__") == "runpy") is is_runpy:
            entry = entry.tb_next
    return entry
