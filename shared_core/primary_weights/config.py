"""The options of primary weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from shared_core.config.environments import NO_WHOLE_WEIGHTS
from shared_core.config.options import Figure, TechniqueConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrimaryWeightsConfig(TechniqueConfig):
    """Keeps updates that are too small for 16-bit weights.

    Example:
        >>> PrimaryWeightsConfig(kind="fp32_copy").telemetry_every
        100
    """

    about: ClassVar[str] = "Keeps small updates of 16-bit weights."
    key: ClassVar[str] = "primary_weights"
    switch: ClassVar[str] = "kind"

    finishes_after: ClassVar[tuple[str, ...]] = ("fp8", "qat")
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "some weights are split and others whole, and its copies must all be of one kind; load the "
        "model in float32, or use DDP or FSDP2",
        "deepspeed": "DeepSpeed keeps float32 copies of 16-bit weights itself (bf16 in its config)",
        **NO_WHOLE_WEIGHTS,
    }
    figures: ClassVar[Mapping[str, Figure]] = {
        "small_updates": Figure("share of updates that 16-bit weights alone would lose", in_bar=True)
    }

    kind: Literal["fp32_copy", "stochastic_rounding", "kahan"] = option(
        help="how small updates are kept: in float32 copies of the parameters (fp32_copy), by random rounding "
        "(stochastic_rounding), or as bfloat16 rounding errors (kahan)"
    )
    state_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        help="format of gradients and optimizer moments between steps; bfloat16 needs bfloat16 weights, and rounds "
        "moments stochastically",
        only_with={"kind": ("stochastic_rounding", "kahan")},
    )
    telemetry_every: int = option(
        100, help="applied steps between counts of updates too small for 16-bit weights; 0: never", low=0
    )
