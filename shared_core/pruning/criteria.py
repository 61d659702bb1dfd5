"""What each weight is worth: the lowest scores are pruned first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from eff_kernels.pruning import rank_below_
from torch import Tensor


def magnitude(weight: Tensor) -> Tensor:
    """Return ``|w|`` as float32 (float64 for float64), a new tensor (Han et al. 2015, arXiv:1506.02626).

    Example:
        >>> magnitude(torch.tensor([-2.0, 0.5]))
        tensor([2.0000, 0.5000])
    """
    weight = weight.detach()
    return weight.abs() if weight.dtype == torch.float64 else weight.float().abs()


CRITERIA: dict[str, Callable[[Tensor], Tensor]] = {"magnitude": magnitude}
"""By name: functions of a weight that return new float32 or float64 scores of its shape."""


class WeightScores(Sequence[Tensor]):
    """The scores of several weights, computed on access, with what is pruned already below everything.

    Args:
        weights: By name, in the order in which ties are broken.
        masks: The masks so far, by the same names; empty before the first update.
        criterion: A key of `CRITERIA`.
    """

    def __init__(self, weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], criterion: str) -> None:
        self.names = list(weights)
        self.tensors = list(weights.values())
        """What the scores are of: their shapes and devices, without computing a score."""
        self._weights = weights
        self._masks = masks
        self._score = CRITERIA[criterion]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        name = self.names[index]
        scores = self._score(self._weights[name])
        return rank_below_(scores, self._masks[name]) if name in self._masks else scores

    @property
    def floor(self) -> float | None:
        """What pruned weights score where `part` does not rank them lower; None while nothing is pruned."""
        return 0.0 if self._masks else None

    def part(self, index: int, where: slice) -> Tensor:
        """Return a slice of one tensor's flattened scores, a pruned weight's being what its value of 0 scores.

        That is the lowest score there is, so ranking it below live zeros is left to ``self[index]``, which is slower.
        """
        return self._score(self._weights[self.names[index]].detach().reshape(-1)[where])
