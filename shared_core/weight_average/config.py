"""The options of running averages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shared_core.config.environments import FSDP1, ZERO3
from shared_core.config.options import Figure, TechniqueConfig, option
from shared_core.config.training_time import Position
from shared_core.soup.config import TWO_AVERAGES, refuse_estimates

_EMA: dict[str, Any] = {"only_with": {"kind": ("ema",)}}
_BEGIN: dict[str, Position] = {"ema": 0, "swa": 0.75, "last_k": 0}


@dataclass(frozen=True, kw_only=True)
class AverageConfig(TechniqueConfig):
    """Keeps a running average of the weights.

    Example:
        >>> AverageConfig(kind="swa").start, AverageConfig(kind="ema").start
        (0.75, 0)
    """

    about: ClassVar[str] = "Keeps a running average of the weights."
    key: ClassVar[str] = "average"
    switch: ClassVar[str] = "kind"

    finishes_after: ClassVar[tuple[str, ...]] = ("distill", "loss_scale", "dp", "comm")
    conflicts: ClassVar[Mapping[str, str]] = {"averaging_callback": TWO_AVERAGES, "zero3": ZERO3, "fsdp1": FSDP1}
    works_in: ClassVar[tuple[str, ...]] = ("tensor_parallel",)
    figures: ClassVar[Mapping[str, Figure]] = {"updates": Figure("number of updates of the average")}

    kind: Literal["ema", "swa", "last_k"] = option(
        help="Average the weights while training: exponentially (ema), uniformly (swa), or the last few (last_k)."
    )
    decay: float = option(0.999, help="Share of the average to keep per update, in [0, 1).", low=0.0, below=1.0, **_EMA)
    warmup: bool = option(
        True, help="Start ema with a low decay: the n-th update keeps at most (1 + n) / (10 + n).", **_EMA
    )
    begin: Position | None = option(
        None,
        help="When averaging starts: a fraction of the run (0.75), a step (500) or epochs (2ep); default: 0.75 for "
        "swa, else the start.",
    )
    every: int = option(1, help="Steps between updates of the average.", low=1)
    k: int = option(
        5, help="How many of the last weights to average. Each is kept in memory.", low=1,
        only_with={"kind": ("last_k",)},
    )  # fmt: skip
    evaluate: bool = option(True, help="Validate the average during training instead of the training weights.")
    bn_batches: int = option(
        0,
        help="Training batches to re-estimate BatchNorm statistics of the average, at every validation and at the end; "
        "0: average them.",
        low=0,
    )

    @property
    def start(self) -> Position:
        """When averaging starts."""
        return _BEGIN[self.kind] if self.begin is None else self.begin

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a message for each combination that these options rule out."""
        yield from refuse_estimates(self, environment)
