"""`eff init`: a commented recipe to start from.

Recipes to start from, one for each goal: what it switches on, and why each option has its value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import typer

from shared_core.cli.arguments import CommandOptions, takes
from shared_core.cli.loading import check_model
from shared_core.config.options import option
from shared_core.errors import CompatibilityError, require
from shared_core.printing import echo

if TYPE_CHECKING:
    from shared_core.engine.recipe import Recipe

Goal = Literal["smaller", "faster-inference", "recover-quantized", "less-memory", "better-accuracy", "private"]


@dataclass(frozen=True, kw_only=True)
class InitOptions(CommandOptions):
    """Options of `eff init`."""

    key: ClassVar[str] = "eff init"

    goal: Goal | None = option(None, "What to improve. Without it, eff init asks on a terminal.")
    model: str | None = option(
        None, "Kind of model (transformer, cnn, other), or a folder or module:function to inspect."
    )
    trainer: Literal["hf", "lightning"] | None = option(None, "The trainer of the run.")
    out: Path = option(Path("recipe.yaml"), "The file to write.")
    force: bool = option(False, "Overwrite --out.")

    def check_files(self) -> None:
        """Raise an error if MODEL names neither a kind nor what exists."""
        if self.model is not None and self.model not in get_args(Kind):
            _check_named(self.model)


@takes(InitOptions)
def init(asked: InitOptions) -> None:
    """Write a recipe for a goal, with a reason and the flag for each line.

    With --model, the recipe is checked on that model.
    """
    from shared_core.engine.recipe import Recipe
    from shared_core.engine.registry import REGISTRY
    from shared_core.files.atomic import atomic_write
    from shared_core.hardware import default_device

    out = asked.out
    rule = f"--out must be a new file, got {out}, which exists"
    asked.require(asked.force or not out.exists(), rule, "choose another name, or add --force")
    asked.require(out.parent.is_dir(), f"--out must be in an existing folder, got {out}")
    asked = _answered(asked)
    goal, trainer = asked.goal or "smaller", asked.trainer or "hf"
    kind, name = _kind(asked.model or "other")
    text = commented_recipe(goal, kind, trainer, str(out))
    recipe = Recipe.from_yaml(text)
    if name is not None:
        _check(recipe, name, trainer)
    with atomic_write(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    echo(f"Wrote {out}: {', '.join(recipe)}.")
    echo(f"Next: eff explain {out}" + (f" --model {name}" if name else ""))
    for key in recipe:
        ability = REGISTRY[key].config_class.ability(default_device())
        if ability.level == "refused":
            echo(f"{key} does not run on this machine: {ability.why}.")


def _answered(asked: InitOptions) -> InitOptions:
    """Return the options, with the user's answers if no goal was given."""
    if asked.goal is not None:
        return asked
    asked.require(_at_a_terminal(), "--goal must be given without a terminal to ask on", f"choose {', '.join(GOALS)}")
    for known, what in GOALS.items():
        echo(f"  {known}: {what}")
    goal = typer.prompt("goal", default="smaller")
    kinds = "model (transformer, cnn, other, a folder or module:function)"
    model = asked.model or typer.prompt(kinds, default="other")
    trainer = asked.trainer or typer.prompt("trainer (hf, lightning)", default="hf")
    return replace(asked, goal=goal, model=model, trainer=trainer)


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _kind(model: str) -> tuple[Kind, str | None]:
    """Return the kind of a model, and the folder or function to inspect, if any."""
    if model in get_args(Kind):
        return model, None  # type: ignore[return-value]
    _check_named(model)
    from shared_core.activation_checkpointing.policies import chosen_blocks
    from shared_core.cli.planning import build
    from shared_core.errors import MatchError

    try:
        chosen_blocks(build(model, where="eff init")[0])
    except MatchError:
        return "other", model
    return "transformer", model


def _check_named(model: str) -> None:
    rule = f"--model must be {', '.join(get_args(Kind))}, a folder or module:function, got {model!r}"
    require(":" in model or Path(model).is_dir(), "eff init", rule)
    check_model(model, "eff init", "--model")


def _check(recipe: Recipe, name: str, trainer: str) -> None:
    from shared_core.cli.planning import build
    from shared_core.tools.explain import explain

    conflicts = explain(recipe, build(name, where="eff init")[0], trainer=trainer).conflicts
    rule = f"this goal does not fit the model: {'; '.join(conflicts)}"
    require(not conflicts, "eff init", rule, error=CompatibilityError)


Kind = Literal["transformer", "cnn", "other"]
Lines = tuple[tuple[str, Any, str], ...]

