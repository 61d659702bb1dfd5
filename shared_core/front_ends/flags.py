"""Flags of techniques among the arguments of a training script."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from shared_core.engine.recipe import Recipe


STEPS_FLAG, STEPS_VARIABLE = "eff_total_steps", "EFF_TOTAL_STEPS"
"""Optimizer steps of a loop whose scheduler does not give them: flag of `eff run`, and its environment variable."""
# flags of published scripts and of trl that begin like a technique's flag
_OF_A_SCRIPT = {
    "average_tokens_across_devices", "checkpointing_steps", "distillation_alpha", "lora_modules_to_save", "lora_r",
    "lora_target_modules", "lora_target_parameters", "lora_task_type",
}  # fmt: skip
_ALIKE = 0.65  # accepts pruning and prune, distillation and distill


def take_flags(
    arguments: list[str], script: str | None = None, where: str = "eff run"
) -> tuple[dict[str, Any], list[str]]:
    """Split arguments into our flags with their values and the script's arguments. All after ``--`` are the script's.

    Args:
        arguments: Arguments of the script, mixed with ours.
        script: The script's file. Flags that it declares are left to it.
        where: Prefix of errors.

    Raises:
        ConfigError: If one of our flags is misspelt, has no value, or is also a flag of the script.

    Example:
        >>> take_flags(["--lr", "0.1", "--prune_sparsity=0.8", "--prune_skip", "last"])
        ({'prune_sparsity': '0.8', 'prune_skip': 'last'}, ['--lr', '0.1'])
    """
    from shared_core.engine.recipe import PARTIAL_FLAG
    from shared_core.engine.registry import REGISTRY, flags

    known = {*flags(), "eff_recipe", PARTIAL_FLAG, STEPS_FLAG}
    declared = _OF_A_SCRIPT | _declared_flags(script)
    switches = {PARTIAL_FLAG, *(name for name, (_, field) in flags().items() if field.type in ("bool", bool))}
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
        if not is_flag or name not in known:
            # It begins like one of ours, so it is most likely misspelt. The script might silently ignore it.
            key = next((key for key in REGISTRY if name.startswith(f"{key}_")), None)
            if is_flag and key and name not in declared:
                hint = nearest(name, flags(key), "--")
                raise ConfigError(where, f"--{name} is not a flag{hint}", _AFTER_DASHES)
            rest.append(argument)
            continue
        if name in declared:
            rule = f"--{name} is a flag of both {script} and efftrain"
            raise ConfigError(where, rule, f"{_AFTER_DASHES}; put efftrain's into a recipe, --eff_recipe FILE")
        if not equals:
            # A switch without a value is true, unless true or false follows.
            if name in switches and (not queue or queue[0].lower() not in ("true", "false")):
                value = "true"
            elif not queue or queue[0].startswith("--"):
                raise ConfigError(where, f"--{name} must have a value", f"write --{name} VALUE")
            else:
                value = queue.pop(0)
        if name in ours:
            raise ConfigError(where, f"--{name} must be given once, got it twice")
        ours[name] = value
    return ours, rest


_AFTER_DASHES = "put the script's own flags after `--`"


@functools.cache
def _declared_flags(script: str | None) -> frozenset[str]:
    """Return the flags that a script's source declares: arguments of calls, and fields of its dataclasses."""
    try:
        tree = ast.parse(Path(script or "").read_bytes())
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            found |= {text[2:].replace("-", "_") for text in texts if text.startswith("--")}
        elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            found |= {one.id for one in fields if isinstance(one, ast.Name)}
    return frozenset(found)


def check_before_imports(recipe: Recipe) -> None:
    """Check what the recipe alone can show, before torch and the trainers are imported.

    Raises:
        CompatibilityError: If its techniques cannot be combined.
        MissingExtraError: If a library that one needs is not installed.
        CheckpointError: If a folder or file that it names does not exist.
    """
    from shared_core.engine.checks.compatibility import check

    check(recipe)
    for config in recipe.values():
        if missing := config.missing_library():
            raise missing
        config.check_files()


def recipe_of(flags: dict[str, Any]) -> Recipe:
    """Return the recipe for the flags from `take_flags`, including the ``--eff_recipe`` file."""
    from shared_core.engine.recipe import Recipe

    flags = dict(flags)
    file = flags.pop("eff_recipe", None)
    recipe = Recipe.from_flags(flags)
    return recipe.merged(Recipe.from_yaml(Path(file))) if file else recipe


def asked_steps() -> int | None:
    """Return the steps that the environment variable gives."""
    return check_steps(os.environ.get(STEPS_VARIABLE), "eff run")


def check_steps(steps: str | None, where: str) -> int | None:
    """Return a text as a number of steps, None for None."""
    if steps is not None and (not steps.isdecimal() or int(steps) < 1):
        raise ConfigError(where, f"--{STEPS_FLAG} must be a number of optimizer steps, got {steps!r}")
    return None if steps is None else int(steps)


def as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    """Return a recipe from any accepted form: a recipe, a mapping, a YAML or JSON file."""
    from shared_core.engine.recipe import Recipe

    if isinstance(recipe, str | Path):
        return Recipe.from_json(recipe) if Path(recipe).suffix == ".json" else Recipe.from_yaml(recipe)
    return Recipe.from_dict(recipe)


def check_spelling(arguments: list[str], script: str, where: str) -> None:
    """Refuse a flag that resembles one of ours: the script might silently ignore it."""
    from shared_core.engine.registry import REGISTRY, flags

    ends = arguments.index("--") if "--" in arguments else len(arguments)
    given = {one[2:].partition("=")[0].replace("-", "_") for one in arguments[:ends] if one.startswith("--")}
    for name in sorted(given - flags().keys() - _OF_A_SCRIPT - _declared_flags(script)):
        if name in REGISTRY and (switch := REGISTRY[name].config_class.switch):
            raise ConfigError(where, f"--{name} is not a flag; did you mean '--{name}_{switch}'?", _AFTER_DASHES)
        for flag, (key, field) in flags().items():
            # The key must be misspelt: --seed and --local_rank don't mean --dp_seed and --lora_rank.
            prefix = name.removesuffix(f"_{field.name}")
            is_alike = prefix != name and prefix[:3] == key[:3] and SequenceMatcher(None, prefix, key).ratio() > _ALIKE
            if is_alike:
                raise ConfigError(where, f"--{name} is not a flag; did you mean '--{flag}'?", _AFTER_DASHES)
