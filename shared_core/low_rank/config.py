"""The options of low-rank training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shared_core.config import TechniqueConfig, option
from shared_core.errors import ConfigError
from shared_core.low_rank.rank_rule import RankRule, parse_rank

MEASURED = ("scaled", "whitened")
"""Decompositions that look at the inputs of layers."""


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(TechniqueConfig):
    """Which layers become products of two smaller ones, of which rank, and what is left at the end.

    Example:
        >>> LowRankConfig(rank="energy:0.9").rule
        RankRule(kind='energy', value=0.9)
    """

    key: ClassVar[str] = "low_rank"
    switch: ClassVar[str] = "rank"

    rank: Any = option(
        flag_type=str,
        help="Rank of the factors: a number (16), a share of the smaller side (0.25), energy:0.95 of each matrix, "
        "budget:0.5 of all parameters, sensitivity:0.5 by measured loss (eff low-rank alone), or a report of eff "
        "low-rank (.json).",
    )
    decomposition: Literal["svd", "scaled", "whitened"] = option(
        "svd",
        help="What the truncation keeps best: the weight (svd), or the output for inputs of these sizes (scaled), or "
        "of these second moments (whitened).",
    )
    calibration_batches: int = option(
        16, help="Batches on which scaled and whitened look at the inputs, and sensitivity at the loss.", low=1
    )
    conv: Literal["auto", "channel", "spatial"] = option(
        "auto",
        help="Convolutions become k x k then 1 x 1 (channel), k x 1 then 1 x k (spatial), or what loses less (auto).",
    )
    force: bool = option(False, help="Also factorise where nothing is saved, up to full rank, which is exact.")
    multiple_of: int = option(
        1, help="Round ranks up to a multiple of this: 8 or 16 for tensor cores, 16 for FP8.", low=1
    )
    merge: bool = option(
        False, help="Multiply the factors at the end: the model keeps its layers; otherwise it stays factorised."
    )
    include: tuple[str, ...] = option((), help="Only modules of these names (globs), types, or first, last.")
    skip: tuple[str, ...] = option(
        ("last",), help="No modules of these names (globs), types, or first, last; by default the head."
    )
    min_size: int = option(4096, help="Leave layers with fewer weights than this alone.", low=0)

    @property
    def rule(self) -> RankRule:
        """What `rank` asks for."""
        return parse_rank(self.rank)

    @property
    def needs_batches(self) -> bool:
        """Whether inputs are looked at."""
        return self.decomposition in MEASURED

    def validate(self) -> None:
        """Refuse a rank that is none, and force where ranks are chosen by what they save."""
        kind = self.rule.kind
        if self.force and kind in ("budget", "sensitivity"):
            raise ConfigError(
                f"low_rank: force must come with a number, a share or energy, got rank {self.rank!r}, which is chosen "
                "by what it saves; leave force out"
            )
