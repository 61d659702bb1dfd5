"""Rules that change a loss scale: the exponent of the largest gradient, or a rising floor, scheduled or automatic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_
from shared_core.loss_scaling.config import Pairs, floor_at, parse_floor

if TYPE_CHECKING:
    from shared_core.loss_scaling.config import LossScaleConfig

FORMATS = {"fp16": torch.float16, "fp8_e5m2": torch.float8_e5m2}
_ROUNDING = 1e-9  # log2 of two floats that are exact multiples may miss the integer by some ulp


def largest_exponent(log2_amax: float, format: str, margin: float) -> int:
    """Return log2 of the largest power of two ``S`` with ``amax·S·2^margin <= format maximum``."""
    # ⌊log2(max) - margin - log2(amax)⌋. The tiny addend keeps exact powers of two on the right side.
    return math.floor(math.log2(torch.finfo(FORMATS[format]).max) - margin - log2_amax + _ROUNDING)


class AutoScale:
    """Follows the largest gradient: down at once, up by at most one doubling per step.

    The log2 of the largest gradient is smoothed as a peak that decays: ``p ← max(log2 amax, β·p + (1 − β)·log2 amax)``,
    so the step's own gradient never exceeds the margin. Parameter gradients can be smaller than the activation
    gradients before them. So the first overflow in a row adds the missing bits to the margin,
    and every `growth_interval` good steps remove half of them. Further overflows in a row only lower the
    scale, because a series of bad batches says nothing about the range of good ones.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._format, self._margin, self._smoothing = config.format, config.margin, config.smoothing
        self._backoff, self._interval = config.backoff_factor, config.growth_interval
        self._min_scale, self._init_scale = config.min_scale, config.init_scale
        self._peak: float | None = None
        self._extra = self._good = self._streak = 0

    def next_scale(self, scale: float, amax: float, *, overflowed: bool) -> float:
        """Return the scale of the next step."""
        if overflowed:
            self._streak += 1
            self._good = 0
            exponent = _exponent(scale * self._backoff)
            # The first overflow in a row shows how much too high the prediction was. Further ones only lower it.
            if self._streak == 1 and self._peak is not None:
                self._extra = max(self._extra, largest_exponent(self._peak, self._format, self._margin) - exponent)
            return self._clamped(exponent)
        self._streak = 0
        self._good += 1
        if self._good >= self._interval:
            # A good interval removes half of the extra margin, so that an outlier is forgotten slowly.
            self._good, self._extra = 0, self._extra // 2
        if amax > 0:
            now = math.log2(amax)
            past = now if self._peak is None else self._smoothing * self._peak + (1 - self._smoothing) * now
            # Up at once, down slowly, so that the smoothed peak never lies below the current gradient.
            self._peak = max(now, past)
        if self._peak is None:
            # only zeros so far: perhaps all gradients were flushed
            return max(scale, self._clamped(min(_exponent(self._init_scale), _exponent(scale) + 1)))
        # also after a step of zeros: the scale may be so low that every gradient is flushed
        wanted = largest_exponent(self._peak, self._format, self._margin) - self._extra
        # At most one doubling per step, so that one small gradient cannot make the scale overflow for a normal one.
        return self._clamped(min(wanted, _exponent(scale) + 1))

    def _clamped(self, exponent: int) -> float:
        # 2^127 is the largest power of two in float32.
        return max(math.ldexp(1.0, min(exponent, 127)), self._min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the smoothed peak, the extra margin and the counters."""
        return {"peak": self._peak, "extra": self._extra, "good": self._good, "streak": self._streak}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; an empty state starts over."""
        if state:
            self._peak = state["peak"]
            self._extra, self._good, self._streak = state["extra"], state["good"], state["streak"]


def _exponent(scale: float) -> int:
    """Return floor(log2(scale)) of a finite scale > 0, exactly."""
    return math.frexp(scale)[1] - 1


# The published schedule first lifts the floor to 8192 with a scale that starts at 65536.
_START = 1 / 8
_STREAKS = 10


class FloorSchedule:
    """The floor of ``(step, floor)`` pairs, without state and independent of losses; base of `AutoFloor`."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    def at(self, step: int) -> float:
        """Return the floor after that many applied steps."""
        return floor_at(self._pairs, step)

    def watch(self, loss: Any) -> None:
        """Look at a micro-batch's loss."""

    def end_step(self, *, skipped: bool, in_a_row: int, scale: float) -> None:
        """Count a step taken or skipped at this scale, the same on all processes, and move the floor if it is time."""

    def state_dict(self) -> dict[str, Any]:
        """Return the floor and the window so far, as plain numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; an empty state starts over."""


class AutoFloor(FloorSchedule):
    """A floor that doubles after each good window of steps, and halves after others.

    A window is good if its mean training loss is below that of the window before and fewer than a given share of its
    steps overflowed. The floor never rises above the current scale, so that it causes no overflow. If steps
    at the floor overflow in a row, it falls within the window, every `patience` steps, so that a floor that is too high
    does not end the run.
    """

    def __init__(self, *, start: float, lowest: float, window: int, overflows: float, patience: int) -> None:
        super().__init__(())
        self._lowest, self._window, self._overflows, self._patience = lowest, window, overflows, patience
        self._value = max(torch.tensor(start).item(), lowest)  # rounded to float32 like the scale
        self._steps = self._skips = 0
        self._sums: Tensor | None = None
        self._mean_before: float | None = None

    def at(self, step: int) -> float:
        """Return the current floor."""
        return self._value

    def watch(self, loss: Any) -> None:
        """Add a micro-batch's loss to the window's mean, on its device, unless it is not one finite number."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        value = loss.detach().float().reshape(())
        finite = value.isfinite()
        if self._sums is None:
            self._sums = value.new_zeros(2)
        self._sums = self._sums.to(value.device)
        # On the loss's device, without a host read, because this runs in every micro-batch.
        self._sums += torch.stack((torch.where(finite, value, 0.0), finite.float()))

    def end_step(self, *, skipped: bool, in_a_row: int, scale: float) -> None:
        """Count a step taken or skipped at this scale, the same on all processes, and move the floor if it is time."""
        self._steps += 1
        self._skips += skipped
        # Many skips in a row at the floor: the floor keeps the scale too high, so lower it.
        if skipped and scale <= self._value and in_a_row % self._patience == 0:
            self._fall()
            self._close(self._mean_before)
        elif self._steps >= self._window:
            mean = self._mean()
            # Rising needs few overflows and a mean loss below the last window's.
            few = self._skips < self._overflows * self._steps
            if few and mean is not None and self._mean_before is not None and mean < self._mean_before:
                self._value = max(min(2 * self._value, scale), self._value)
            elif not few or self._mean_before is not None:
                self._fall()
            self._close(mean)

    def _fall(self) -> None:
        self._value = max(self._value / 2, self._lowest)

    def _close(self, mean: float | None) -> None:
        self._steps = self._skips = 0
        self._sums = None
        self._mean_before = mean

    def _mean(self) -> float | None:
        if self._sums is None:
            return None
        # One collective per window, so that all processes decide by the same sums.
        total, count = all_reduce_(self._sums, "sum").tolist()
        return total / count if count else None

    def state_dict(self) -> dict[str, Any]:
        """Return the floor and the window so far, as plain numbers."""
        return {
            "value": self._value,
            "steps": self._steps,
            "skips": self._skips,
            "sums": None if self._sums is None else self._sums.tolist(),
            "mean_before": self._mean_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; an empty state starts over."""
        if not state:
            return
        self._value = max(float(state["value"]), self._lowest)
        self._steps, self._skips = int(state["steps"]), int(state["skips"])
        self._sums = None if state["sums"] is None else torch.tensor(state["sums"])
        self._mean_before = state["mean_before"]


def make_floor(config: LossScaleConfig) -> FloorSchedule:
    """Return the floor for these options."""
    pairs = parse_floor(config.floor or "auto")
    if pairs != "auto":
        return FloorSchedule(pairs)
    return AutoFloor(
        start=config.init_scale * _START,
        lowest=config.min_scale,
        window=config.floor_window,
        overflows=config.floor_overflows,
        patience=max(config.max_skips // _STREAKS, 1),
    )
