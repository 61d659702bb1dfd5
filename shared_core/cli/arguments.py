"""Build commands from dataclasses of options. Also shared options and the progress bar.

A technique's options are looked up only when its command runs, so that `eff --help` imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from shared_core.config.options import Options, option, type_text
from shared_core.errors import ConfigError
from shared_core.printing import echo, is_quiet, results_alone

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn  # `eff --help` must not wait for torch

BESIDE = "shared_core.cli.beside"
"""Where a command finds options that are not fields of its dataclass. They are passed as a second argument."""
_WRITTEN = ("eff_*.json", "*.eff.json", "*soup_path.json", "model.safetensors")
"""Files that identify a folder written by a command: one of them is enough."""
_Options = TypeVar("_Options", bound="CommandOptions")


@dataclass(frozen=True, kw_only=True)
class CommandOptions(Options):
    """Base of the dataclass of a command's options, which errors call as the command line spells them.

    Beside what `option` takes, ``argument=True`` makes a field an argument of the command, and ``flag`` is its name.
    ``reads`` says what a field names that must exist: a ``path``, a ``function`` or a ``model``.
    """

    technique: ClassVar[str] = ""
    """Key of the technique whose options the command also has."""

    @classmethod
    def named(cls, name: str) -> tuple[str, str]:
        """Return the command, and the option's flag."""
        field = cls.__dataclass_fields__[name]
        if field.metadata.get("argument"):
            return cls.key, name.upper()
        return cls.key, field.metadata.get("flag") or f"--{name.replace('_', '-')}"

    @classmethod
    def written(cls, name: str, value: Any) -> str:
        """Return an option with its value as the command line has it."""
        return f"{cls.named(name)[1]} {value}"

    def check_files(self) -> None:
        """Raise an error if a path or module named by an option does not exist. Does not import torch."""
        from shared_core.cli.loading import check_named

        for field in dataclasses.fields(self):
            value, reads = getattr(self, field.name), field.metadata.get("reads")
            for one in value if isinstance(value, tuple) else (value,):
                if reads is not None and one is not None:
                    check_named(one, reads, *self.named(field.name))

    @contextlib.contextmanager
    def naming_flags(self, beside: Collection[str]) -> Iterator[None]:
        """Convert a function's error about an option into one with the command and the flag.

        Args:
            beside: Names of options that are not fields.
        """
        try:
            yield
        except ConfigError as error:
            from shared_core.engine.registry import REGISTRY

            known = {name: self.named(name)[1] for name in self.__dataclass_fields__}
            known |= {name: f"--{name.replace('_', '-')}" for name in beside}
            # an option of another technique, in a recipe
            is_other = (of := error.where.partition(".")[0]) in REGISTRY and of != self.technique
            if error.option in known and not is_other:
                error.where, error.rule = self.key, error.rule.replace(error.option, known[error.option], 1)
            raise

    @contextlib.contextmanager
    def replacing_out(self) -> Iterator[None]:
        """Allow ``--force`` to replace ``--out`` if a command wrote it and this one does not read it."""
        out = getattr(self, "out", None)
        if not getattr(self, "force", False) or out is None or not out.exists():
            yield
            return
        from shared_core.files.atomic import replacing

        real = out.resolve()
        read = [getattr(self, name, None) for name in ("model", "file", "weights", "base")]
        paths = [Path(one) for one in (*read, *getattr(self, "paths", ())) if one is not None]
        rule = f"--force must not replace what the command reads, got {out}"
        self.require(not any(one.exists() and one.resolve().is_relative_to(real) for one in paths), rule)
        self.require(not Path.cwd().is_relative_to(real), f"--force must not replace the working folder, got {out}")
        is_ours = not out.is_dir() or any(any(out.glob(name)) for name in _WRITTEN)
        rule = f"--force replaces only folders that eff wrote, but {out} has no {' or '.join(_WRITTEN)}"
        self.require(is_ours, rule, "remove it yourself")
        with replacing(out):
            yield

    def asked(self) -> dict[str, Any]:
        """Return the options for a report, by flag name, without output paths."""
        names = {field.name: self.named(field.name)[1].lstrip("-") for field in dataclasses.fields(self)}
        values = {names[name].replace("-", "_").lower(): getattr(self, name) for name in names}
        kept = {
            name: value for name, value in values.items() if name not in ("json", "out", "report", "layers", "force")
        }
        return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}


