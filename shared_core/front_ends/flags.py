"""Flags of techniques among the arguments of a training script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from shared_core.engine.recipe import Recipe


STEPS_FLAG, STEPS_VARIABLE = "eff_total_steps", "EFF_TOTAL_STEPS"
"""Optimizer steps of a loop whose scheduler does not tell them: the flag of `eff run`, and what hands it on."""
_OF_A_SCRIPT = {"average_tokens_across_devices", "checkpointing_steps"}  # published ones: begin like a technique's flag


def take_flags(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return our flags with their values, and what is left for the script; after ``--`` all is the script's.

    Example:
        >>> take_flags(["--lr", "0.1", "--prune_sparsity=0.8", "--prune_skip", "last"])
        ({'prune_sparsity': '0.8', 'prune_skip': 'last'}, ['--lr', '0.1'])
    """
    from shared_core.engine.recipe import PARTIAL_FLAG
    from shared_core.engine.registry import REGISTRY, flags

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
        if not is_flag or (name not in known and name not in ("eff_recipe", PARTIAL_FLAG, STEPS_FLAG)):
            # Begins like one of ours: most likely a misspelt one, and the script would refuse or ignore it without a
            # word.
            key = next((key for key in REGISTRY if name.startswith(f"{key}_")), None)
            if is_flag and key and name not in _OF_A_SCRIPT:
                hint = nearest(name, flags(key))
                raise ConfigError(
                    "eff run", f"--{name} is not a flag{hint}", "the script's own flags can stand after `--`"
                )
            rest.append(argument)
            continue
        if not equals:
            is_bool = name == PARTIAL_FLAG or (name in known and known[name][1].type in ("bool", bool))
            # A switch without a value is true, if what follows is no value for it.
            if is_bool and (not queue or queue[0].lower() not in ("true", "false")):
                value = "true"
            elif not queue or queue[0].startswith("--"):
                raise ConfigError("eff run", f"--{name} must have a value", f"write --{name} VALUE")
            else:
                value = queue.pop(0)
        if name in ours:
            raise ConfigError("eff run", f"--{name} must be given once, got it twice")
        ours[name] = value
    return ours, rest


def recipe_of(flags: dict[str, Any]) -> Recipe:
    """Return the recipe of flags as `take_flags` returns them, ``--eff_recipe`` file included."""
    from shared_core.engine.recipe import Recipe

    flags = dict(flags)
    file = flags.pop("eff_recipe", None)
    recipe = Recipe.from_flags(flags)
    return recipe.merged(Recipe.from_yaml(Path(file))) if file else recipe


def asked_steps() -> int | None:
    """Return the steps that the environment names."""
    return check_steps(os.environ.get(STEPS_VARIABLE), "eff run")


def check_steps(steps: str | None, where: str) -> int | None:
    """Return the number of steps that a text names, None of none."""
    if steps is not None and (not steps.isdecimal() or int(steps) < 1):
        raise ConfigError(where, f"--{STEPS_FLAG} must be a number of optimizer steps, got {steps!r}")
    return None if steps is None else int(steps)


def as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    """Return a recipe from any form that `attach` and callbacks take: itself, a mapping, a YAML or JSON file."""
    from shared_core.engine.recipe import Recipe

    if isinstance(recipe, str | Path):
        return Recipe.from_json(recipe) if Path(recipe).suffix == ".json" else Recipe.from_yaml(recipe)
    return Recipe.from_dict(recipe)


def _nearest_flag(arguments: list[str]) -> str:
    """Return what the flag that resembles one of ours most may have been meant for, or nothing."""
    from shared_core.engine.recipe import PARTIAL_FLAG
    from shared_core.engine.registry import flags

    names = [argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]
    alike = (
        (SequenceMatcher(None, name, flag).ratio(), flag)
        for name in names if name not in _OF_A_SCRIPT
        for flag in (*flags(), "eff_recipe", PARTIAL_FLAG, STEPS_FLAG)
    )  # fmt: skip
    likeness, flag = max(alike, default=(0.0, ""))
    return f"; did you mean '--{flag}'?" if likeness > 0.7 else ""  # --max_steps is no misspelt --fp8_max_skips
