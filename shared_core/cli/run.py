"""`eff run script.py ARGS --prune_sparsity 0.8`: techniques for a training script that nobody edits."""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from shared_core.errors import CompatibilityError, ConfigError, did_you_mean, nearest

if TYPE_CHECKING:
    from shared_core.recipe import Recipe

GROUP = "efftrain.front_ends"


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


def take_flags(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return our flags with their values, and what is left for the script; after ``--`` all is the script's.

    Raises:
        ConfigError: If a flag looks like one of ours but is none, or has no value.

    Example:
        >>> take_flags(["--lr", "0.1", "--prune_sparsity=0.8", "--prune_skip", "last"])
        ({'prune_sparsity': '0.8', 'prune_skip': 'last'}, ['--lr', '0.1'])
    """
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
        if not is_flag or (name not in known and name != "eff_recipe"):
            if is_flag and any(name.startswith(f"{key}_") for key in ROOMS):
                raise ConfigError(
                    f"eff run: --{name} is not a flag{nearest(name, known)}; the script's own flags go after `--`"
                )
            rest.append(argument)
            continue
        if not equals:
            is_bool = name in known and known[name][1].type in ("bool", bool)
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
    """Return what the first flag that resembles one of ours may have been meant for, or nothing."""
    from shared_core.rooms import flags

    names = (argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--"))
    known = [f"--{flag}" for flag in (*flags(), "eff_recipe")]
    return next((hint for name in names if (hint := did_you_mean(f"--{name}".replace("-", "_"), known))), "")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script (or -m-style module name ending in no .py).")],
) -> None:
    """Run a training script of either trainer with techniques switched on by flags; the script is not edited.

    Our flags (--prune_sparsity, --qat_scheme, --distill_teacher, --loss_scale_kind, --soup_kind, … and --eff_recipe
    FILE) may stand anywhere after the script; it never sees them. What follows `--` is the script's alone.
    """
    ours, rest = take_flags(context.args)
    recipe = recipe_of(ours)
    if not recipe:
        raise ConfigError(
            "eff run: at least one technique must be switched on; add a flag such as --prune_sparsity 0.8"
            + _nearest_flag(rest)
        )
    is_file = script.endswith(".py")
    if is_file and not Path(script).is_file():
        raise ConfigError(f"eff run: script must be a file, got {script!r}; check the path")
    installed = front_ends()
    if not installed:
        raise ConfigError("eff run: needs a trainer; pip install 'efftrain[hf]' or 'efftrain[lightning]'")
    for front_end in installed:
        front_end.install(recipe)

    sys.argv = [script, *rest]
    if is_file:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
    else:
        sys.path.insert(0, "")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    if not any(front_end.used() for front_end in installed):
        raise CompatibilityError(
            f"eff run: {script} must train with the Hugging Face Trainer or Lightning, but no training by either was "
            "seen; nothing was switched on"
        )
