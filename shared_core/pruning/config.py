"""The options of pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared_core.config import TechniqueConfig, option
from shared_core.positions import Position


@dataclass(frozen=True, kw_only=True)
class PruneConfig(TechniqueConfig):
    """Which weights to prune, how many, and when.

    Example:
        >>> PruneConfig(sparsity=0.8, begin=0.1, end=0.6).schedule
        'cubic'
    """

    key: ClassVar[str] = "prune"
    switch: ClassVar[str] = "sparsity"

    sparsity: float = option(help="Share of the weights that are zero at the end, in [0, 1).", low=0, below=1)
    criterion: Literal["magnitude"] = option("magnitude", help="What a weight is worth: its magnitude.")
    schedule: Literal["one_shot", "linear", "cubic"] = option(
        "cubic", help="How sparsity grows from begin to end; one_shot prunes once, at begin."
    )
    initial_sparsity: float = option(0.0, help="Sparsity at begin, for linear and cubic.", low=0, below=1)
    begin: Position = option(0.0, help="First update: a fraction of the run (0.1), a step (500) or epochs (2ep).")
    end: Position = option(0.5, help="Last update, with the full sparsity; one_shot does not use it.")
    every: int = option(10, help="Optimizer steps between two updates; there is always one at end.", low=1)
    scope: Literal["global", "local"] = option(
        "global",
        help="global: all weights compete under one threshold; local: every tensor gets the same sparsity.",
    )
    include: tuple[str, ...] = option(
        (),
        help="Only modules of these names (globs), types, or first, last. Frozen ones must be named here.",
    )
    skip: tuple[str, ...] = option((), help="No modules of these names (globs), types, or first, last.")
    min_size: int = option(0, help="Leave tensors with fewer weights than this dense.", low=0)

    def validate(self) -> None:
        """Raise `ConfigError` where the options contradict each other."""
        if self.initial_sparsity > self.sparsity:
            raise self._error("initial_sparsity", f"must not exceed sparsity = {self.sparsity}")
        if self.schedule == "one_shot" and self.initial_sparsity:
            raise self._error("initial_sparsity", "must be 0 with schedule one_shot, which goes to sparsity at once")
