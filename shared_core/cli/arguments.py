"""Arguments that several commands share, commands made of a technique's options, and the progress bar.

A technique's options are looked up only when its command runs, so that `eff --help` imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from shared_core.cli.flags import describe_flags

Model = Annotated[
    str, typer.Argument(help="A Hugging Face folder, or module:function that returns the model or (model, inputs).")
]
Out = Annotated[Path, typer.Option(help="The folder to write; it must not exist or be empty.")]
Weights = Annotated[Path | None, typer.Option(help="With module:function, a folder or file with the trained weights.")]
Calibration = Annotated[
    str | None, typer.Option(help="module:function that returns batches: tensors, tuples, dicts or what --loss takes.")
]
Loss = Annotated[
    str | None,
    typer.Option(help="module:function that takes (model, batch) and returns its loss; default: output.loss."),
]
Evaluate = Annotated[
    str | None, typer.Option("--eval", help="module:function that takes a model and returns its quality.")
]
ExecutorName = Annotated[
    str,
    typer.Option(
        "--executor", help="Where runs are started: local (here), submitit (one SLURM job each) or ray (one task each)."
    ),
]
ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-set",
        help="Of submitit or Ray as NAME=VALUE: timeout_min=600, slurm_partition=gpu, num_gpus=1; may be repeated.",
    ),
]
AllowPartial = Annotated[
    bool,
    typer.Option(
        "--allow-partial", help="Go on where less than half of the weights that multiply activations are within reach."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


_OPTIONS = "shared_core.cli.arguments"
_Options = TypeVar("_Options")


def given_options(context: typer.Context) -> dict[str, Any]:
    """Return the technique's options that were given, as texts, which its config reads."""
    return dict(context.meta[_OPTIONS])


def command_with_options(module: str, config_name: str, left_out: Callable[[], tuple[str, ...]]) -> type[TyperCommand]:
    """Return the class of a command that has a config's options beside its own.

    Args:
        module: Where the config is.
        config_name: Of its class.
        left_out: Returns the options that the command does not have.
    """

    @functools.cache
    def options() -> list[Any]:
        return _parameters(getattr(importlib.import_module(module), config_name), left_out())

    class ConfigCommand(TyperCommand):
        """Has the options of a config for flags."""

        def get_params(self, ctx: Any) -> list[Any]:
            """Return the command's own parameters, then the options of the technique."""
            *own, help_option = super().get_params(ctx)
            return [*own, *options(), help_option]

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Take a switch alone for true, as `eff run` does."""
            switches = {name for option in options() if option.metavar == "true | false" for name in option.opts}
            spelled = []
            for arg, following in zip(args, [*args[1:], ""], strict=False):
                is_alone = arg.replace("_", "-") in switches and following not in ("true", "false")
                spelled += [arg, "true"] if is_alone else [arg]
            return super().parse_args(ctx, spelled)

        def invoke(self, ctx: Any) -> Any:
            """Run the command, with the options of the technique where it finds them."""
            names = [parameter.name for parameter in options()]
            # a list that was not given is empty, which is not the config's own default
            given = {name: value for name in names if (value := ctx.params.pop(name, None)) not in (None, [], ())}
            ctx.meta[_OPTIONS] = {
                name: ",".join(value) if isinstance(value, list | tuple) else value for name, value in given.items()
            }
            return super().invoke(ctx)

    return ConfigCommand


def _parameters(config: Any, left_out: tuple[str, ...]) -> list[Any]:
    rows = {row["flag"]: row for row in describe_flags(config.key)}
    flags = []
    for field in dataclasses.fields(config):
        if field.name in left_out:
            continue
        row = rows[f"--{config.key}_{field.name}"]
        is_required = row["default"] == "required"
        option = typer.Option(
            f"--{field.name.replace('_', '-')}",
            help=row["help"],
            metavar=row["type"],
            show_default=False if is_required else row["default"] or False,
        )
        # texts, which the config reads as those of a recipe are read; lists may be given more than once
        is_list = row["type"] == "list"
        kind, value = (str, inspect.Parameter.empty) if is_required else ((list[str] if is_list else str) | None, None)
        flags.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=Annotated[kind, option]
            )
        )

    def options(**given: Any) -> None: ...

    options.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    options.__annotations__ = {flag.name: flag.annotation for flag in flags}
    app = typer.Typer(add_completion=False)
    app.command()(options)
    return list(typer.main.get_command(app).params)


def takes(options: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Return a decorator for a command with many arguments, which gets them as one object.

    Args:
        options: A dataclass whose fields are declared as a command's parameters are.

    Example:
        >>> @dataclasses.dataclass
        ... class Greeting:
        ...     name: Annotated[str, typer.Argument(help="Whom.")] = "all"
        >>> greet = takes(Greeting)(lambda greeting: print("hello", greeting.name))
        >>> inspect.signature(greet).parameters["name"].default
        'all'
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = inspect.signature(options).parameters.values()

    def decorated(command: Callable[[_Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**given: Any) -> None:
            command(options(**given))

        own = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
        call.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
        return call

    return decorated


@contextlib.contextmanager
def bar(what: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar with the time left while the block runs, on a terminal alone and not with ``--quiet``.

    What is yielded takes (done, total, None if unknown).
    """
    from rich.progress import Progress, TimeElapsedColumn

    from shared_core.engine.receipt import is_quiet
    from shared_core.reports.console import Console

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    is_off = is_quiet() or not (is_shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_off) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
