"""Monte-Carlo Shapley values: what each unit adds to a value, averaged over the orders in which units may come."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shared_core.errors import ConfigError, TrainingError


def shapley_values(
    value: Callable[[Tensor], float],
    num_units: int,
    *,
    permutations: int,
    generator: torch.Generator | None = None,
    antithetic: bool = False,
    truncate: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return each unit's Shapley value, estimated from random orders, and its standard error.

    ``φ_i = mean over orders of v(those before i and i) − v(those before i)`` (Castro et al. 2009; for pruning Ancona
    et al. 2020, arXiv:2007.05434; truncation: Ghorbani and Zou 2020, arXiv:2002.09815). Unless truncated, the values
    add up to v(all) − v(none) but for rounding. It takes ``permutations · (num_units − 1) + 2`` calls at most.

    Args:
        value: ``value(kept)`` of a bool tensor (num_units,) on the CPU, True = kept: an accuracy or minus a loss. It
            must be a function of `kept` alone.
        num_units: At least 1.
        permutations: Orders to draw, at least 2; with `antithetic` even and at least 4.
        generator: On the CPU; the same seed gives the same values.
        antithetic: Follow each order by its reverse (Mitchell et al. 2022, arXiv:2104.12199): less variance where
            units replace each other. The error is then of pairs.
        truncate: Leave an order once ``|v(all) − v(so far)|`` is at most this share of ``|v(all) − v(none)|``; the
            units that are left get 0 from it. 0: never.

    Returns:
        Two float64 tensors (num_units,).

    Raises:
        ConfigError: If an argument breaks its rule.
        TrainingError: If a value is not finite.

    Example:
        >>> values, error = shapley_values(lambda kept: 2.0 * kept[0] + kept[1], 2, permutations=4)
        >>> values.tolist(), error.tolist()
        ([2.0, 1.0], [0.0, 0.0])
    """
    least = 4 if antithetic else 2
    if num_units < 1:
        raise ConfigError("shapley_values", f"num_units must be at least 1, got {num_units!r}")
    if permutations < least or (antithetic and permutations % 2):
        rule = f"{'even and ' if antithetic else ''}at least {least}"
        raise ConfigError("shapley_values", f"permutations must be {rule}, got {permutations!r}")
    if not 0 <= truncate < 1:
        raise ConfigError("shapley_values", f"truncate must be in [0, 1), got {truncate!r}")

    def checked(kept: Tensor) -> float:
        result = float(value(kept.clone()))
        if not math.isfinite(result):
            raise TrainingError(
                "shapley_values", f"value must be finite, got {result} with {int(kept.sum())} of {num_units} units kept"
            )
        return result

    # The empty and the full coalition begin and end every order: computed once.
    empty, full = checked(torch.zeros(num_units, dtype=torch.bool)), checked(torch.ones(num_units, dtype=torch.bool))
    near = truncate * abs(full - empty)
    orders = torch.zeros(permutations, num_units, dtype=torch.float64)
    order = torch.empty(0, dtype=torch.int64)
    for row, marginal in enumerate(orders):
        # Antithetic: each second order is the reverse of the one before, whose errors partly cancel.
        order = order.flip(0) if antithetic and row % 2 else torch.randperm(num_units, generator=generator)
        kept = torch.zeros(num_units, dtype=torch.bool)
        before = empty
        for place, unit in enumerate(order.tolist()):
            # What is left of this order could add little: its units count as 0, which biases the values.
            if truncate and abs(full - before) <= near:
                break
            kept[unit] = True
            after = full if place == num_units - 1 else checked(kept)
            marginal[unit] = after - before
            before = after
    # A pair is one sample: its two orders are not independent.
    samples = orders.view(-1, 2, num_units).mean(1) if antithetic else orders
    return orders.mean(0), samples.std(0) / math.sqrt(len(samples))
