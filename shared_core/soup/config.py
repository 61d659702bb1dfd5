"""Options of the soup at the end of training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from shared_core.config import TechniqueConfig, option

_SMALLER_IS_BETTER = frozenset({
    "loss", "perplexity", "ppl", "error", "err", "wer", "cer", "ter", "mae", "mse", "rmse", "nll", "bpc", "bpb",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SoupConfig(TechniqueConfig):
    """Options of the soup of a run's own checkpoints.

    Example:
        >>> SoupConfig(kind="greedy", metric="eval_accuracy").larger_is_better
        True
    """

    key: ClassVar[str] = "soup"
    switch: ClassVar[str] = "kind"

    kind: Literal["greedy", "uniform"] = option(
        help="Average the run's checkpoints at the end: greedy (add while the metric does not fall) or uniform (all)."
    )
    metric: str = option("eval_loss", help="Validation metric that greedy follows, as the trainer names it.")
    mode: Literal["auto", "max", "min"] = option(
        "auto",
        help="Whether the metric is better when larger (max) or smaller (min); auto: min for losses and errors.",
    )
    strict: bool = option(False, help="Accept only an average that improves the metric, not one that keeps it.")
    last: int | None = option(None, help="Use only the last so many checkpoints; all by default.", low=1)
    max_ingredients: int | None = option(None, help="Stop when the soup has so many members.", low=1)
    bn_batches: int = option(
        0, help="Training batches on which BatchNorm statistics are re-estimated for every average; 0: average them.",
        low=0,
    )  # fmt: skip

    @property
    def larger_is_better(self) -> bool:
        """Whether the metric is better when larger."""
        return self.mode == "max" if self.mode != "auto" else larger_is_better(self.metric)


def larger_is_better(metric: str) -> bool:
    """Return whether a metric of this name is better when larger: all but losses and errors are.

    Example:
        >>> larger_is_better("eval_f1"), larger_is_better("eval_loss"), larger_is_better("val/wer")
        (True, False, False)
    """
    words = re.split(r"[^a-z0-9]+", metric.lower())
    return not any(word in _SMALLER_IS_BETTER or word.endswith("loss") for word in words)
