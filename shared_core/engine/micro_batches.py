"""Means over micro-batches: what a loop averages by that does not know how many positions its next step has."""

from __future__ import annotations

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
        self._counts: list[int] = []
        self._is_new = self._is_told = False

    def open(self) -> None:
        """Begin a micro-batch: the first that is averaged from now on tells its positions."""
        self._is_new = True

    def normalise(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return ``total / count``, 0 where nothing counts.

        Args:
            total: A sum over what counts.
            count: How many that were.
        """
        count = int(count)  # on a GPU it is read once
        # The first in a micro-batch: a loss of several parts averages over the same positions.
        if self._is_new:
            self._counts.append(count)
            self._is_new = False
        return mean_over_micro_batch(total, count)

    def close(self) -> tuple[int, int] | None:
        """End a step; return the least and the most positions of its micro-batches, the first time that they differ."""
        counts, self._counts = self._counts, []
        if self._is_told or len(set(counts)) < 2:
            return None
        self._is_told = True
        return min(counts), max(counts)
