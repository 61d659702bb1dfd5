"""The `eff` command: one file per subcommand. Exit codes: 0 done, 1 the work failed, 2 the input was wrong."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from shared_core.cli.arguments import click_parameters
from shared_core.cli.cache_teacher import cache_teacher
from shared_core.cli.compress import compress, decompress
from shared_core.cli.export import export
from shared_core.cli.init import init
from shared_core.cli.planning import explain, plan, privacy
from shared_core.cli.quantize import QuantizeCommand, quantize
from shared_core.cli.reference import compat, doctor, flags, formats
from shared_core.cli.search import SearchCommand, search
from shared_core.cli.smaller_models import LowRankCommand, PruneCommand, low_rank, prune, shrink
from shared_core.cli.soup import soup
from shared_core.cli.trainings import ChainCommand, chain, lottery, report, run, try_out
from shared_core.engine import registry
from shared_core.errors import CheckpointError, EffError, did_you_mean, nearest
from shared_core.files.user_code import user_error, wants_traceback
from shared_core.printing import QUIET, echo, is_quiet

_SLOW = {
    "torch": "torch", "transformers": "transformers", "transformers.modeling_utils": "transformers",
    "transformers.trainer": "transformers", "pytorch_lightning": "lightning", "lightning.pytorch": "lightning",
}  # fmt: skip


def show_imports() -> None:
    """Show ``loading torch …`` on stderr while a large library is imported, only on a terminal."""
    if sys.stderr.isatty() and not is_quiet():
        sys.meta_path.insert(0, _ShownImports(sys.stderr))


class _ShownImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, terminal: TextIO) -> None:
        self._terminal, self._found = terminal, dict[str, importlib.abc.Loader]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a slow module with a loader that reports it; ignore other modules."""
        if fullname not in _SLOW or fullname in self._found:
            return None
        others = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            self._found[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._found[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        loader = self._found[module.__name__]
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = loader
        self._say(f"loading {_SLOW[module.__name__]} …")
        try:
            loader.exec_module(module)
        finally:
            self._say("")

    def _say(self, text: str) -> None:
        self._terminal.write(f"\r\x1b[K{text}\r")  # the library's own output starts at the left
        self._terminal.flush()


class _Group(TyperGroup):
    """Adds ``--quiet`` to every command that runs for long."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if cmd_name in _WORKING and command is not None and all(one.name != "quiet" for one in command.params):
            command.params.append(click_parameters(_with_quiet)[0])
        return command


_WORKING = frozenset({
    "cache-teacher", "chain", "compress", "decompress", "export", "lottery", "low-rank", "prune", "quantize", "run",
    "search", "shrink", "soup", "try",
})  # fmt: skip


def _be_quiet(context: typer.Context, wanted: bool) -> None:
    if wanted and QUIET not in os.environ:
        os.environ[QUIET] = "1"  # child processes are quiet too
        context.call_on_close(lambda: os.environ.pop(QUIET, None))


def _with_quiet(
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", callback=_be_quiet, expose_value=False, help="Hide progress bars and print one-line receipts."
        ),
    ] = False,
) -> None: ...


app = typer.Typer(
    name="eff",
    cls=_Group,
    help="Every efficient-training technique, one flag away.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # options may also be spelled as in a recipe: --min_size
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
    # only launchers set it; without one nothing here needs torch
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
    search: SearchCommand,
}
# the panels of `eff --help`: command -> an example, which also opens the command's own help
_PANELS: dict[str, dict[Any, str]] = {
    "Train": {
        init: "eff init --goal smaller",
        run: "eff run train.py --output_dir runs/small --prune_sparsity 0.8",
        try_out: "eff try train.py --output_dir {out} --prune_sparsity 0.8 --qat_scheme int8",
        cache_teacher: "eff cache-teacher runs/teacher --data train.jsonl --out teacher_cache",
        chain: "eff chain --teacher runs/big --students medium small --out chain -- python train.py --model {student}",
        search: "eff search runs/big --calibration data:batches --out small -- python train.py --model {student} {out}",
        lottery: "eff lottery --rounds 5 --out tickets -- python train.py --output_dir {round}",
    },
    "After training": {
        report: "eff report runs/small",
        export: "eff export runs/small --out model.onnx",
        quantize: "eff quantize runs/small --calibration data:batches --out runs/int8",
        prune: "eff prune runs/dense --sparsity 0.5 --out runs/pruned",
        shrink: "eff shrink runs/pruned --out runs/shrunk",
        low_rank: "eff low-rank runs/dense --rank 16 --out runs/low_rank",
        soup: "eff soup runs/small/checkpoint-* --task accuracy --data test.jsonl --out runs/soup",
        compress: "eff compress runs/small --out model.eff",
        decompress: "eff decompress model.eff --out runs/restored",
    },
    "Look up": {
        explain: "eff explain recipe.yaml --model my_models:build --steps 1000",
        plan: "eff plan recipe.yaml --params 70e9 --gpus 64 --length 4096 --memory 80",
        privacy: "eff privacy --target-epsilon 8 --examples 60000 --batch-size 256 --epochs 10",
        flags: "eff flags prune",
        compat: "eff compat prune fsdp2",
        formats: "eff formats",
        doctor: "eff doctor",
    },
}
_OPTIONS: dict[Any, dict[str, Any]] = {
    run: {"options_metavar": "", "context_settings": _SCRIPT},
    try_out: {"name": "try", "context_settings": {**_SCRIPT, "ignore_unknown_options": False}},
}


def _help(command: Any, example: str) -> tuple[str, str]:
    """Return a command's help, starting with an example, and its first sentence. The terminal wraps paragraphs."""
    paragraphs = [" ".join(text.split()) for text in inspect.cleandoc(command.__doc__).split("\n\n")]
    return "\n\n".join([f"Example: {example}", *paragraphs]), paragraphs[0]


for _panel, _commands in _PANELS.items():
    for _command, _example in _commands.items():
        _text, _first = _help(_command, _example)
        app.command(
            cls=_CLASSES.get(_command), help=_text, short_help=_first, rich_help_panel=_panel,
            **_OPTIONS.get(_command, {}),
        )(_command)  # fmt: skip


def main() -> None:
    """Run the command line. Our errors and those of users' functions are printed in one line, without a traceback."""
    show_imports()
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Abort:
        echo("aborted", err=True)
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "format_message"):
            _exit_with_usage(error)
        line = None if wants_traceback() else _one_line(error)
        if line is None:
            raise
        echo(f"error: {EffError(line)}", err=True)
        sys.exit(2 if isinstance(error, EffError) and isinstance(error, CheckpointError | ValueError) else 1)


def _exit_with_usage(error: Any) -> NoReturn:
    """Exit with click's error in one line. Its class is click's or typer's copy of it."""
    context = error.ctx
    if context is None or type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    name, text = getattr(error, "option_name", None), error.format_message().rstrip(".")
    commands = getattr(context.command, "commands", {})
    if type(error).__name__ == "NoSuchOption":
        known = {option for one in context.command.get_params(context) for option in one.opts if option[:2] == "--"}
        # click reports --prune_sparsity as --prune-sparsity
        given = (argument.partition("=")[0] for argument in sys.argv[1:])
        typed = next((one for one in given if one.replace("_", "-") == name), str(name))
        text = f"{typed} is not an option{did_you_mean(str(name), known)}"
        if typed.removeprefix("--").replace("-", "_") in registry.flags():
            text = f"{typed} is a flag of eff run; here, write it into a recipe"
    elif commands and (found := re.search(r"No such command '([^']*)'", text)):
        text = f"{found[1]} is not a command{nearest(found[1], commands)}"
    else:
        text = f"{text[:1].lower()}{text[1:]}"
    text += " See" if text.endswith("?") else "; see"
    echo(f"error: {context.command_path}: {text} {context.command_path} --help", err=True)
    sys.exit(error.exit_code)


def _one_line(error: Exception) -> str | None:
    """Return an error as one line, or None if the traceback is needed to understand it."""
    if isinstance(error, EffError):
        return str(error)
    # a name too long for the file system, a full disk, someone else's folder
    return user_error(error) or (str(error) if isinstance(error, OSError) else None)
