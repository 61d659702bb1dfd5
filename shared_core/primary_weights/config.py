"""The options of primary weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from shared_core.config.conflicts import NO_WHOLE_WEIGHTS
from shared_core.config.options import Figure, TechniqueConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrimaryWeightsConfig(TechniqueConfig):
    """Options of primary weights: how to keep the bits of an update that a 16-bit weight cannot hold.

    Example:
        >>> PrimaryWeightsConfig(kind="fp32_copy").telemetry_every
        100
    """

    key: ClassVar[str] = "primary_weights"
    switch: ClassVar[str] = "kind"

    finishes_after: ClassVar[tuple[str, ...]] = ("fp8", "qat")
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "some weights are sharded and others whole, but copies and moments support only one of the "
        "two; load the model in float32, or use DDP or FSDP version 2",
        "deepspeed": "DeepSpeed already keeps float32 weights for 16-bit ones (bf16 in its config)",
        **NO_WHOLE_WEIGHTS,
    }
    figures: ClassVar[Mapping[str, Figure]] = {
        "small_updates": Figure("share of updates that 16 bit alone would have lost", in_bar=True)
    }

    kind: Literal["fp32_copy", "stochastic_rounding", "kahan"] = option(
        help="what keeps small updates: fp32_copy: a float32 copy of each 16-bit parameter; stochastic_rounding: "
        "chance; kahan: what rounding loses, in bfloat16"
    )
    state_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        help="gradients and the optimizer's moments between steps: float32, or the bfloat16 of the weights, moments "
        "rounded stochastically",
        only_with={"kind": ("stochastic_rounding", "kahan")},
    )
    telemetry_every: int = option(
        100, help="applied steps between two counts of updates too small for the 16-bit weight; 0: never", low=0
    )
