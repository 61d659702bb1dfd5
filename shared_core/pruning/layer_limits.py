"""How much of one layer may go, so that none is left with next to nothing while others stay dense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_NAMED = 5
NEARLY_EMPTY = 0.99
"""From this share on a layer is named."""
# of products such as 0.29 * 100, which lies below 29
_ROUNDING = 1e-6


def layer_limits(most: float, sparsity: float, sizes: Sequence[int]) -> list[int]:
    """Return how many elements of each layer may go.

    Of n elements ``floor(most·n)``, but never the last one. Where rounding keeps all together from reaching `sparsity`
    (that of a few heads, or `most` equal to it) ``ceil(sparsity·n)`` of each.

    Args:
        most: Largest share of one layer, at least `sparsity`.
        sparsity: Share of all elements that is asked for.
        sizes: Of the layers, in weights, tiles or units.

    Example:
        >>> layer_limits(0.9, 0.5, [64, 10, 4, 1])
        [57, 9, 3, 0]
        >>> layer_limits(0.5, 0.5, [5, 5])
        [3, 3]
    """
    limits = [max(min(math.floor(most * size + _ROUNDING), size - 1), 0) for size in sizes]
    if sum(limits) >= round(sparsity * sum(sizes)):
        return limits
    rounded_up = (min(math.ceil(sparsity * size - _ROUNDING), size - 1) for size in sizes)
    return [max(pair) for pair in zip(limits, rounded_up, strict=True)]


def at_limit(most: float, sparsity: float, layers: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the names of the layers that have given all that they may.

    Args:
        most: As in `layer_limits`.
        sparsity: As there.
        layers: By name how many elements it has, and how many of them are gone.

    Example:
        >>> at_limit(0.9, 0.5, {"first": (10, 1), "last": (10, 9)})
        ['last']
    """
    limits = layer_limits(most, sparsity, [size for size, _ in layers.values()])
    pairs = zip(layers.items(), limits, strict=True)
    return [name for (name, (_, gone)), limit in pairs if 0 < limit <= gone]


def limit_notes(where: str, most: float, capped: Sequence[str], weights: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return what a user should know of layers that lost most of what they had, a line each.

    Args:
        where: The technique that tells it.
        most: Largest share of one layer that may go.
        capped: Layers that reached it.
        weights: By name how many weights it has, and how many of them are gone.

    Example:
        >>> limit_notes("prune", 0.98, ["fc.weight"], {"fc.weight": (6400, 6272), "out.weight": (6400, 6399)})[1]
        'prune: more than 99 % of these layers is gone: out.weight (6,399 of 6,400)'
    """
    notes = []
    if capped:
        notes.append(
            f"{where}: {_listed(capped)} reached {100 * most:.4g} %, the most that one layer may lose "
            "(max_layer_sparsity); others gave what was missing"
        )
    nearly = {name: counts for name, counts in weights.items() if counts[1] > NEARLY_EMPTY * counts[0]}
    if nearly:
        named = [f"{name} ({gone:,} of {size:,})" for name, (size, gone) in nearly.items()]
        notes.append(f"{where}: more than {100 * NEARLY_EMPTY:g} % of these layers is gone: {_listed(named)}")
    return notes


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
