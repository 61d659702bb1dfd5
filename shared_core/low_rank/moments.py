"""What layers are given: the second moments of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import TrainingError
from shared_core.low_rank.matrices import input_rows
from shared_core.ranks import all_reduce_


class InputMoments:
    """Sums ``x xᵀ`` over the inputs of layers, or its diagonal, in float64.

    Args:
        layers: The layer and its schemes by name.
        diagonal: Whether correlations are left out.
    """

    def __init__(self, layers: Mapping[str, tuple[Any, tuple[str, ...]]], *, diagonal: bool) -> None:
        self._layers, self._diagonal = layers, diagonal
        self._sums: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def see(self, name: str, inputs: Tensor) -> None:
        """Take inputs of a layer into its sums."""
        layer, schemes = self._layers[name]
        wide = inputs if inputs.dtype == torch.float64 else inputs.float()
        for scheme in schemes:
            rows = input_rows(layer, wide, scheme)
            with torch.autocast(rows.device.type, enabled=False):
                found = (rows.square().sum(0) if self._diagonal else rows.T @ rows).double()
            total = self._sums.get((name, scheme))
            self._sums[name, scheme] = found if total is None else total + found

    def hooks(self) -> list[Any]:
        """Return handles of hooks that show each layer's inputs to `see`."""

        def hook(name: str) -> Callable[..., None]:
            return lambda _, args, kwargs: self.see(name, args[0] if args else next(iter(kwargs.values())))

        return [
            layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, (layer, _) in self._layers.items()
        ]

    def read(self) -> dict[tuple[str, str], Tensor]:
        """Return the sums over all processes by (name, scheme); every process must call it.

        Raises:
            TrainingError: If a layer saw no input, or one that is not finite.
        """
        moments = {}
        for name, (layer, schemes) in self._layers.items():
            for scheme in schemes:
                if (name, scheme) not in self._sums:
                    raise TrainingError(
                        f"low_rank: {name} must be reached by the calibration batches, got no input; leave it out "
                        "with skip, or give other batches"
                    )
                total = all_reduce_(self._sums[name, scheme].to(layer.weight.device), "sum")
                if not bool(total.isfinite().all()):
                    raise TrainingError(f"low_rank: {name} must see finite inputs, got NaN or infinity")
                moments[name, scheme] = total
        return moments


def buffers_kept(model: nn.Module) -> Callable[[], None]:
    """Return a function that sets a model's buffers back to what they are now: batch norms move in train mode."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def restore() -> None:
        for buffer, value in kept:
            buffer.copy_(value)

    return restore