GOALS: dict[Goal, str] = {
    "smaller": "a smaller file: half of the weights zero, the others 16 values per tensor; pack it with eff compress",
    "faster-inference": "int8 integer products after training; convert with eff export",
    "recover-quantized": "4-bit weights that keep the trained model's outputs; use a small learning rate, such as 1e-5",
    "less-memory": "less memory for activations in training, with the same gradients",
    "better-accuracy": "an average of the weights, which usually generalizes better, for one update per step",
    "private": "differential privacy: no single example shows in the trained model",
}
_PRUNE: Lines = (
    ("sparsity", 0.5, "half of the weights are rarely missed; raise it while the metric holds"),
    ("begin", 0.1, "first the model learns which weights matter"),
    ("end", 0.5, "half of the run is left to recover"),
    ("min_size", 256, "tiny layers save nothing and cost accuracy"),
)
_SHARE: Lines = (
    ("bits", 4, "16 values per tensor, an eighth of float32; 5 or 6 lose less"),
    ("begin", 0.75, "after pruning has ended, when weights move little"),
)
_QAT: Lines = (
    ("scheme", "int8", "weights per channel, activations per tensor, as integer kernels need"),
    ("begin", 0.1, "ranges are observed before they are used"),
    ("freeze_observers", 0.9, "the last tenth trains with the ranges of deployment"),
)
_WEIGHTS_ONLY: Lines = (("scheme", "W4A16", "4-bit weights in groups; or the format to release in, such as MXFP4A16"),)
_FROM_ITSELF: Lines = (
    ("teacher", "self", "the 16-bit model as the run starts; costs its memory and one more forward"),
    ("alpha", 0.0, "labels don't count, so the texts need not be those of the first training"),
    ("temperature", 1.0, "matches the probabilities themselves"),
)
_CHECKPOINTING: Lines = (("policy", "block", "keeps one tensor per block and recomputes the rest: one more forward"),)
_ACTIVATIONS: Lines = (("pack", "exact", "masks as bits; helps with ReLU, dropout or pooling"),)
_AVERAGE: Lines = (
    ("kind", "ema", "a moving average; swa for a constant learning rate at the end"),
    ("decay", 0.999, "averages about 1000 steps; use 0.99 for shorter runs"),
    ("evaluate", True, "validation sees the average, which is what is saved"),
)
_DP: Lines = (
    ("target_epsilon", 8.0, "a usual budget; smaller is more private and less accurate"),
    ("delta", 1e-5, "below one over the number of examples"),
    ("max_grad_norm", 1.0, "each example's gradient is clipped to this norm"),
)


def starting_options(goal: Goal, kind: Kind) -> Mapping[str, Lines]:
    """Return (option, value, why) of each technique that a goal switches on, by recipe key."""
    memory = {"checkpointing": _CHECKPOINTING} if kind == "transformer" else {"activations": _ACTIVATIONS}
    made: dict[Goal, Mapping[str, Lines]] = {
        "smaller": {"prune": _PRUNE, "cluster": _SHARE},
        "faster-inference": {"qat": _QAT},
        "recover-quantized": {"qat": _WEIGHTS_ONLY, "distill": _FROM_ITSELF},
        "less-memory": memory,
        "better-accuracy": {"average": _AVERAGE},
        "private": {"dp": _DP},
    }
    return made[goal]


def commented_recipe(goal: Goal, kind: Kind, trainer: str, file: str) -> str:
    """Return the YAML text of a recipe, every line with its reason and the equivalent flag.

    Args:
        goal: One of `GOALS`.
        kind: Of the model.
        trainer: ``hf`` or ``lightning``.
        file: Its name, for the command that uses it.

    Example:
        >>> print(commented_recipe("less-memory", "cnn", "hf", "recipe.yaml").splitlines()[-1])
          pack: exact  # masks as bits; helps with ReLU, dropout or pooling (--activations_pack exact)
    """
    options = starting_options(goal, kind)
    other = f"EffTrainer's --eff_recipe {file}" if trainer == "hf" else f"EFF_RECIPE={file} python train.py"
    lines = [
        f"# {goal}: {GOALS[goal]}",
        f"# train: eff run train.py --eff_recipe {file}, or {other}",
        f"# look first: eff explain {file} --trainer {trainer} --steps 1000",
    ]
    for key, given in options.items():
        lines.append(f"{key}:")
        for name, value, why in given:
            text = str(value).lower() if isinstance(value, bool) else format(value)
            lines.append(f"  {name}: {text}  # {why} (--{key}_{name} {text})")
    return "\n".join(lines) + "\n"
