"""The options of loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared_core.config import TechniqueConfig, option

FLOAT32_MAX = 3.4028234663852886e38
MIN_SCALE = 2.0**-14


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(TechniqueConfig):
    """Options of loss scaling: ``--loss_scale_*`` as flags, ``loss_scale:`` in a recipe.

    Example:
        >>> LossScaleConfig(kind="dynamic").init_scale
        65536.0
    """

    key: ClassVar[str] = "loss_scale"
    switch: ClassVar[str] = "kind"

    kind: Literal["dynamic", "static"] = option(
        help="dynamic: lower the scale on overflow, raise it after growth_interval good steps; static: fixed"
    )
    init_scale: float = option(65536.0, above=0, high=FLOAT32_MAX, help="scale of the first step")
    growth_factor: float = option(2.0, above=1, high=FLOAT32_MAX, help="multiplies the scale when it grows")
    backoff_factor: float = option(0.5, above=0, below=1, help="multiplies the scale after an overflow")
    growth_interval: int = option(2000, low=1, high=2**31 - 1, help="steps without overflow before the scale grows")
    min_scale: float = option(MIN_SCALE, above=0, high=FLOAT32_MAX, help="the scale never falls below this")
    max_skips: int = option(50, low=1, help="skipped steps in a row after which training stops with an error")

    def validate(self) -> None:
        """Check that the scale starts at or above its floor."""
        if not self.init_scale >= self.min_scale:
            raise self._error("init_scale", f"must be at least min_scale, {self.min_scale}")
