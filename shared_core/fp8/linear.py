"""The layers: a stock one becomes one by a change of class, and back; its weight stays what it is."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

from shared_core.fp8.operators import LayerFp8, fp8_linear
from shared_core.module_match import change_class, is_transformers_conv1d, own_class


class Fp8Layer(nn.Module):
    """A layer whose forward product and both backward products multiply FP8 values.

    ``y = (X̂·Ŵᵀ)·(s_x·s_w) + b`` with ``X̂ = cast(clamp(x/s_x))``, accumulated in float32; dX and dW likewise. The
    weight is an ordinary parameter. The output has the type of the input, or of the autocast region.
    """

    fp8: LayerFp8
    weight: Tensor
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x wᵀ + b``, multiplied in FP8."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        # a forward without gradients is an evaluation, a calibration, or will be recomputed with them
        record = self.training and torch.is_grad_enabled()
        weight = self._rows_of_outputs()
        y: Tensor = fp8_linear(input.reshape(-1, weight.shape[1]), weight, self.fp8.handle, record)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.view(*input.shape[:-1], weight.shape[0])

    def _rows_of_outputs(self) -> Tensor:
        return self.weight


class Fp8Linear(Fp8Layer, nn.Linear):
    """`torch.nn.Linear` whose forward product and both backward products multiply FP8 values."""


class _Transposed(Fp8Layer):
    def _rows_of_outputs(self) -> Tensor:
        return self.weight.t()


@functools.cache
def _conv1d_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the FP8 layer made of transformers' Conv1D, which is not imported for it."""
    about: dict[str, Any] = {"__doc__": "transformers' Conv1D that multiplies FP8 values.", "__module__": __name__}
    return type("Fp8Conv1D", (_Transposed, kind), about)


def is_stock(module: nn.Module) -> bool:
    """Return whether a layer is `torch.nn.Linear` or transformers' Conv1D itself, no class made of them."""
    kind = own_class(module)
    return kind is nn.Linear or (is_transformers_conv1d(module) and kind.__name__ == "Conv1D")


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of one of these layers."""
    return cast(Tensor, module.weight)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Return ``in_features`` and ``out_features``; the weight of transformers' Conv1D is (in, out)."""
    first, second = weight_of(module).shape
    return (first, second) if is_transformers_conv1d(module) else (second, first)


def swap(module: nn.Module, layer: LayerFp8) -> None:
    """Make a stock layer multiply in FP8; its parameters and keys stay as they are."""
    stock = own_class(module)
    module.fp8 = layer  # type: ignore[assignment]
    change_class(module, stock, Fp8Linear if stock is nn.Linear else _conv1d_class(stock))  # type: ignore[arg-type]


def restore(module: nn.Module) -> None:
    """Make a layer stock again; one that is stock stays so."""
    if isinstance(module, Fp8Layer):
        ours = own_class(module)
        change_class(module, ours, ours.__bases__[-1])
        del module.fp8
