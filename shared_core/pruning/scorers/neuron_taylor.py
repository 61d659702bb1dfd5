"""First-order Taylor of whole units, from their outputs and the gradients of these."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shared_core.pruning.scorers.backward_watch import Call
from shared_core.pruning.scorers.gathered import BackwardScorer
from shared_core.pruning.scorers.layouts import channel_axis, over_outputs
from shared_core.pruning.scorers.scorer import wide


class NeuronTaylor(BackwardScorer):
    """``mean over examples of |mean over positions of a·∂L/∂a|`` of a layer's output units (arXiv:1611.06440, eq. 8).

    a is the output of the layer, before the nonlinearity: where that is piecewise linear through 0 (ReLU), a·∂L/∂a is
    the same after it. Scaling is that of `Fisher`, to the first power; N is counted likewise. Outputs are held as
    copies until backward, since a nonlinearity may overwrite them.

    Args:
        modules: Weight name to its linear or convolutional layer.
        generator: Not used.
        costs: As in `Scorer`.

    Raises:
        ConfigError: If a layer is neither linear nor convolutional.
    """

    criterion: ClassVar[str] = "neuron_taylor"
    needs: ClassVar[frozenset[str]] = frozenset({"activations", "per_example_gradients"})
    zero_is_lowest: ClassVar[bool] = False

    @torch.no_grad()
    def unit_scores(self, name: str, weight: Tensor) -> Tensor:
        """Return one score an output unit: (units,), in the type of scores.

        Raises:
            TrainingError: If nothing was observed.
        """
        self._require_ready()
        units = self._unit_means(name, weight.detach())
        return units if self.costs is None else units / self.costs[name]

    def _keep(self, x: Tensor, output: Tensor) -> Tensor:
        return output.clone()

    def _take(self, name: str, calls: list[Call]) -> None:
        module = self.modules[name]
        products: Tensor | None = None
        places = examples = 0
        for output, gradient in calls:
            axis = channel_axis(module, output)
            product = (wide(output) * wide(gradient)).movedim(axis, -1)
            if axis == 0:
                product = product.unsqueeze(0)  # without a batch axis: one example
            examples = product.shape[0]
            if not product.numel():
                return
            product = product.reshape(examples, -1, product.shape[-1])
            places += product.shape[1]
            products = product.sum(1) if products is None else products + product.sum(1)
        if products is not None:
            self._gather(name, products.abs_().sum(0).double() / max(places, 1), examples)

    def _rescale_(self, window: Tensor, count: int, loss_scale: float) -> None:
        window.mul_(count / loss_scale)

    def _like(self, name: str) -> Tensor:
        weight: Tensor = self.modules[name].weight  # type: ignore[assignment]
        return torch.zeros(self._num_units(name, weight), dtype=torch.float64, device=weight.device)

    def _num_units(self, name: str, weight: Tensor) -> int:
        module = self.modules[name]
        units = getattr(module, "out_features", None) or getattr(module, "out_channels", None)
        return int(units or weight.shape[-1])

    def _unit_means(self, name: str, weight: Tensor) -> Tensor:
        dtype = wide(weight[:0]).dtype
        total = self._total(name, weight)
        if total is None:
            return torch.zeros(self._num_units(name, weight), dtype=dtype, device=weight.device)
        return (total / self._counts[name]).to(dtype)

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        return over_outputs(self.modules[name], self._unit_means(name, weight), weight.shape)
