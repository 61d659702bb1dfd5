"""How sparsity grows over the steps of a run."""

from __future__ import annotations

from collections.abc import Callable


def _progress(step: int, begin: int, end: int) -> float:
    if step >= end:
        return 1.0
    return (step - begin) / (end - begin) if step > begin else 0.0


def one_shot_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return `final` from `begin` on, `initial` before; `end` plays no part.

    Args:
        step: Applied optimizer steps.
        begin: Step of the only update.
        end: Not used.
        initial: Sparsity before, in [0, 1].
        final: Sparsity from `begin` on, in [0, 1].

    Example:
        >>> one_shot_sparsity(10, begin=10, end=10, initial=0.0, final=0.8)
        0.8
    """
    return final if step >= begin else initial


def linear_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return a sparsity that grows evenly, exactly `initial` at `begin` and `final` at `end`.

    ``s = s_f + (s_0 - s_f)(1 - τ)`` with ``τ = (step - begin) / (end - begin)`` clamped to [0, 1].

    Args:
        step: Applied optimizer steps.
        begin: First step of the schedule.
        end: Last step; not before `begin`.
        initial: Sparsity at and before `begin`, in [0, 1].
        final: Sparsity at and after `end`, in [0, 1].

    Example:
        >>> linear_sparsity(50, begin=0, end=100, initial=0.0, final=0.8)
        0.4
    """
    return _interpolate(initial, final, 1.0 - _progress(step, begin, end))


def cubic_sparsity(step: int, *, begin: int, end: int, initial: float, final: float) -> float:
    """Return a sparsity that grows ever slower, exactly `initial` at `begin` and `final` at `end`.

    ``s = s_f + (s_0 - s_f)(1 - τ)³`` with ``τ = (step - begin) / (end - begin)`` clamped to [0, 1]: much is
    pruned while the network has weights to spare, little when it has few (Zhu and Gupta 2017,
    arXiv:1710.01878, equation 1).

    Args:
        step: Applied optimizer steps.
        begin: First step of the schedule.
        end: Last step; not before `begin`.
        initial: Sparsity at and before `begin`, in [0, 1].
        final: Sparsity at and after `end`, in [0, 1].

    Returns:
        The sparsity, in [0, 1].

    Example:
        >>> cubic_sparsity(50, begin=0, end=100, initial=0.0, final=0.8)
        0.7000000000000001
    """
    remaining = 1.0 - _progress(step, begin, end)
    # products, not a power: each is rounded correctly, so the sparsity never falls from one step to the next
    return _interpolate(initial, final, remaining * remaining * remaining)


def _interpolate(initial: float, final: float, remaining: float) -> float:
    return initial if remaining == 1.0 else final + (initial - final) * remaining


SCHEDULES: dict[str, Callable[..., float]] = {
    "one_shot": one_shot_sparsity,
    "linear": linear_sparsity,
    "cubic": cubic_sparsity,
}
"""By name: functions of ``(step, *, begin, end, initial, final)``."""


def update_is_due(step: int, *, begin: int, end: int, every: int) -> bool:
    """Return whether masks are recomputed after `step`: each `every` steps from `begin`, and at `end`.

    Example:
        >>> [step for step in range(12) if update_is_due(step, begin=2, end=9, every=4)]
        [2, 6, 9]
    """
    return begin <= step <= end and ((step - begin) % every == 0 or step == end)
