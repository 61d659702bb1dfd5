"""When masks change in a run, and how sparsity grows.

All schedule functions take the arguments of `linear_sparsity`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared_core.engine.plan import Event, every
from shared_core.engine.technique import Context
from shared_core.pruning.config import PruneConfig


@dataclass(frozen=True)
class Schedule:
    """The steps at which masks are made, and the sparsity at each. Create it with `resolve`."""

    config: PruneConfig
    begin: int = 0
    """Step of the first update."""
    end: int = 0
    """Step of the last update."""

    @classmethod
    def resolve(cls, config: PruneConfig, context: Context) -> Schedule:
        """Return the schedule of a run."""
        end = config.end if config.updates_until_end else config.begin
        first, last = context.resolve_range(config.begin, end, "prune")
        if config.needs_batches:
            # Gradients, units and costs are known after the first step at the earliest.
            first, last = max(1, first), max(1, last)
        return cls(config, first, last)

    def is_due(self, step: int) -> bool:
        """Return True if masks are made after `step`: every `every` steps from `begin`, and at `end`."""
        on_time = (step - self.begin) % self.config.every == 0 or step == self.end
        return self.begin <= step <= self.end and on_time

    def sparsity(self, step: int, final: float) -> float:
        """Return the sparsity after `step` for a final sparsity of `final`."""
        config = self.config
        # A layer whose own sparsity is below the common start begins and stays at its own.
        initial = min(config.initial_sparsity, final)
        grown: Callable[..., float] = functools.partial(iterative_sparsity, every=config.every)
        grown = SCHEDULES.get(config.schedule, grown)
        return grown(step, begin=self.begin, end=self.end, initial=initial, final=final)

    def events(self, own: Mapping[str, float]) -> list[Event]:
        """Return what happens when."""
        config = self.config
        shares = ", ".join([f"sparsity {config.sparsity:g}", *(f"{name} {share:g}" for name, share in own.items())])
        if not config.updates_until_end:
            return [(self.begin, f"masks are made once, {shares}, and kept until the end")]
        growth = f"{config.schedule} from {config.initial_sparsity:g}" if config.schedule != "one_shot" else "at once"
        moving = f"; {config.dynamic} moves them" if config.dynamic != "none" else ""
        return [
            (self.begin, f"first masks, sparsity grows ({growth}), new masks {every(config.every)}{moving}"),
            (self.end, f"last masks, {shares}, kept until the end"),
        ]


def _progress(step: int, begin: int, end: int) -> float:
    # Exactly 1.0 and 0.0 at the ends, without rounding.
    if step >= end:
        return 1.0
    return (step - begin) / (end - begin) if step > begin else 0.0


def one_shot_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return `final` from `begin` on and `initial` before. `end` is ignored.

    Args: See `linear_sparsity`.

    Example:
        >>> one_shot_sparsity(10, begin=10, end=10, initial=0.0, final=0.8)
        0.8
    """
    return final if step >= begin else initial


def linear_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return a sparsity that grows linearly, exactly `initial` at `begin` and `final` at `end`.

    ``s = s_f + (s_0 - s_f)(1 - τ)`` with ``τ = (step - begin) / (end - begin)`` clamped to [0, 1].

    Args:
        step: Applied optimizer steps.
        begin: First step of the schedule.
        end: Last step, not before `begin`.
        initial: Sparsity at and before `begin`, in [0, 1]. Below 1 for exponential and iterative.
        final: Sparsity at and after `end`, with the same range.

    Example:
        >>> linear_sparsity(50, begin=0, end=100, initial=0.0, final=0.8)
        0.4
    """
    return _interpolate(initial, final, 1.0 - _progress(step, begin, end))


def cubic_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return a sparsity that grows fast first and slowly at the end, exactly `initial` at `begin` and `final` at `end`.

    ``s = s_f + (s_0 - s_f)(1 - τ)³`` with ``τ = (step - begin) / (end - begin)`` clamped to [0, 1]: prune much while
    the network has redundant weights, and little when few are left (Zhu and Gupta 2017,
    arXiv:1710.01878, equation 1).

    Args: See `linear_sparsity`.

    Example:
        >>> cubic_sparsity(50, begin=0, end=100, initial=0.0, final=0.8)
        0.7000000000000001
    """
    # Zhu and Gupta, 2017: s_f + (s_i - s_f) (1 - t)³
    remaining = 1.0 - _progress(step, begin, end)
    # Products instead of a power: each is correctly rounded, so the sparsity never falls between steps.
    return _interpolate(initial, final, remaining * remaining * remaining)


def cosine_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return a sparsity that grows slowly, then fast, then slowly, exactly `initial` at `begin` and `final` at `end`.

    ``s = s_f + (s_0 - s_f)(1 + cos πτ)/2`` with ``τ = (step - begin) / (end - begin)`` clamped to [0, 1].

    Args: See `linear_sparsity`.

    Example:
        >>> round(cosine_sparsity(50, begin=0, end=100, initial=0.0, final=0.8), 12)
        0.4
    """
    return _interpolate(initial, final, (1.0 + math.cos(math.pi * _progress(step, begin, end))) / 2)


def exponential_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return a sparsity for which the remaining share shrinks by a constant factor per step.

    ``1 - s = (1 - s_0)·((1 - s_f) / (1 - s_0))^τ`` with ``τ = (step - begin) / (end - begin)`` clamped to [0, 1].

    Args: See `linear_sparsity`.

    Example:
        >>> exponential_sparsity(50, begin=0, end=100, initial=0.0, final=0.75)
        0.5
    """
    progress = _progress(step, begin, end)
    if progress in (0.0, 1.0):
        return final if progress else initial
    # The density falls geometrically: (1 - s_i) ((1 - s_f) / (1 - s_i))^t.
    sparsity = 1.0 - (1.0 - initial) * math.pow((1.0 - final) / (1.0 - initial), progress)
    return min(max(sparsity, initial), final)  # rounding must not overshoot, or sparsity would fall at the end


def iterative_sparsity(step: int, *, begin: int, end: int, initial: float, final: float, every: int) -> float:
    """Return a sparsity that prunes the same share of the remaining weights at each update, first at `begin`.

    With n updates (at ``begin``, every `every` steps, and at ``end``) the remaining share after update j of n is
    ``(1 - s_0)·((1 - s_f) / (1 - s_0))^(j/n)`` (iterative pruning, Han et al. 2015, arXiv:1506.02626).

    Args: See `linear_sparsity`; `every`: steps between updates, at least 1.

    Example:
        >>> [iterative_sparsity(step, begin=0, end=10, initial=0.0, final=0.75, every=10) for step in (0, 9, 10)]
        [0.5, 0.5, 0.75]
    """
    if step < begin:
        return initial
    # ceil((end - begin) / every) intervals, plus the update at begin.
    num_updates = -((begin - end) // every) + 1
    update = num_updates if step >= end else (step - begin) // every + 1
    return exponential_sparsity(update, begin=0, end=num_updates, initial=initial, final=final)


def _interpolate(initial: float, final: float, remaining: float) -> float:
    return initial if remaining == 1.0 else final + (initial - final) * remaining


SCHEDULES: dict[str, Callable[..., float]] = {
    "one_shot": one_shot_sparsity,
    "linear": linear_sparsity,
    "cubic": cubic_sparsity,
    "cosine": cosine_sparsity,
    "exponential": exponential_sparsity,
}
"""By name: functions of ``(step, *, begin, end, initial, final)``. `iterative_sparsity` also takes `every`."""
