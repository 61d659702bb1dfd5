"""The options of quantization-aware training."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from shared_core.config import TechniqueConfig, option
from shared_core.positions import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class QatConfig(TechniqueConfig):
    """How a model learns to live with quantised weights and activations.

    Example:
        >>> QatConfig(scheme="int8", begin="2ep").weight_bits
        8
    """

    key: ClassVar[str] = "qat"
    switch: ClassVar[str] = "scheme"

    scheme: Literal["int8"] = option(
        help="what is quantised how; int8: weights per channel symmetric, activations per tensor asymmetric"
    )
    begin: Position = option(0.0, help="when fake quantisation starts; ranges are observed from the first step")
    freeze_observers: Position = option(1.0, help="when ranges stop following the activations; at least step 1")
    range: Literal["ema"] = option("ema", help="activation ranges: a moving average of each step's minimum and maximum")
    ema_constant: float = option(0.01, help="weight of a new step in the moving average", above=0.0, high=1.0)
    weight_bits: int = option(8, help="bits of a weight code, -(2^(b-1) - 1) to 2^(b-1) - 1", low=2, high=8)
    activation_bits: int = option(8, help="bits of an activation code, -2^(b-1) to 2^(b-1) - 1", low=2, high=8)
    gate: Literal["unrounded", "rounded"] = option(
        "unrounded",
        help="gradient passes where x/s + z is in range, or (torch's ops) where the rounded code is",
    )
    calibration_batches: int = option(
        10, help="training batches for new ranges after weights were replaced, as a soup does", low=1
    )
    include: tuple[str, ...] = option((), help="modules: name patterns, types, first, last; empty: all")
    skip: tuple[str, ...] = option((), help="modules to leave in float: name patterns, types, first, last")
    keep: bool = option(False, help="leave the fake-quantising modules in the model at the end of training")
