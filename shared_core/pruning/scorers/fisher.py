"""The diagonal Fisher criterion: optimal brain damage with per-example gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.pruning.scorers.backward_watch import Call
from shared_core.pruning.scorers.gathered import BackwardScorer
from shared_core.pruning.scorers.per_example import num_examples, squared_gradient_sum
from shared_core.pruning.scorers.scorer import wide


class Fisher(BackwardScorer):
    """``½·w²·F`` with F the mean over examples of their squared gradients (LeCun et al. 1989; arXiv:1801.05787).

    The square of a batch's gradient is not the mean of squares, so each example's gradient is formed, by hooks, during
    the user's own backward. An example is one index of a layer's first axis.

    Scaling rule: an example's gradient is N times what it adds to the unscaled gradient that this rank accumulates, N
    the examples of this rank's step. So the 1/N of a mean over the batch, the division by accumulation steps and the
    loss scale cancel, and 1 × 8 examples score as 4 × 2. A loss that is a sum scores N² times as much; the order is
    the same. Every step joins the ranks' sums: one reduction of the size of the weights.

    Args:
        modules: Weight name to its linear or convolutional layer.
        generator: Not used.
        costs: As in `Scorer`.
        max_elements: Most numbers that one chunk of per-example gradients holds, at least one example's.

    Raises:
        ConfigError: If a layer is neither linear nor convolutional.
    """

    criterion: ClassVar[str] = "fisher"
    needs: ClassVar[frozenset[str]] = frozenset({"per_example_gradients"})

    def __init__(self, modules: Mapping[str, nn.Module], *, max_elements: int = 1 << 24, **common: Any) -> None:
        super().__init__(modules, **common)
        self.max_elements = max_elements

    def fisher(self, name: str, weight: Tensor) -> Tensor:
        """Return F of one weight: the mean of squared per-example gradients, new, 0 where no example came by."""
        total = self._total(name, weight)
        return torch.zeros_like(wide(weight)) if total is None else total / self._counts[name]

    def _keep(self, x: Tensor, output: Tensor) -> Tensor:
        return x

    def _take(self, name: str, calls: list[Call]) -> None:
        module = self.modules[name]
        sums = squared_gradient_sum(module, calls, max_elements=self.max_elements)
        self._gather(name, sums, num_examples(module, calls[0][0]))

    def _rescale_(self, window: Tensor, count: int, loss_scale: float) -> None:
        window.mul_((count / loss_scale) ** 2)

    def _like(self, name: str) -> Tensor:
        weight: Tensor = self.modules[name].weight  # type: ignore[assignment]
        return torch.zeros_like(wide(weight.detach()), memory_format=torch.contiguous_format)

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        return self.fisher(name, weight).mul_(wide(weight).square()).mul_(0.5)

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        part = wide(weight.reshape(-1)[where])
        total = self._total(name, weight)
        if total is None:
            return torch.zeros_like(part)
        return (total.view(-1)[where] / self._counts[name]).mul_(part.square()).mul_(0.5)
