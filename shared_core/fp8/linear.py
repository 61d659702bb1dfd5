"""The layer: a stock `Linear` becomes one by a change of class, and back; its weight stays what it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared_core.fp8.operators import LayerFp8, fp8_linear
from shared_core.module_match import change_class


class Fp8Linear(nn.Linear):
    """`torch.nn.Linear` whose forward product and both backward products multiply FP8 values.

    ``y = (X̂·Ŵᵀ)·(s_x·s_w) + b`` with ``X̂ = cast(clamp(x/s_x))``, accumulated in float32; dX and dW likewise. The
    weight is an ordinary parameter. The output has the type of the input, or of the autocast region.
    """

    fp8: LayerFp8

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x wᵀ + b``, multiplied in FP8."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        # a forward without gradients is an evaluation, a calibration, or will be recomputed with them
        record = self.training and torch.is_grad_enabled()
        y: Tensor = fp8_linear(input.reshape(-1, self.in_features), self.weight, self.fp8.handle, record)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.view(*input.shape[:-1], self.out_features)


def swap(module: nn.Module, layer: LayerFp8) -> None:
    """Make a stock layer multiply in FP8; its parameters and keys stay as they are."""
    module.fp8 = layer  # type: ignore[assignment]
    change_class(module, nn.Linear, Fp8Linear)


def restore(module: nn.Module) -> None:
    """Make a layer stock again; one that is stock stays so."""
    if isinstance(module, Fp8Linear):
        change_class(module, Fp8Linear, nn.Linear)
        del module.fp8
