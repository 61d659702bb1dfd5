"""The options of primary weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from shared_core.config.conflicts import NO_WHOLE_WEIGHTS
from shared_core.config.model_shape import Cost, ModelShape, PlannedRun
from shared_core.config.options import Figure, TechniqueConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrimaryWeightsConfig(TechniqueConfig):
    """Where the bits of an update go that a 16-bit weight cannot hold.

    Example:
        >>> PrimaryWeightsConfig(kind="fp32_copy").telemetry_every
        100
    """

    key: ClassVar[str] = "primary_weights"
    switch: ClassVar[str] = "kind"

    finishes_after: ClassVar[tuple[str, ...]] = ("fp8", "qat")
    conflicts: ClassVar[Mapping[str, str]] = {
        "deepspeed": "DeepSpeed keeps float32 weights beside 16-bit ones by itself (bf16 in its config)",
        **NO_WHOLE_WEIGHTS,
    }
    figures: ClassVar[Mapping[str, Figure]] = {
        "small_updates": Figure("share of updates that 16 bit alone would have lost", in_bar=True)
    }

    kind: Literal["fp32_copy", "stochastic_rounding"] = option(
        help="what keeps small updates: fp32_copy: a float32 copy of each 16-bit parameter; stochastic_rounding: chance"
    )
    telemetry_every: int = option(
        100, help="applied steps between two counts of updates too small for the 16-bit weight; 0: never", low=0
    )

    def memory_costs(self, shape: ModelShape, run: PlannedRun) -> list[Cost]:
        """Return the bytes of moments in float32, and of copies where there are some."""
        extra = (4 - run.weight_bytes) * run.moments
        copy = 4.0 if self.kind == "fp32_copy" else 0.0
        why = "moments in fp32, 4 bytes of a copy with fp32_copy; fp32 gradients in the step"
        held = (copy + extra) * shape.params / run.parts
        return [Cost("primary_weights", held=held, during=4.0 * shape.params / run.parts, why=why)]