def force() -> Any:
    """Return the field of ``--force``."""
    return option(False, "Overwrite --out, if eff wrote it.")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(CommandOptions):
    """Options of a command that makes a new model from a trained one."""

    model: str = option(
        help="A Hugging Face folder, or module:function that returns the model or (model, inputs).",
        argument=True,
        reads="model",
    )
    out: Path = option(help="The folder to write.")
    force: bool = force()
    weights: Path | None = option(None, "For module:function: a folder or file with the trained weights.", reads="path")
    as_json: bool = option(False, "Print the report as JSON.", flag="--json")

    def open(self) -> tuple[nn.Module, Any, Path | None]:
        """Return (model, example inputs or None, its folder or None)."""
        from shared_core.cli.loading import open_model

        return open_model(self.model, self.weights, self.key)

    def require_inputs(self, given: object, needed: str = "") -> None:
        """Raise an error if a function returns no example inputs, unless they are given or not needed."""
        needs = f" for {needed}" if needed else ""
        self.require(
            given, f"{self.model} must return (model, example_inputs){needs}, got a model alone", "return both"
        )


@dataclass(frozen=True, kw_only=True)
class JudgedOptions(ModelOptions):
    """The same, for a command that reports the quality before and after."""

    evaluate: str | None = option(
        None, "module:function that takes a model and returns its quality.", flag="--eval", reads="function"
    )
    every_layer: bool = option(False, "List every layer, instead of the ten most notable.", flag="--layers")
    allow_partial: bool = option(
        False, "Continue even if less than half of the weights in matrix products can be changed."
    )

    def judge(self) -> Callable[[nn.Module], float] | None:
        """Return the user's quality function, checked to return a number."""
        from shared_core.cli.loading import score
        from shared_core.files.user_code import function

        if self.evaluate is None:
            return None
        return functools.partial(score, function(self.evaluate, f"{self.key}: --eval", "model"), where=self.key)


@dataclass(frozen=True, kw_only=True)
class LossOptions(ModelOptions):
    """The same, for a command that runs batches through the model or its loss."""

    needs: ClassVar = {"loss": ("calibration",)}

    calibration: str | None = option(
        None, "module:function that returns batches: tensors, tuples, dicts or what --loss takes.", reads="function"
    )
    loss: str | None = option(
        None, "module:function that takes (model, batch) and returns its loss; default: output.loss.", reads="function"
    )

    def batch_loss(self) -> Callable[[Any, Any], Any] | None:
        """Return the user's loss function of a model and a batch."""
        from shared_core.files.user_code import function

        return function(self.loss, f"{self.key}: --loss", "model", "batch") if self.loss else None

    def data(self, count: int) -> list[Any] | None:
        """Return at most `count` calibration batches."""
        from shared_core.cli.loading import user_batches

        if self.calibration is None:
            return None
        return list(itertools.islice(user_batches(self.calibration, f"{self.key}: --calibration"), max(count, 0)))


def training_command(help: str) -> Any:
    """Return the field for a training command after ``--``, as a tuple of any strings.

    An argument of a script may be empty, which an option of text may not.
    """
    return option((), f"After --: {help}", argument=True, flag_type=tuple[str, ...])


