"""`eff init`: a commented recipe to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from shared_core.errors import CompatibilityError, ConfigError

if TYPE_CHECKING:
    from shared_core.recipe import Recipe
    from shared_core.starting_recipes import Kind

_TRAINERS = ("hf", "lightning")


def init(
    goal: Annotated[
        str | None,
        typer.Option(help="smaller, faster-inference, less-memory, better-accuracy, private; asked for at a terminal."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="transformer, cnn, other; or a Hugging Face folder or module:function to look at."),
    ] = None,
    trainer: Annotated[str | None, typer.Option(help="hf or lightning.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("recipe.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
) -> None:
    """Write a recipe for a goal, every line with its reason and its flag; with a model, one that fits it."""
    from shared_core.atomic import atomic_write
    from shared_core.hardware import default_device
    from shared_core.recipe import Recipe
    from shared_core.rooms import ROOMS
    from shared_core.starting_recipes import GOALS, commented_recipe

    if out.exists() and not force:
        raise ConfigError(f"init: --out must be a new file, got {out}, which exists; give another, or --force")
    if not out.parent.is_dir():
        raise ConfigError(f"init: --out must lie in a folder that exists, got {out}")
    goal, model, trainer = _asked(goal, model, trainer, GOALS)
    if trainer not in _TRAINERS:
        raise ConfigError(f"init: trainer must be hf or lightning, got {trainer!r}")
    kind, name = _kind(model)
    text = commented_recipe(goal, kind, trainer, str(out))
    recipe = Recipe.from_yaml(text)
    if name is not None:
        _check(recipe, name, trainer)
    with atomic_write(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    typer.echo(f"{out}: {', '.join(recipe)}; next: eff explain {out}" + (f" --model {name}" if name else ""))
    for key in recipe:
        ability = ROOMS[key].technique_class.ability(default_device())
        if ability.level == "refused":
            typer.echo(f"not on this machine: {ability.why}")


def _asked(goal: str | None, model: str | None, trainer: str | None, goals: dict[str, str]) -> tuple[str, str, str]:
    if goal is None and _at_a_terminal():
        for known, what in goals.items():
            typer.echo(f"  {known}: {what}")
        goal = typer.prompt("goal", default="smaller")
        model = model or typer.prompt("model (transformer, cnn, other, a folder or module:function)", default="other")
        trainer = trainer or typer.prompt("trainer (hf, lightning)", default="hf")
    if goal is None:
        raise ConfigError(f"init: --goal must be given where nobody can be asked; one of {', '.join(goals)}")
    return goal, model or "other", trainer or "hf"


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _kind(model: str) -> tuple[Kind, str | None]:
    """Return the kind of a model, and its folder or function if it is to be looked at."""
    from shared_core.starting_recipes import Kind

    if model in get_args(Kind):
        return model, None  # type: ignore[return-value]
    if ":" not in model and not Path(model).is_dir():
        raise ConfigError(
            f"init: model must be {', '.join(get_args(Kind))}, a folder or module:function, got {model!r}"
        )
    from shared_core.activation_checkpointing.policies import chosen_blocks
    from shared_core.cli.explain import build
    from shared_core.errors import MatchError

    try:
        chosen_blocks(build(model, where="init")[0])
    except MatchError:
        return "other", model
    return "transformer", model


def _check(recipe: Recipe, name: str, trainer: str) -> None:
    from shared_core.cli.explain import build
    from shared_core.explanation import explain

    conflicts = explain(recipe, build(name, where="init")[0], trainer=trainer).conflicts
    if conflicts:
        raise CompatibilityError("init: this goal does not fit the model: " + "; ".join(conflicts))
