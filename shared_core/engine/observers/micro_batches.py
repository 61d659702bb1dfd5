"""Means over the micro-batches of a step: of positions, for a loop that does not know their count, and of figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def mean_over_micro_batch(total: Tensor, count: Tensor | int) -> Tensor:
    """Return ``total / count``, or 0 if the count is 0: the normalizer of a trainer that averages micro-batches.

    Args:
        total: Sum over the counted positions.
        count: Number of positions: a number, or an integer tensor with one element.
    """
    if not isinstance(count, Tensor):
        # max(…, 1): the total is 0 if the count is 0.
        return total / max(count, 1)
    # The count stays on its device. 16 bits would round it.
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    return (wide / count.reshape(()).to(total.device).clamp(min=1)).to(total.dtype)


class MicroBatchMeans:
    """Averages over one micro-batch at a time, and warns once if those of a step have different numbers of positions.

    Args:
        front_end: Name of the front end.

    Example:
        >>> import torch
        >>> means, counts = MicroBatchMeans("hf"), []
        >>> for total, count in ((6.0, 3), (4.0, 1)):
        ...     means.open()
        ...     counts.append(means.normalize(torch.tensor(total), count).item())
        >>> counts, means.close()[:50], means.close()
        ([2.0, 4.0], 'the micro-batches of a step have 1 to 3 positions:', '')
    """

    def __init__(self, front_end: str) -> None:
        self._front_end = front_end
        self._counts: list[Tensor | int] = []
        self._is_new = self._has_warned = False
        self._spread: Tensor | None = None
        """Least and most positions per micro-batch, in the first step in which they differ, if any."""

    def open(self) -> None:
        """Begin a micro-batch. The next average gives its number of positions."""
        self._is_new = True

    def normalize(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return ``total / count``, or 0 if the count is 0.

        Args:
            total: Sum over the counted positions.
            count: Number of positions.
        """
        # Only the first in a micro-batch: all parts of a loss average over the same positions.
        if self._is_new:
            self._counts.append(count)
            self._is_new = False
        return mean_over_micro_batch(total, count)

    def close(self) -> str:
        """End a step. Return the line of `differing` if the counts are on the CPU; do not wait for a GPU."""
        counts, self._counts = self._counts, []
        if self._has_warned or len(counts) < 2:
            return ""
        home = next((count.device for count in counts if isinstance(count, Tensor)), None)
        both = torch.stack(torch.stack([torch.as_tensor(count, device=home).reshape(()) for count in counts]).aminmax())
        seen = self._spread
        self._spread = both if seen is None else torch.where(seen[0] == seen[1], both, seen)
        return self.differing() if both.is_cpu else ""

    def differing(self) -> str:
        """Return a warning the first time that a step's micro-batches have different numbers of positions, else ""."""
        if self._has_warned or self._spread is None:
            return ""
        least, most = self._spread.tolist()
        self._has_warned = least != most
        if not self._has_warned:
            return ""
        other = "; pass normalize= to Session.loss to average differently" if self._front_end == "bare" else ""
        return (
            f"the micro-batches of a step have {least} to {most} positions: each is averaged by itself and has the "
            f"same weight in the terms that techniques add, as in a task loss that is a mean{other}"
        )


class StepMeans:
    """Means of a step's figures over its micro-batches, with the same weights as in the step's gradient.

    Tensors are kept until the means are read, since reading waits for the GPU.

    Example:
        >>> import torch
        >>> means = StepMeans()
        >>> for total, weight in ((6.0, 3.0), (4.0, 2.0)):
        ...     means.add({"loss": torch.tensor(total)}, weight)
        >>> means.close()
        >>> means.add({"loss": torch.tensor(7.0)}, 1.0)
        >>> means.read()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._open: list[tuple[Mapping[str, Tensor | float], Tensor | float]] = []
        self._closed: list[tuple[Mapping[str, Tensor | float], Tensor | float]] = []

    def add(self, figures: Mapping[str, Tensor | float], weight: Tensor | float) -> None:
        """Add a micro-batch.

        Args:
            figures: Its contribution to the step, scaled like the loss.
            weight: The contribution of a figure of 1.
        """
        self._open.append((figures, weight))

    def close(self) -> None:
        """End a step: `read` returns its means from now on. A second call changes nothing."""
        if self._open:
            self._closed, self._open = self._open, []

    def forget(self) -> None:
        """Drop all figures."""
        self._closed, self._open = [], []

    def read(self) -> dict[str, float]:
        """Return the means of the latest step. During the first step, of its micro-batches so far."""
        return {name: total / weight if weight else 0.0 for name, (total, weight) in _sums(self._closed or self._open)}

    def window_state(self) -> dict[str, Any]:
        """Return the sums over the micro-batches of an unfinished step."""
        return {name: [*sums] for name, sums in _sums(self._open)}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `window_state`."""
        self._open = [({name: float(total)}, float(weight)) for name, (total, weight) in state.items()]


def _sums(parts: list[tuple[Mapping[str, Tensor | float], Tensor | float]]) -> list[tuple[str, tuple[float, float]]]:
    """Return the sum of each figure over micro-batches, and the sum of its weights."""
    from shared_core.numerics.deferred_checks import read_together  # loads kernels, so not at the import of `Session`

    values = [value for figures, weight in parts for value in (*figures.values(), weight)]
    there = [value.double() for value in values if isinstance(value, Tensor)]
    read = iter(read_together(there))
    numbers = iter([next(read) if isinstance(value, Tensor) else float(value) for value in values])
    sums: dict[str, tuple[float, float]] = {}
    for figures, _ in parts:
        found = [next(numbers) for _ in figures]
        weight = next(numbers)
        for name, value in zip(figures, found, strict=True):
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + value, weights + weight
    return [*sums.items()]
