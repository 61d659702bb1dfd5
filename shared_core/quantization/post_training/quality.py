"""Judge the cost of quantisation: bytes of each layer, and loss of quality by rules of thumb."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn

from shared_core.config.options import checked
from shared_core.errors import ConfigError
from shared_core.modules.weight_views import as_rows, weights_of
from shared_core.quantization.layers.fake_quant_layers import layer_entry
from shared_core.quantization.post_training.quantize import code_bytes
from shared_core.quantization.ranges.saved_ranges import saved_scheme

RULES: dict[str, tuple[float, float]] = {"default": (0.005, 0.01), "recommender": (0.0001, 0.0001)}
"""Name → (largest loss that is acceptable, largest that is not unacceptable), as shares of the float quality."""

_ROUNDING = 1e-9  # 1 − 0.995 is a hair above 0.005


@dataclass(frozen=True)
class Verdict:
    """The verdict on a loss of quality.

    Attributes:
        loss: Share of the float quality that is lost; negative where quality rose.
        judgement: ``"acceptable"``, ``"borderline"`` or ``"unacceptable"``; ``"unknown"`` where there is no loss.
        rule: By which rule, in words.
    """

    loss: float
    judgement: Literal["acceptable", "borderline", "unacceptable", "unknown"]
    rule: str


def thresholds(accept: str | float) -> tuple[float, float]:
    """Return (largest acceptable loss, largest that is not unacceptable) of a rule's name, or of a number for both.

    Example:
        >>> thresholds("default"), thresholds("0.02")
        ((0.005, 0.01), (0.02, 0.02))
    """
    if accept in RULES:
        return RULES[str(accept)]
    try:
        bound = float(accept)
    except ValueError:
        bound = math.nan
    if not 0 <= bound <= 1:
        raise ConfigError("verdict", f"accept must be {', '.join(RULES)} or a share from 0 to 1, got {accept!r}")
    return bound, bound


def judge_loss(
    before: float, after: float, accept: str | float = "default", mode: Literal["max", "min"] = "max"
) -> Verdict:
    """Return whether a loss of quality is acceptable: ``(before − after)/|before|`` against the rule's bounds.

    By default a loss of up to 0.5 % is acceptable and one of more than 1 % unacceptable; a recommender's is already
    unacceptable above 0.01 %. Between two bounds it is borderline.

    Args:
        before: Quality in float.
        after: Quality of the quantised model, in the same unit.
        accept: As in `thresholds`.
        mode: Whether quality is better when larger or when smaller.

    Raises:
        ConfigError: If an option breaks its rule.

    Example:
        >>> judge_loss(0.98, 0.978).judgement, judge_loss(0.98, 0.978, "recommender").judgement
        ('acceptable', 'unacceptable')
    """
    checked(mode, Literal["max", "min"], "verdict", "mode")
    good, bad = thresholds(accept)
    rule = f"acceptable up to {good:.4%}, unacceptable above {bad:.4%} of the float quality"
    change = before - after if mode == "max" else after - before
    # A quality of 0 has no relative loss.
    if not (math.isfinite(change) and before):
        return Verdict(math.nan, "unknown", rule)
    loss = change / abs(before)
    if loss <= good + _ROUNDING:
        return Verdict(loss, "acceptable", rule)
    return Verdict(loss, "unacceptable" if loss > bad + _ROUNDING else "borderline", rule)


def layer_bytes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return layer → (bytes of its weights in float, bytes of their codes and scales), of quantised layers.

    A weight that two layers share counts in both.

    Example:
        >>> from shared_core.quantization import quantize
        >>> layer_bytes(quantize(nn.Sequential(nn.Linear(64, 10)), "int8_weight"))
        {'0': (2560, 680)}
    """
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        entry = layer_entry(module)
        if entry is None:
            continue
        scheme = saved_scheme(entry, "layer_bytes")
        in_float = codes = 0
        for weight in weights_of(module).values():
            channels, width = as_rows(module, weight.detach()).shape
            in_float += weight.numel() * weight.element_size()
            codes += code_bytes(channels, width, scheme)
        found[name] = in_float, codes
    return found
