"""`eff run script.py ARGS --prune_sparsity 0.8`: techniques for a training script that nobody edits."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from shared_core.errors import CompatibilityError, ConfigError, EffError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shared_core.recipe import Recipe

GROUP = "efftrain.front_ends"
_OF_A_TRAINER = {"average_tokens_across_devices"}  # begins like a technique's flag


class FrontEnd(Protocol):
    """What `eff run` needs of a front end; found through the entry points of group ``efftrain.front_ends``."""

    name: str
    libraries: tuple[str, ...]
    """Modules of which one is its trainer's."""

    def install(self, recipe: Recipe) -> None:
        """Make every trainer that the script builds carry the recipe. Imports no trainer by itself."""
        ...

    def used(self) -> bool:
        """Return whether a trainer took the recipe."""
        ...


def front_ends() -> list[FrontEnd]:
    """Return the installed front ends; one whose trainer is missing is left out."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        front_end = entry.load()
        if any(map(find_spec, front_end.libraries)):
            found.append(front_end)
    return found


def own_weights(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by a model's own names, where its library saves them by others or in other pieces.

    So does transformers with those of ViT and with the experts of Mixtral.

    Args:
        model: A model; one without ``save_pretrained`` is saved by its own names.
        names: Of its tensors, those that it may yet get among them.
        state: The weights as they were saved; what is not the model's keeps its name.
    """
    if not state.keys() <= set(names) and hasattr(model, "save_pretrained"):
        for front_end in front_ends():
            if (find := getattr(front_end, "own_weights", None)) is not None:
                state = find(model, names, state)
    return dict(state)


def take_flags(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return our flags with their values, and what is left for the script; after ``--`` all is the script's.

    Raises:
        ConfigError: If a flag looks like one of ours but is none, or has no value.

    Example:
        >>> take_flags(["--lr", "0.1", "--prune_sparsity=0.8", "--prune_skip", "last"])
        ({'prune_sparsity': '0.8', 'prune_skip': 'last'}, ['--lr', '0.1'])
    """
    from shared_core.recipe import PARTIAL_FLAG
    from shared_core.rooms import ROOMS, flags

    known = flags()
    ours: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument == "--":
            rest += queue
            break
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        is_flag = argument.startswith("--")
        if not is_flag or (name not in known and name not in ("eff_recipe", PARTIAL_FLAG)):
            key = next((key for key in ROOMS if name.startswith(f"{key}_")), None)
            if is_flag and key and name not in _OF_A_TRAINER:
                hint = nearest(name, flags(key))
                raise ConfigError(f"eff run: --{name} is not a flag{hint}; the script's own flags can stand after `--`")
            rest.append(argument)
            continue
        if not equals:
            is_bool = name == PARTIAL_FLAG or (name in known and known[name][1].type in ("bool", bool))
            if is_bool and (not queue or queue[0].lower() not in ("true", "false")):
                value = "true"
            elif not queue or queue[0].startswith("--"):
                raise ConfigError(f"eff run: --{name} must have a value; write --{name} VALUE")
            else:
                value = queue.pop(0)
        if name in ours:
            raise ConfigError(f"eff run: --{name} must be given once, got it twice")
        ours[name] = value
    return ours, rest


def recipe_of(flags: dict[str, Any]) -> Recipe:
    """Return the recipe of flags as `take_flags` returns them, ``--eff_recipe`` file included."""
    from shared_core.recipe import Recipe

    flags = dict(flags)
    file = flags.pop("eff_recipe", None)
    recipe = Recipe.from_flags(flags)
    return recipe.merged(Recipe.from_yaml(Path(file))) if file else recipe


def _nearest_flag(arguments: list[str]) -> str:
    """Return what the flag that resembles one of ours most may have been meant for, or nothing."""
    from shared_core.recipe import PARTIAL_FLAG
    from shared_core.rooms import flags

    names = [argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]
    alike = (
        (SequenceMatcher(None, name, flag).ratio(), flag)
        for name in names if name not in _OF_A_TRAINER
        for flag in (*flags(), "eff_recipe", PARTIAL_FLAG)
    )  # fmt: skip
    likeness, flag = max(alike, default=(0.0, ""))
    return f"; did you mean '--{flag}'?" if likeness > 0.7 else ""  # --max_steps is no misspelt --fp8_max_skips


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
        raise ConfigError(f"eff run: script must come before the flags, got {script!r}")
    ours, rest = take_flags(context.args)
    recipe = recipe_of(ours)
    asks_for_help = any(argument in ("--help", "-h") for argument in rest)
    if not recipe and not asks_for_help:
        raise ConfigError(
            "eff run: at least one technique must be switched on; add a flag such as --prune_sparsity 0.8 (`eff flags` "
            "lists all)" + _nearest_flag(rest)
        )
    is_file = script.endswith(".py")
    if is_file and not Path(script).is_file():
        raise ConfigError(f"eff run: script must be a file, got {script!r}; check the path")
    installed = front_ends()
    if not installed:
        raise ConfigError("eff run: needs a trainer; pip install 'efftrain[hf]' or 'efftrain[lightning]'")
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
            f"eff run: {script} must train with the Hugging Face Trainer or Lightning, but no training by either was "
            "seen; nothing was switched on"
        )


def _from_script(error: BaseException) -> TracebackType | None:
    """Return the traceback as the script alone would have it."""
    entry = error.__traceback__
    for is_runpy in (False, True):
        while entry is not None and (entry.tb_frame.f_globals.get("__name__") == "runpy") is is_runpy:
            entry = entry.tb_next
    return entry
