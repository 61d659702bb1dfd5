"""Criteria from the gradients of complete optimizer steps: first-order Taylor and movement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shared_core.pruning.axes import weight_of
from shared_core.pruning.scorers.scorer import Scorer, saved_tensors, wide
from shared_core.ranks import local_part
from shared_core.sharded import is_sharded, part_of, whole_of


class _StepSums(Scorer):
    """Keeps one sum over steps for each weight, in float32 (float64 for float64), where the weight is.

    Gradients of complete steps are the same on every rank, so there is nothing to reduce; of a weight that FSDP2 shards
    a rank keeps the sum of its own part, and weights are scored one by one.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    _gathered: dict[str, Tensor]
    _saw_nothing: ClassVar[str] = "but no weight had a gradient; look for frozen layers or a detached loss"

    @property
    def ready(self) -> bool:
        """Whether any weight had a gradient in a step."""
        return bool(self._sums)

    def _observe(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], loss_scale: float) -> None:
        for name in self.modules:
            gradient = gradients.get(name)
            if gradient is None:
                continue
            gradient = local_part(gradient.to_dense() if gradient.is_sparse else gradient)
            if is_sharded(weights[name]) and name not in self._placed:
                self._placed[name] = weights[name]
                if name in self._sums:  # resumed
                    self._sums[name] = part_of(self._sums[name].to(gradient.device), weights[name])
            weight = local_part(weights[name].detach())
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(wide(weight), memory_format=torch.contiguous_format)
            self._add_(self._sum(name, weight), wide(weight), wide(gradient))

    def _add_(self, total: Tensor, weight: Tensor, gradient: Tensor) -> None:
        raise NotImplementedError

    def _sum(self, name: str, weight: Tensor) -> Tensor:
        total = self._sums[name]
        if total.device != weight.device:
            total = self._sums[name] = total.to(weight.device)
        return total

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        # a weight without a gradient did nothing for the loss
        return self._mean(self._whole(name).to(weight.device)) if name in self._sums else torch.zeros_like(wide(weight))

    def _whole(self, name: str) -> Tensor:
        return whole_of(self._sums[name], self._placed.get(name))

    def gather(self) -> None:
        """Hold the sums of all ranks, on the CPU."""
        self._gathered = {name: self._whole(name).cpu() for name in self._placed}

    def let_go(self) -> None:
        """Hold this rank's alone."""
        self._gathered.clear()

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        if name not in self._sums:
            return torch.zeros_like(wide(weight).reshape(-1)[where])
        return self._mean(self._sum(name, weight).view(-1)[where])

    def _mean(self, total: Tensor) -> Tensor:
        return total / self.num_observed

    def _forget(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._placed: dict[str, Tensor] = {}
        self._gathered = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, whole, beside what every scorer saves; every rank must call it unless they are gathered."""
        whole = {name: self._gathered[name] if name in self._gathered else self._whole(name) for name in self._sums}
        return {**super().state_dict(), "sums": {name: total.clone() for name, total in whole.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the sums; they move to the weights' devices with the next step."""
        super().load_state_dict(state)
        shapes = {name: weight_of(name, module).shape for name, module in self.modules.items()}
        self._placed = {}
        self._sums = saved_tensors(state, "sums", shapes, f"prune {self.criterion}")


class Taylor(_StepSums):
    """``mean over steps of |w·g|``: what the loss loses with a weight, to first order (Molchanov et al. 2017).

    g is the gradient of a complete optimizer step; |·| is taken of each step, so that steps do not cancel. The mean
    begins again with every `reset` (arXiv:1611.06440, arXiv:1906.10771).
    """

    criterion: ClassVar[str] = "taylor"

    def _add_(self, total: Tensor, weight: Tensor, gradient: Tensor) -> None:
        total.add_((weight * gradient).abs_())


class Movement(_StepSums):
    """``−Σ over all steps of w·g``, signed: weights that grow are kept (Sanh et al. 2020, arXiv:2005.07683).

    The sum goes on through every `reset`, as the paper's does.
    """

    criterion: ClassVar[str] = "movement"
    zero_is_lowest: ClassVar[bool] = False
    keeps_going: ClassVar[bool] = True

    def _add_(self, total: Tensor, weight: Tensor, gradient: Tensor) -> None:
        total.addcmul_(weight, gradient, value=-1)

    def _mean(self, total: Tensor) -> Tensor:
        return total.clone()
