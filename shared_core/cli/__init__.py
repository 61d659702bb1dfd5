"""The `eff` command: one file a subcommand. Exit codes: 0 done, 1 the work failed, 2 the input was wrong."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from shared_core.cli.arguments import click_parameters
from shared_core.cli.cache_teacher import cache_teacher
from shared_core.cli.compress import compress, decompress
from shared_core.cli.export import export
from shared_core.cli.init import init
from shared_core.cli.loading import user_error, wants_traceback
from shared_core.cli.planning import explain, plan, privacy
from shared_core.cli.quantize import QuantizeCommand, quantize
from shared_core.cli.reference import compat, doctor, flags, formats
from shared_core.cli.smaller_models import LowRankCommand, PruneCommand, low_rank, prune, shrink
from shared_core.cli.soup import soup
from shared_core.cli.trainings import ChainCommand, chain, lottery, report, run, try_out
from shared_core.cli.waiting import tell_imports
from shared_core.errors import CheckpointError, EffError, did_you_mean, nearest
from shared_core.printing import QUIET, echo


class _Group(TyperGroup):
    """Gives every command that works for long the option ``--quiet``."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if cmd_name in _WORKING and command is not None and all(one.name != "quiet" for one in command.params):
            command.params.append(click_parameters(_with_quiet)[0])
        return command


_WORKING = frozenset({
    "cache-teacher", "chain", "compress", "decompress", "export", "lottery", "low-rank", "prune", "quantize", "run",
    "shrink", "soup", "try",
})  # fmt: skip


def _be_quiet(context: typer.Context, wanted: bool) -> None:
    if wanted and QUIET not in os.environ:
        os.environ[QUIET] = "1"  # processes that the command starts are quiet too
        context.call_on_close(lambda: os.environ.pop(QUIET, None))


def _with_quiet(
    quiet: Annotated[
        bool,
        typer.Option("--quiet", callback=_be_quiet, expose_value=False, help="No progress, and receipts in a line."),
    ] = False,
) -> None: ...


app = typer.Typer(
    name="eff",
    cls=_Group,
    help="Every efficient-training technique, one flag away.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # options are spelled as a recipe spells them, too: --min_size
    context_settings={"token_normalize_func": lambda word: word.replace("_", "-")},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"efftrain {version('efftrain')}")
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


_SCRIPT = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,  # all after the script is for it and for the techniques
    "help_option_names": ["--help"],
}
_CLASSES: dict[Any, type[TyperCommand]] = {
    low_rank: LowRankCommand,
    prune: PruneCommand,
    quantize: QuantizeCommand,
    chain: ChainCommand,
}
for _command in (
    cache_teacher, chain, compat, compress, decompress, doctor, explain, export, flags, formats, init, lottery,
    low_rank, plan, privacy, prune, quantize, report,
):  # fmt: skip
    app.command(cls=_CLASSES.get(_command))(_command)
app.command(options_metavar="", context_settings=_SCRIPT)(run)
app.command()(shrink)
app.command()(soup)
app.command("try", context_settings={**_SCRIPT, "ignore_unknown_options": False})(try_out)


def main() -> None:
    """Run the command line; an error of ours, or of the user's functions, is one line, not a traceback."""
    tell_imports()
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Abort:
        echo("aborted", err=True)
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "format_message"):
            _exit_with_usage(error)
        told = None if wants_traceback() else _one_line(error)
        if told is None:
            raise
        echo(f"error: {EffError(told)}", err=True)
        sys.exit(2 if isinstance(error, EffError) and isinstance(error, CheckpointError | ValueError) else 1)


def _exit_with_usage(error: Any) -> NoReturn:
    """End with an error of click in a line; it is of a class of click's or of typer's copy of it."""
    context = error.ctx
    if context is None or type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    name, text = getattr(error, "option_name", None), error.format_message().rstrip(".")
    commands = getattr(context.command, "commands", {})
    if type(error).__name__ == "NoSuchOption":
        known = {option for one in context.command.get_params(context) for option in one.opts if option[:2] == "--"}
        text = f"{name} is not an option{did_you_mean(str(name), known)}"
    elif commands and (found := re.search(r"No such command '([^']*)'", text)):
        text = f"{found[1]} is not a command{nearest(found[1], commands)}"
    else:
        text = f"{text[:1].lower()}{text[1:]}"
    echo(f"error: {context.command_path}: {text}; {context.command_path} --help tells more", err=True)
    sys.exit(error.exit_code)


def _one_line(error: Exception) -> str | None:
    """Return an error in a line, or None where its traceback is needed to understand it."""
    if isinstance(error, EffError):
        return str(error)
    # a name too long for the file system, a full disk, a folder of somebody else's
    return user_error(error) or (str(error) if isinstance(error, OSError) else None)
