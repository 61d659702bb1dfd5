"""Where averages are written: one state dict, of models or of adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shared_core.checkpoint_formats import ADAPTER, Ingredient
from shared_core.errors import ConfigError
from shared_core.soup.adapters import AdapterWeights, average_adapters
from shared_core.soup.averaging import Candidate, copy_finite_


class AdapterCandidate:
    """Candidates of a soup of models, as `averaging.Candidate`: one state dict takes every average of adapters.

    Args:
        rank: Cut every average to this rank.
        after_average: Called with the state dict each time that it was written.
    """

    def __init__(self, rank: int | None, after_average: Callable[[dict[str, Tensor]], None] | None) -> None:
        self._rank, self._after = rank, after_average
        self._members: list[tuple[Ingredient, float]] = []
        self.state_dict = AdapterWeights()

    def write_single(self, ingredient: Ingredient) -> str | None:
        """Write one adapter as it is; return the name of a tensor with a NaN or an infinity, if there is one."""
        self.state_dict.clear()
        self.state_dict.config, self.state_dict.errors, self.state_dict.error = dict(ingredient.config), {}, 0.0
        for key in (*ingredient.specs, *ingredient.ties):
            self.state_dict[key] = ingredient.tensor(key).clone()
        ingredient.close()
        self._written()
        return next((key for key, value in self.state_dict.items() if not copy_finite_(None, value)), None)

    def begin_mean(self, best: Ingredient, weight: float = 1.0) -> None:
        """Start from the best adapter, whose dtypes and config the soup takes."""
        # No running mean: a product of stacked factors cannot be updated in place, so the members are kept and read
        # again.
        self._members = [(best, weight)]

    def write_mean(self) -> None:
        """Write the mean of the members accepted so far; of one, itself."""
        self._write(self._members)

    def write_average(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Write what the mean would be with one more member."""
        self._write([*self._members, (ingredient, weight)])

    def accept(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Make an adapter a member."""
        self._members.append((ingredient, weight))

    def _write(self, members: list[tuple[Ingredient, float]]) -> None:
        if len(members) == 1:
            self.write_single(members[0][0])
        else:
            average_adapters(members, self._rank, self.state_dict)
            self._written()

    def _written(self) -> None:
        if self._after is not None:
            self._after(self.state_dict)


def candidate_for(
    ingredients: Sequence[Ingredient],
    into: dict[str, Tensor] | None,
    after_average: Callable[[dict[str, Tensor]], None] | None,
    rank: int | None,
) -> Candidate | AdapterCandidate:
    """Return where averages of these ingredients are written."""
    if ingredients[0].kind != ADAPTER:
        if rank is not None:
            raise ConfigError("soup", f"rank must be given for adapters only, got {rank!r} for {ingredients[0].kind}s")
        return Candidate(ingredients[0], into, after_average)
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise ConfigError("soup", f"rank must be an integer >= 1, got {rank!r}")
    if into is not None:
        raise ConfigError("soup", "into must be None for adapters, whose averages have other ranks", "leave it out")
    return AdapterCandidate(rank, after_average)
