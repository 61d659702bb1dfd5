"""Options of a quantization study: corrections and measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from shared_core.config.options import Options, option


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Options):
    """Corrections and measurements of a `QuantizationStudy`.

    Raises:
        ConfigError: If an option breaks its rule.

    Example:
        >>> StudyOptions(attack_eps="1/4,0.1").attack_settings()
        {'eps': [0.1, 0.25], 'low': 0.0, 'high': 1.0, 'steps': 20}
    """

    key: ClassVar[str] = "quantize"
    needs: ClassVar = {"all_layers": ("largest_loss",), "probes": ("sensitivity",)}
    without: ClassVar = {"average_bits": ("largest_loss",), "all_layers": ("keep_sensitive",)}

    batches: int = option(100, "Maximum number of calibration batches.")
    equalize: bool = option(False, "Equalize the ranges of channels first.")
    correct_bias: bool = option(False, "Correct the biases by the mean error.")
    kv_cache: str | None = option(
        None,
        "fp8: measure scales for an FP8 key-value cache, which eff export --format compressed-tensors writes for vLLM.",
    )
    mode: Literal["max", "min"] = option("max", "Whether larger (max) or smaller (min) quality is better.")
    accept: str = option(
        "default",
        "Largest quality loss, as a share of the float model's: a number, default (0.5 % acceptable, over 1 % not) or "
        "recommender (0.01 %).",
    )
    keep_sensitive: bool = option(
        False,
        "Keep layers in float that often lose most: first, last, depthwise convolutions, and those that read the "
        "output of softmax, tanh, sigmoid or GELU. With --average-bits they get 8 bits.",
    )
    sensitivity: Literal["hessian", "kl", "rmse"] | None = option(
        None,
        "Measure the cost of each layer alone: hessian (curvature of the loss times the error of the weights, "
        "arXiv:1911.03852), or kl or rmse of the output.",
    )
    probes: int = option(50, "Random vectors with which hessian estimates the curvature.", low=2)
    average_bits: float | None = option(
        None,
        "Give each layer's weights 3, 4 or 8 bits, at most this many on average, at the least total cost by "
        "--sensitivity (default rmse).",
        low=3,
        high=8,
    )
    largest_loss: float | None = option(
        None, "Quantize as many layers as possible while --eval loses at most this, in its own unit.", low=0
    )
    all_layers: bool = option(False, "Also quantize layers kept in float by default, such as first and last.")
    attack_eps: str = option(
        "2/255,8/255", "Strengths of the attack: largest change of an input value, such as 2/255,0.03."
    )
    attack_range: str = option("0,1", "Smallest and largest input value as LOW,HIGH, or none.")
    attack_steps: int = option(20, "Steps of PGD, each of 2.5·eps/steps.", low=1)

    def validate(self) -> None:
        """Raise an error for invalid strengths and bounds of attacks, and for probes that nothing uses."""
        self.attack_settings()
        rule = f"{self.named('probes')[1]} only affects sensitivity hessian, got {self.sensitivity}"
        self.require(self.sensitivity == "hessian" or not self.is_given("probes"), rule, "leave it out")

    def attack_settings(self) -> dict[str, Any]:
        """Return ``eps``, ``low``, ``high`` and ``steps`` of the attacks."""
        try:
            strengths = sorted({float(Fraction(part.strip())) for part in self.attack_eps.split(",")})
        except (ValueError, ZeroDivisionError):
            strengths = []
        if not strengths or strengths[0] <= 0:
            raise self._error("attack_eps", "must be numbers above 0 such as 2/255,0.03")
        bounds: list[float | None]
        try:
            bounds = [None, None] if self.attack_range == "none" else [*map(float, self.attack_range.split(","))]
            low, high = bounds
        except ValueError:
            low, high = math.nan, math.nan
        if low is not None and high is not None and not low < high:
            raise self._error("attack_range", "must be LOW,HIGH such as 0,1, or none")
        return {"eps": strengths, "low": low, "high": high, "steps": self.attack_steps}
