"""Means over micro-batches: what a loop averages by that does not know how many positions its next step has."""

from __future__ import annotations

import torch
from torch import Tensor

from shared_core.engine.technique import mean_over_micro_batch


class MicroBatchMeans:
    """Averages over one micro-batch at a time, and remembers how many positions those of a step counted.

    Example:
        >>> import torch
        >>> means, counts = MicroBatchMeans(), []
        >>> for total, count in ((6.0, 3), (4.0, 1)):
        ...     means.open()
        ...     counts.append(means.normalise(torch.tensor(total), count).item())
        >>> counts, means.close(), means.close()
        ([2.0, 4.0], (1, 3), None)
    """

    def __init__(self) -> None:
        self._counts: list[Tensor | int] = []
        self._is_new = self._is_told = False
        self._spread: Tensor | None = None
        """Least and most positions of a step's micro-batches, of the first step in which they differ, if any does."""

    def open(self) -> None:
        """Begin a micro-batch: the first that is averaged from now on tells its positions."""
        self._is_new = True

    def normalise(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return ``total / count``, 0 where nothing counts.

        Args:
            total: A sum over what counts.
            count: How many that were.
        """
        # The first in a micro-batch: a loss of several parts averages over the same positions.
        if self._is_new:
            self._counts.append(count)
            self._is_new = False
        return mean_over_micro_batch(total, count)

    def close(self) -> tuple[int, int] | None:
        """End a step; return what `differing` does, of counts that are at hand: others are not waited for."""
        counts, self._counts = self._counts, []
        if self._is_told or len(counts) < 2:
            return None
        home = next((count.device for count in counts if isinstance(count, Tensor)), None)
        both = torch.stack(torch.stack([torch.as_tensor(count, device=home).reshape(()) for count in counts]).aminmax())
        seen = self._spread
        self._spread = both if seen is None else torch.where(seen[0] == seen[1], both, seen)
        return self.differing() if both.is_cpu else None

    def differing(self) -> tuple[int, int] | None:
        """Return the least and the most positions of a step's micro-batches, the first time that they differ."""
        if self._is_told or self._spread is None:
            return None
        least, most = self._spread.tolist()
        self._is_told = least != most
        return (least, most) if self._is_told else None
