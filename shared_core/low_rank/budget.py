"""Ranks that share out a budget: each parameter goes where it helps most."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from shared_core.errors import ConfigError

Point = tuple[int, float]
"""(parameters, what they are worth)."""


def share_out(choices: Mapping[str, Sequence[Point]], budget: int) -> dict[str, int]:
    """Return which choice each layer gets so that the worth of all is greatest within a budget of parameters.

    Goes along the upper concave hulls of the layers' points by falling worth per parameter. Where the budget is spent
    to the last parameter of a hull's step that is the optimum; between two such budgets it falls short of it by less
    than one step.

    Args:
        choices: For each layer its points, costs rising strictly; the first is the least that it can have.
        budget: Parameters, all layers together.

    Returns:
        The index of the point of each layer.

    Raises:
        ConfigError: If the first points already cost more.

    Example:
        >>> share_out({"a": [(1, 0.5), (2, 0.9), (3, 1.0)], "b": [(1, 0.2), (2, 0.8)]}, 4)
        {'a': 1, 'b': 1}
    """
    taken = dict.fromkeys(choices, 0)
    left = budget - sum(points[0][0] for points in choices.values())
    if left < 0:
        raise ConfigError(
            f"low_rank: budget must hold rank 1 of every layer, {budget - left} parameters, got {budget}; raise it"
        )
    steps = [
        ((points[end][1] - points[start][1]) / (points[end][0] - points[start][0]), name, start, end)
        for name, points in choices.items()
        for start, end in _hull(points)
    ]
    # the sort is stable: of equal steps, the earlier layer's comes first
    for _, name, start, end in sorted(steps, key=lambda step: -step[0]):
        cost = choices[name][end][0] - choices[name][start][0]
        if taken[name] == start and cost <= left:
            taken[name], left = end, left - cost
    return taken


def _hull(points: Sequence[Point]) -> list[tuple[int, int]]:
    """Return the steps of the upper concave hull, as pairs of indices, up to the point that is worth most."""
    corners = [0]
    for index in range(1, len(points)):
        while len(corners) > 1 and _slope(points, corners[-1], index) >= _slope(points, corners[-2], corners[-1]):
            corners.pop()
        corners.append(index)
    return [(start, end) for start, end in itertools.pairwise(corners) if _slope(points, start, end) > 0]


def _slope(points: Sequence[Point], start: int, end: int) -> float:
    return (points[end][1] - points[start][1]) / (points[end][0] - points[start][0])
