"""Uniform and weighted averages of checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup.averaging import non_finite_tensor
from shared_core.soup.candidates import candidate_for
from shared_core.soup.ingredients import Source, open_ingredients
from shared_core.soup.scoring import not_finite


@dataclass(frozen=True)
class Average:
    """The mean of ingredients, and which ones it is of."""

    state_dict: dict[str, Tensor]
    ingredients: list[str]
    """Names of the members."""
    weights: list[float]
    """The weight of each member."""
    left_out: dict[str, str]
    """The names of the others, and why."""


def uniform_soup(
    ingredients: Sequence[Source],
    weights: Sequence[float] | None = None,
    *,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
    rank: int | None = None,
) -> dict[str, Tensor]:
    r"""Return the state dict of the mean of all ingredients, ``sum(w_i x_i) / sum(w_i)``, accumulated in float32.

    Integers, booleans and dtypes come from the first ingredient. One with a NaN or an infinity is left out
    with a warning.

    Args:
        ingredients: Paths (see `open_ingredient`) or state dicts.
        weights: One number >= 0 for each, for example the example counts of federated averaging; all 1 by default.
        after_average: Called with the result, to change it in place.
        into: Tensors to write the result into; by default new ones.
        rank: Cut averages of adapters to this rank by SVD; one alone stays as it is. See `AdapterWeights.errors`.

    Raises:
        CheckpointError: If an ingredient cannot be read or does not belong with the others, or none is finite.
        ConfigError: If there is not one weight for each ingredient, one is negative or not finite, or all are 0.

    Source: Wortsman et al., 2022, arXiv:2203.05482; weights: McMahan et al., 2017, arXiv:1602.05629.

    Example:
        >>> import torch
        >>> clients = [{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}]
        >>> uniform_soup(clients)["w"], uniform_soup(clients, weights=[1, 3])["w"]
        (tensor([2.]), tensor([3.]))
    """
    found = average_of(ingredients, weights, after_average=after_average, into=into, rank=rank)
    for name, reason in found.left_out.items():
        warnings.warn(f"soup: {name} is {reason}", stacklevel=2)
    return found.state_dict


def average_of(
    ingredients: Sequence[Source],
    weights: Sequence[float] | None = None,
    *,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
    rank: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Average:
    """Return what `uniform_soup` does, with the names of the members and of those that were left out.

    `progress` is called with (files read, files to read): each is read twice, once to look for what is not finite.
    """
    opened = open_ingredients(ingredients)
    check_weights(weights, len(opened))
    candidate = candidate_for(opened, into, after_average, rank)
    shares = [1.0] * len(opened) if weights is None else [float(weight) for weight in weights]
    members, left_out = [], {}
    for number, (item, share) in enumerate(zip(opened, shares, strict=True), start=1):
        progress(number, 2 * len(opened))
        # Checked before the mean starts: a NaN could not be taken out again.
        bad = non_finite_tensor(item)
        if bad is not None:
            left_out[item.name] = not_finite(bad)
        elif share > 0:
            members.append((item, share))
    if not members:
        raise CheckpointError(
            "soup",
            "at least one ingredient must have finite weights and a weight above 0, got "
            + ("; ".join(f"{name} {reason}" for name, reason in left_out.items()) or "none"),
        )
    candidate.begin_mean(*members[0])
    for number, (item, share) in enumerate(members, start=1):
        if number > 1:
            candidate.accept(item, share)
        progress(len(opened) + number, len(opened) + len(members))
    candidate.write_mean()
    names, of_members = [item.name for item, _ in members], [share for _, share in members]
    return Average(candidate.state_dict, names, of_members, left_out)


def check_weights(weights: Sequence[float] | None, count: int) -> None:
    """Raise `ConfigError` unless there is one weight >= 0 for each of `count` ingredients, and one above 0."""
    if weights is None:
        return
    if len(weights) != count:
        raise ConfigError("soup", f"weights must be one for each of {count} ingredients, got {len(weights)}")
    for weight in weights:
        if isinstance(weight, bool) or not (math.isfinite(weight) and weight >= 0):
            raise ConfigError("soup", f"weights must be finite numbers >= 0, got {weight!r}")
    if not any(weight > 0 for weight in weights):
        raise ConfigError("soup", "weights must not all be 0")
