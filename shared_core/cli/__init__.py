"""The `eff` command: one file a subcommand. Exit codes: 0 done, 1 the work failed, 2 the input was wrong."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from shared_core.cli.cache_teacher import cache_teacher
from shared_core.cli.chain import ChainCommand, chain
from shared_core.cli.compat import compat
from shared_core.cli.compress import compress, decompress
from shared_core.cli.doctor import doctor
from shared_core.cli.explain import explain
from shared_core.cli.export import export
from shared_core.cli.flags import flags
from shared_core.cli.formats import formats
from shared_core.cli.init import init
from shared_core.cli.lottery import lottery
from shared_core.cli.low_rank import LowRankCommand, low_rank
from shared_core.cli.plan import plan
from shared_core.cli.privacy import privacy
from shared_core.cli.prune import PruneCommand, prune
from shared_core.cli.quantize import quantize
from shared_core.cli.report import report
from shared_core.cli.run import run
from shared_core.cli.shrink import shrink
from shared_core.cli.soup import soup
from shared_core.cli.user_code import user_error, wants_traceback
from shared_core.errors import CheckpointError, EffError

app = typer.Typer(
    name="eff",
    help="Every efficient-training technique, one flag away.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"efftrain {version('efftrain')}")
        raise typer.Exit


_OF_SEVERAL_PROCESSES = ("cache-teacher", "quantize", "run", "soup")


@app.callback()
def _eff(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # only launchers set it, and without one nothing here needs torch
    if "LOCAL_RANK" in os.environ and context.invoked_subcommand not in _OF_SEVERAL_PROCESSES:
        from shared_core.distributed.job import check_alone

        check_alone(f"eff {context.invoked_subcommand}")


app.command()(cache_teacher)
app.command(cls=ChainCommand)(chain)
app.command()(compat)
app.command()(compress)
app.command()(decompress)
app.command()(doctor)
app.command()(explain)
app.command()(export)
app.command()(flags)
app.command()(formats)
app.command()(init)
app.command()(lottery)
app.command(cls=LowRankCommand)(low_rank)
app.command()(plan)
app.command()(privacy)
app.command(cls=PruneCommand)(prune)
app.command()(quantize)
app.command()(report)
app.command(
    options_metavar="",
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,  # all after the script is for it and for the techniques
        "help_option_names": ["--help"],
    },
)(run)
app.command()(shrink)
app.command()(soup)


def main() -> None:
    """Run the command line; an error of ours, or of the user's functions, is one line, not a traceback."""
    try:
        app()
    except Exception as error:
        told = None if wants_traceback() else _told(error)
        if told is None:
            raise
        typer.echo(f"error: {EffError(told)}", err=True)
        sys.exit(2 if isinstance(error, EffError) and isinstance(error, CheckpointError | ValueError) else 1)


def _told(error: Exception) -> str | None:
    """Return an error in a line, or None where its traceback is needed to understand it."""
    if isinstance(error, EffError):
        return str(error)
    # a name too long for the file system, a full disk, a folder of somebody else's
    return user_error(error) or (str(error) if isinstance(error, OSError) else None)
