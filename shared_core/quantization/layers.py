"""The layers that can be quantised: which of their parameters are weights, and which weights make one output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.module_match import is_transformers_conv1d
from shared_core.quantization.group import output_channels_first

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.LSTM, nn.GRU)


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold a layer's weights, by name; a recurrent layer has several, all 2-D.

    Example:
        >>> list(weights_of(nn.GRU(3, 5))), list(weights_of(nn.Linear(3, 5)))
        (['weight_ih_l0', 'weight_hh_l0'], ['weight'])
    """
    found = {
        name: value for name, value in module._parameters.items() if name.startswith("weight_") and value is not None
    }
    if isinstance(module, RECURRENT):
        return found
    weight = module._parameters.get("weight")
    return {} if weight is None else {"weight": weight}


def as_rows(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight with one row for each output channel (or embedding vector); a view where that can be.

    Args:
        module: The layer; transformers' Conv1D keeps its outputs on the second axis, and a transposed convolution its
            output channels, group by group.
        weight: Its weight.

    Example:
        >>> layer = nn.ConvTranspose1d(4, 6, 3, groups=2)
        >>> as_rows(layer, layer.weight).shape
        torch.Size([6, 6])
    """
    if isinstance(module, TRANSPOSED):
        weight = output_channels_first(weight, module.groups)
    return weight.t() if is_transformers_conv1d(module) else weight.flatten(1)


def from_rows(module: nn.Module, rows: Tensor, like: Tensor) -> Tensor:
    """Return `rows`, as `as_rows` made them, in the shape of the weight `like`."""
    if is_transformers_conv1d(module):
        return rows.t()
    if not isinstance(module, TRANSPOSED):
        return rows.view(like.shape)
    shape = len(rows), like.shape[0] // module.groups, *like.shape[2:]
    return output_channels_first(rows.view(shape), module.groups)


def compute(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None = None) -> Tensor:
    """Return what a Linear, Conv1D, convolution or transposed convolution computes with another weight and bias.

    Args:
        layer: Its geometry is used.
        x: Input.
        weight: Of the shape of the layer's.
        bias: (outputs,), or None.
        output_size: As a transposed convolution's forward takes it.

    Example:
        >>> compute(nn.Linear(2, 1), torch.ones(1, 2), torch.tensor([[1.0, 2.0]]), None)
        tensor([[3.]])
    """
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if is_transformers_conv1d(layer):
        return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], layer.nf)  # type: ignore[arg-type]
    if not layer.transposed:
        return layer._conv_forward(x, weight, bias)  # type: ignore[no-any-return]
    dims = len(layer.kernel_size)
    padding = layer._output_padding(
        x, output_size, layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation
    )
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    y: Tensor = convolve(x, weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation)
    return y
