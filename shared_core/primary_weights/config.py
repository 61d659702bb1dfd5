"""The options of primary weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from shared_core.config.options import TechniqueConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrimaryWeightsConfig(TechniqueConfig):
    """Where the bits of an update go that a 16-bit weight cannot hold.

    Example:
        >>> PrimaryWeightsConfig(kind="fp32_copy").telemetry_every
        100
    """

    key: ClassVar[str] = "primary_weights"
    switch: ClassVar[str] = "kind"

    kind: Literal["fp32_copy", "stochastic_rounding"] = option(
        help="what keeps small updates: fp32_copy: a float32 copy of each 16-bit parameter; stochastic_rounding: chance"
    )
    telemetry_every: int = option(
        100, help="applied steps between two counts of updates too small for the 16-bit weight; 0: never", low=0
    )
