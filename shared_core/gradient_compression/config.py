"""The options of gradient compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared_core.config.options import TechniqueConfig, option
from shared_core.config.training_time import Position


@dataclass(frozen=True, kw_only=True)
class CommConfig(TechniqueConfig):
    """In what form the processes of DDP send each other their gradients.

    Example:
        >>> CommConfig(hook="powersgd").rank
        1
    """

    key: ClassVar[str] = "comm"
    switch: ClassVar[str] = "hook"

    hook: Literal["fp16", "bf16", "powersgd"] = option(
        help="Send gradients over processes rounded to 16 bits (fp16, bf16), or as products of low rank (powersgd)."
    )
    rank: int = option(
        1, help="Rank of powersgd's products; more is closer and sends more.", low=1, only_with={"hook": ("powersgd",)}
    )
    begin: Position = option(
        0.1,
        help="First step that powersgd compresses, gradients before it are sent whole: a fraction of the run (0.1), a "
        "step (500) or epochs (2ep).",
        only_with={"hook": ("powersgd",)},
    )
