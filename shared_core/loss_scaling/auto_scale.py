"""Auto scaling: the scale that the exponent of the largest gradient allows, instead of waiting for an overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from shared_core.loss_scaling.config import LossScaleConfig

FORMATS = {"fp16": torch.float16, "fp8_e5m2": torch.float8_e5m2}
_ROUNDING = 1e-9  # log2 of two floats that are exact multiples may miss the integer by some ulp


def largest_scale(amax: float, *, format: Literal["fp16", "fp8_e5m2"] = "fp16", margin: float = 2.0) -> float:
    """Return the largest power of two ``S`` with ``amax·S·2^margin <= format maximum``.

    Args:
        amax: Largest magnitude of the unscaled gradients, > 0.
        format: Number format that the scaled gradients must fit into.
        margin: Bits kept free, >= 0.

    Example:
        >>> largest_scale(0.01), 0.01 * 2**20 * 4 <= 65504 < 0.01 * 2**21 * 4
        (1048576.0, True)
    """
    return math.ldexp(1.0, largest_exponent(math.log2(amax), format, margin))


def largest_exponent(log2_amax: float, format: str, margin: float) -> int:
    """Return log2 of the largest power of two that leaves the margin."""
    return math.floor(math.log2(torch.finfo(FORMATS[format]).max) - margin - log2_amax + _ROUNDING)


class AutoScale:
    """Follows the largest gradient: down at once, up by at most one doubling a step.

    The log2 of the largest gradient is smoothed as a peak that decays: ``p ← max(log2 amax, β·p + (1 − β)·log2 amax)``,
    so the step's own gradient never exceeds the margin. Parameter gradients can be smaller than the activation
    gradients behind them; the first overflow of a streak therefore adds bits to the margin, as many as kept the scale
    from fitting, and every `growth_interval` good steps take half of them back. Later overflows of a streak lower the
    scale alone: a storm of bad batches says nothing about the range of good ones.

    Args:
        config: The options ``format``, ``margin``, ``smoothing`` (β), ``backoff_factor``, ``growth_interval``,
            ``init_scale`` and ``min_scale``.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._format, self._margin, self._smoothing = config.format, config.margin, config.smoothing
        self._backoff, self._interval = config.backoff_factor, config.growth_interval
        self._min_scale, self._init_scale = config.min_scale, config.init_scale
        self._peak: float | None = None
        self._extra = self._good = self._streak = 0

    def next_scale(self, scale: float, amax: float, *, overflowed: bool) -> float:
        """Return the scale of the next step.

        Args:
            scale: Scale of this step.
            amax: Largest magnitude of this step's unscaled gradients; read only without overflow.
            overflowed: Whether they held Inf or NaN.
        """
        if overflowed:
            self._streak += 1
            self._good = 0
            exponent = _exponent(scale * self._backoff)
            if self._streak == 1 and self._peak is not None:
                self._extra = max(self._extra, largest_exponent(self._peak, self._format, self._margin) - exponent)
            return self._clamped(exponent)
        self._streak = 0
        self._good += 1
        if self._good >= self._interval:
            self._good, self._extra = 0, self._extra // 2
        if amax > 0:
            now = math.log2(amax)
            past = now if self._peak is None else self._smoothing * self._peak + (1 - self._smoothing) * now
            self._peak = max(now, past)
        if self._peak is None:
            # nothing but zeros so far: perhaps all was flushed
            return max(scale, self._clamped(min(_exponent(self._init_scale), _exponent(scale) + 1)))
        # of a step of zeros too: after a storm the scale may be so low that every gradient is flushed
        wanted = largest_exponent(self._peak, self._format, self._margin) - self._extra
        return self._clamped(min(wanted, _exponent(scale) + 1))

    def _clamped(self, exponent: int) -> float:
        return max(math.ldexp(1.0, min(exponent, 127)), self._min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the smoothed peak, the extra margin and the counters."""
        return {"peak": self._peak, "extra": self._extra, "good": self._good, "streak": self._streak}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; an empty state starts anew."""
        if state:
            self._peak = state["peak"]
            self._extra, self._good, self._streak = state["extra"], state["good"], state["streak"]


def _exponent(scale: float) -> int:
    """Return floor(log2(scale)) of a finite scale > 0, exactly."""
    return math.frexp(scale)[1] - 1
