"""Recipes to start from, one for each goal: what it switches on, and why each option has its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from shared_core.errors import ConfigError, nearest

Kind = Literal["transformer", "cnn", "other"]
Lines = tuple[tuple[str, Any, str], ...]

GOALS = {
    "smaller": "a smaller file: half of the weights zero, the others 16 values a tensor; pack it with eff compress",
    "faster-inference": "int8 integer products after training; convert with eff export",
    "less-memory": "less memory for activations in training, with the same gradients",
    "better-accuracy": "an average of the weights, which usually generalises better, for one pass a step",
    "private": "differential privacy: no single example shows in the trained model",
}
_PRUNE: Lines = (
    ("sparsity", 0.5, "half of the weights are rarely missed; raise it while the metric holds"),
    ("begin", 0.1, "the model learns first which weights matter"),
    ("end", 0.5, "half of the run is left to recover"),
    ("min_size", 256, "tiny layers save nothing and cost accuracy"),
)
_SHARE: Lines = (
    ("bits", 4, "16 values a tensor, an eighth of float32; 5 or 6 lose less"),
    ("begin", 0.75, "after pruning has ended, when weights move little"),
)
_QAT: Lines = (
    ("scheme", "int8", "weights per channel, activations per tensor: what integer kernels take"),
    ("begin", 0.1, "ranges are observed before they are used"),
    ("freeze_observers", 0.9, "the last tenth trains with the ranges of deployment"),
)
_CHECKPOINTING: Lines = (("policy", "block", "keeps one tensor a block and computes the rest again: a forward more"),)
_ACTIVATIONS: Lines = (("pack", "exact", "masks as bits; wants ReLU, dropout or pooling"),)
_AVERAGE: Lines = (
    ("kind", "ema", "a moving average; swa for a constant learning rate at the end"),
    ("decay", 0.999, "a memory of about 1000 steps; 0.99 for runs of fewer"),
    ("evaluate", True, "validation sees the average, which is what is saved"),
)
_DP: Lines = (
    ("target_epsilon", 8.0, "a usual budget; smaller is more private and less accurate"),
    ("delta", 1e-5, "below one over the number of examples"),
    ("max_grad_norm", 1.0, "to which each example's gradient is clipped"),
)


def starting_options(goal: str, kind: Kind) -> Mapping[str, Lines]:
    """Return (option, value, why) of each technique that a goal switches on, by recipe key.

    Args:
        goal: One of `GOALS`.
        kind: Of the model; transformers have repeated blocks that can be recomputed.

    Raises:
        ConfigError: If there is no such goal.
    """
    if goal not in GOALS:
        raise ConfigError(f"init: goal must be one that exists, got {goal!r}{nearest(goal, GOALS)}")
    memory = {"checkpointing": _CHECKPOINTING} if kind == "transformer" else {"activations": _ACTIVATIONS}
    return {
        "smaller": {"prune": _PRUNE, "share": _SHARE},
        "faster-inference": {"qat": _QAT},
        "less-memory": memory,
        "better-accuracy": {"average": _AVERAGE},
        "private": {"dp": _DP},
    }[goal]


def commented_recipe(goal: str, kind: Kind, trainer: str, file: str) -> str:
    """Return the YAML text of a recipe, every line with its reason and the flag that it equals.

    Args:
        goal: One of `GOALS`.
        kind: Of the model.
        trainer: ``hf`` or ``lightning``.
        file: Its name, for the command that uses it.

    Example:
        >>> print(commented_recipe("less-memory", "cnn", "hf", "recipe.yaml").splitlines()[-1])
          pack: exact  # masks as bits; wants ReLU, dropout or pooling (--activations_pack exact)
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
