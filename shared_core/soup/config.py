"""The options of the soup at the end of training."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shared_core.config.environments import DEEPSPEED, RUN_ENVIRONMENTS
from shared_core.config.options import TechniqueConfig, option

_SMALLER_IS_BETTER = frozenset({
    "loss", "perplexity", "ppl", "error", "err", "wer", "cer", "ter", "mae", "mse", "rmse", "nll", "bpc", "bpb",
})  # fmt: skip
_GREEDY: dict[str, Any] = {"only_with": {"kind": ("greedy",)}}


TWO_AVERAGES = "each would put its own weights into the model for validation. Keep only one of them"
# Techniques with masks, clusters, copies or quantizers of single parameters.
_HOLD_WEIGHTS = ("primary_weights", "prune", "cluster", "qat", "fp8")


@dataclass(frozen=True, kw_only=True)
class SoupConfig(TechniqueConfig):
    """Averages checkpoints of the run after training.

    Example:
        >>> SoupConfig(kind="greedy", metric="eval_accuracy").larger_is_better
        True
    """

    about: ClassVar[str] = "Averages the checkpoints that improve the metric."
    key: ClassVar[str] = "soup"
    switch: ClassVar[str] = "kind"

    # It evaluates through live masks and quantizers, while checkpoints hold merged adapters.
    finishes_after: ClassVar[tuple[str, ...]] = ("lora",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "averaging_callback": TWO_AVERAGES,
        "own_loop": "a plain loop does not report its checkpoints or their metric. Average them with `eff soup`",
        "deepspeed": DEEPSPEED,
        "fsdp1": "candidates are whole models. Average the saved checkpoints with `eff soup` instead",
    }
    works_in: ClassVar[tuple[str, ...]] = ("tensor_parallel",)
    logs_nothing: ClassVar[str] = "it works after training, and prints its result"

    kind: Literal["greedy", "uniform", "weighted"] = option(
        help="Average the run's checkpoints at the end: greedy (add while the metric does not get worse), uniform "
        "(all) or weighted (by weights)."
    )
    metric: str = option("eval_loss", help="Validation metric for greedy, as the trainer names it.", **_GREEDY)
    mode: Literal["auto", "max", "min"] = option(
        "auto",
        help="Whether a larger (max) or smaller (min) metric is better; auto: min for losses and errors.",
        **_GREEDY,
    )
    strict: bool = option(
        False, help="Accept an average only if it improves the metric, not if it is equal.", **_GREEDY
    )
    min_delta: float = option(0.0, help="Accept an average only if it is better by at least this.", low=0, **_GREEDY)
    order: Literal["metric", "logged", "newest", "random"] = option(
        "metric",
        help="Order to try checkpoints in: metric (evaluate each alone, best first); or evaluate only the first alone: "
        "logged (best logged metric first), newest (first), random.",
        **_GREEDY,
    )
    seed: int = option(0, help="Seed of the random order.", only_with={"order": ("random",)})
    repeat: bool = option(True, help="Evaluate the first member twice, to detect noise in the evaluation.", **_GREEDY)
    weights: tuple[float, ...] = option(
        (),
        help="Weights of the newest checkpoints, oldest first; fewer checkpoints use the last weights.",
        above=0,
        only_with={"kind": ("weighted",)},
        required=True,
    )
    last: int | None = option(
        None, help="Number of last checkpoints to use. Default: all.", low=1,
        only_with={"kind": ("greedy", "uniform")},
    )  # fmt: skip
    max_ingredients: int | None = option(None, help="Stop at this many checkpoints.", low=1, **_GREEDY)
    rank: int | None = option(
        None, help="Truncate averages of a PEFT model's adapters to this rank (SVD); by default ranks add up.", low=1
    )
    bn_batches: int = option(
        0, help="Training batches to re-estimate BatchNorm statistics of every average; 0: average them.",
        low=0,
    )  # fmt: skip

    @property
    def larger_is_better(self) -> bool:
        """True if the metric is better when larger."""
        return self.mode == "max" if self.mode != "auto" else larger_is_better(self.metric)

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a message for each combination that these options rule out."""
        yield from refuse_estimates(self, environment)
        if {"peft", "fsdp2"} <= {*environment}:
            yield (
                f"soup of {RUN_ENVIRONMENTS['peft']} cannot be combined with {RUN_ENVIRONMENTS['fsdp2']}: averages of "
                "adapters have other ranks, but FSDP2 cannot change sharded shapes. Average the saved adapters with "
                "`eff soup`"
            )
        for key in _HOLD_WEIGHTS:
            if "peft" in environment and key in recipe:
                yield (
                    f"soup of {RUN_ENVIRONMENTS['peft']} cannot be combined with {key}: its state per adapter weight "
                    "does not fit averages, which have other shapes. Average the saved adapters with `eff soup`"
                )

    def needed_metrics(self) -> Mapping[str, str]:
        """Return the metric that a greedy soup needs."""
        return {"soup: metric": self.metric} if self.kind == "greedy" else {}


def larger_is_better(metric: str) -> bool:
    """Return True if a metric of this name is better when larger, which is all but losses and errors."""
    words = re.split(r"[^a-z0-9]+", metric.lower())
    return not any(word in _SMALLER_IS_BETTER or word.endswith("loss") for word in words)


def refuse_estimates(config: Any, environment: Collection[str]) -> Iterator[str]:
    """Yield a message if `bn_batches` is used although `training_step` steps the optimizer itself."""
    if config.bn_batches and "manual_optimization" in environment:
        yield (
            f"{config.key} with bn_batches cannot be combined with {RUN_ENVIRONMENTS['manual_optimization']}: "
            "statistics are estimated by running training_step, which would step the optimizer. Leave bn_batches at 0"
        )