@dataclass(frozen=True, kw_only=True)
class RunnerOptions(CommandOptions):
    """Options of a command that runs a training several times."""

    executor: Literal["local", "submitit", "ray"] = option(
        "local", "Where to start runs: local (here), submitit (one SLURM job each) or ray (one task each)."
    )
    executor_set: tuple[str, ...] = option(
        (), "An option of submitit or Ray, such as timeout_min=600, slurm_partition=gpu or num_gpus=1. Repeatable."
    )
    as_json: bool = option(False, "Print JSON. The output of the training goes to stderr.", flag="--json")


def takes(options: type[_Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command, which gets its arguments as one object.

    Args:
        options: The dataclass of its arguments and flags.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Greeting(CommandOptions):
        ...     key = "greet"
        ...     name: str = option("all", "whom", argument=True)
        >>> greet = takes(Greeting)(lambda greeting: print("hello", greeting.name))
        >>> greet(name="you")
        hello you
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(context: typer.Context | None = None, **given: Any) -> None:
            asked = options(**{name: value for name, value in given.items() if value not in (None, [], ())})
            beside = None if context is None else context.meta.get(BESIDE)
            with (
                results_alone() if getattr(asked, "as_json", False) else contextlib.nullcontext(),
                asked.naming_flags(beside or ()),
                asked.replacing_out(),
            ):
                asked.check_files()
                command(asked) if beside is None else command(asked, beside)

        context = _keyword("context", inspect.Parameter.empty, typer.Context)
        # groups of --help come in the order of their first option
        fields = sorted(dataclasses.fields(options), key=lambda field: _PANELS.index(_panel(field)))
        return _with_parameters(call, [context, *(_parameter(field, options) for field in fields)])

    return decorated


def _parameter(field: dataclasses.Field[Any], options: type[CommandOptions]) -> inspect.Parameter:
    """Return a field as a typer parameter."""
    kind: Any = field.metadata.get("flag_type", options.hints()[field.name])
    flag, metavar = options.named(field.name)[1], None
    is_optional = types.NoneType in get_args(kind) or field.default in (None, ())
    text = options.meaning(field)
    kind = get_args(kind)[0] if types.NoneType in get_args(kind) else kind
    if get_origin(kind) is Literal:
        kind, metavar = str, type_text(kind)
    elif get_origin(kind) is tuple:
        kind, is_optional = types.GenericAlias(list, get_args(kind)[0]), True
    if field.metadata.get("argument"):
        info = typer.Argument(help=text)
    else:
        flags = f"{flag}/--no-{flag[2:]}" if field.default is True else flag
        info = typer.Option(flags, help=text, metavar=metavar, rich_help_panel=_panel(field))
    default = {MISSING: inspect.Parameter.empty, (): None}.get(field.default, field.default)
    annotation: Any = Annotated[kind | None if is_optional else kind, info]  # type: ignore[valid-type]
    return _keyword(field.name, default, annotation)


_BASIC = frozenset({
    "as_json", "cost", "delta", "evaluate", "every_layer", "force", "goal", "gpus", "kind", "limit", "memory", "merged",
    "method", "model", "noise_multiplier", "out", "params", "recipe", "report", "rounds", "scheme", "shrink", "steps",
    "students", "target_epsilon", "teacher", "trials", "weights",
})  # fmt: skip
_DATA = frozenset({
    "attack", "batch_size", "batches", "calibration", "data", "epochs", "examples", "fields", "inputs", "length",
    "loss", "loss_data", "max_length", "metric", "micro_batch", "mode", "seq_len", "task", "text", "tokenizer",
})  # fmt: skip


_PANELS = (None, "Data", "Advanced")


def _panel(field: dataclasses.Field[Any]) -> str | None:
    """Return the group of an option in ``--help``. None is the first one."""
    if field.default is MISSING or field.name in _BASIC:
        return None
    return "Data" if field.name in _DATA else "Advanced"


def command_with_options(key: str, left_out: Callable[[], tuple[str, ...]]) -> type[TyperCommand]:
    """Return the class of a command with a technique's options in addition to its own, except some."""

    @functools.cache
    def options() -> list[Any]:
        return _technique_parameters(key, left_out())

    class ConfigCommand(TyperCommand):
        """Has the options of a config as flags."""

        def get_params(self, ctx: Any) -> list[Any]:
            """Return the command's own parameters, then the options of the technique."""
            *own, help_option = super().get_params(ctx)
            return [*own, *options(), help_option]

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Treat a switch without a value as true, as `eff run` does."""
            switches = {name for option in options() if option.metavar == "true | false" for name in option.opts}
            spelled = []
            for arg, following in zip(args, [*args[1:], ""], strict=False):
                is_alone = arg.replace("_", "-") in switches and following not in ("true", "false")
                spelled += [arg, "true"] if is_alone else [arg]
            return super().parse_args(ctx, spelled)

        def invoke(self, ctx: Any) -> Any:
            """Run the command with the technique's options as texts, which its config parses."""
            names = [parameter.name for parameter in options()]
            # a list that was not given is empty, unlike the config's own default
            given = {name: value for name in names if (value := ctx.params.pop(name, None)) not in (None, [], ())}
            ctx.meta[BESIDE] = {
                name: ",".join(value) if isinstance(value, list | tuple) else value for name, value in given.items()
            }
            return super().invoke(ctx)

    return ConfigCommand


def _technique_parameters(key: str, left_out: tuple[str, ...]) -> list[Any]:
    """Return a technique's options with text values, which its config parses like a recipe's."""
    made = []
    for row in describe_flags(key):
        name, is_required = row["flag"].removeprefix(f"--{key}_"), row["default"] == "required"
        if name in left_out:
            continue
        shown = False if is_required else row["default"] or False
        info = typer.Option(
            f"--{name.replace('_', '-')}", help=row["help"], metavar=row["type"], show_default=shown,
            rich_help_panel=None if is_required else "Advanced",
        )  # fmt: skip
        text: Any = list[str] if row["type"] == "list" else str  # a list may be given more than once
        kind = Annotated[text, info] if is_required else Annotated[text | None, info]
        made.append(_keyword(name, inspect.Parameter.empty if is_required else None, kind))

    def options(**given: Any) -> None: ...

    return click_parameters(_with_parameters(options, made))


def describe_flags(*keys: str) -> list[dict[str, str]]:
    """Return one row per flag: flag, type, default (empty: none, ``"required"``: it is the switch), help."""
    from shared_core.config.options import default_text, type_text
    from shared_core.engine.registry import REGISTRY
    from shared_core.engine.registry import flags as flags_of

    rows = []
    for flag, (key, field) in flags_of(*keys).items():
        config_class = REGISTRY[key].config_class
        hint = config_class.hints()[field.name]
        default = "required" if field.default is dataclasses.MISSING else default_text(field.default)
        kind = type_text(field.metadata.get("flag_type", hint))
        rows.append({"flag": f"--{flag}", "type": kind, "default": default, "help": config_class.meaning(field)})
    return rows


def click_parameters(function: Callable[..., None]) -> list[Any]:
    """Return typer's parameters of a function."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return list(typer.main.get_command(app).params)


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_parameters(function: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


@contextlib.contextmanager
def bar(what: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar with the remaining time while the block runs, only on a terminal and without ``--quiet``.

    What is yielded takes (done, total, None if unknown).
    """
    from rich.progress import Progress, TimeElapsedColumn

    from shared_core.reports.page import Console

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    is_off = is_quiet() or not (is_shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_off) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_report(values: Any, shown: Iterable[str | Table], *, as_json: bool, failed: bool = False) -> None:
    """Print a report as JSON, or its text, which is only built when needed. Then exit with 1 if its check failed."""
    if as_json:
        from shared_core.files.json_yaml import json_text

        echo(json_text(values))
    else:
        from shared_core.reports.page import Console

        Console().blocks(shown)
    if failed:
        raise typer.Exit(1)
