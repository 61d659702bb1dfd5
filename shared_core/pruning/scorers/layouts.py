"""Where a layer's weight, input and output have their channels: linear, convolutional and transposed layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared_core.errors import ConfigError
from shared_core.module_match import is_transformers_conv1d

_Conv = nn.modules.conv._ConvNd
_Transposed = nn.modules.conv._ConvTransposeNd


def check_layout(module: nn.Module, where: str) -> None:
    """Refuse a layer whose weight is laid out in no way that is known here.

    Raises:
        ConfigError: If it is neither linear nor convolutional.
    """
    if not isinstance(module, nn.Linear | _Conv) and not is_transformers_conv1d(module):
        raise ConfigError(
            f"{where}: layer must be linear or convolutional, got {type(module).__name__}; leave it out with skip"
        )


def output_rows(module: nn.Module, tensor: Tensor) -> Tensor:
    """Return a tensor of the weight's shape as (output units, weights of one unit).

    Args:
        module: Linear, Conv, ConvTranspose or transformers' Conv1D, with or without groups.
        tensor: A weight, its scores or its mask.

    Returns:
        A view where that is possible; `from_output_rows` is the way back.

    Example:
        >>> layer = nn.ConvTranspose1d(2, 3, 1, bias=False)
        >>> output_rows(layer, torch.arange(6).view(2, 3, 1))
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
    """
    if is_transformers_conv1d(module):
        return tensor.t()
    if isinstance(module, _Transposed):
        split = tensor.reshape(module.groups, -1, tensor.shape[1], math.prod(tensor.shape[2:]))
        return split.transpose(1, 2).reshape(module.out_channels, -1)
    return tensor.reshape(tensor.shape[0], -1)


def from_output_rows(module: nn.Module, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what `output_rows` made rows of, in the weight's shape and contiguous.

    Example:
        >>> layer = nn.ConvTranspose2d(4, 6, (2, 3), groups=2)
        >>> rows = output_rows(layer, layer.weight)
        >>> torch.equal(from_output_rows(layer, rows, layer.weight.shape), layer.weight)
        True
    """
    if is_transformers_conv1d(module):
        return rows.t().contiguous()
    if isinstance(module, _Transposed):
        split = rows.reshape(module.groups, shape[1], shape[0] // module.groups, math.prod(shape[2:]))
        return split.transpose(1, 2).reshape(tuple(shape)).contiguous()
    return rows.reshape(tuple(shape)).contiguous()


def channel_axis(module: nn.Module, x: Tensor) -> int:
    """Return the axis of an input's or output's channels: the last, or before the places of a convolution.

    Example:
        >>> channel_axis(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 5, 5))
        1
    """
    return x.dim() - 1 - (len(module.kernel_size) if isinstance(module, _Conv) else 0)


def over_inputs(module: nn.Module, channels: Tensor, shape: Sequence[int]) -> Tensor:
    """Return one value an input channel, shaped to be multiplied with the weight.

    Args:
        module: The layer.
        channels: (input channels,).
        shape: The weight's.

    Example:
        >>> over_inputs(nn.Linear(2, 3), torch.tensor([1.0, 2.0]), (3, 2)).shape
        torch.Size([1, 2])
    """
    rest = (1,) * (len(shape) - 2)
    if isinstance(module, _Transposed) or is_transformers_conv1d(module):
        return channels.view(-1, 1, *rest)
    if isinstance(module, _Conv):
        groups = channels.view(module.groups, 1, shape[1]).expand(-1, shape[0] // module.groups, -1)
        return groups.reshape(shape[0], shape[1], *rest)
    return channels.view(1, -1)


def over_outputs(module: nn.Module, units: Tensor, shape: Sequence[int]) -> Tensor:
    """Return one value an output unit, a new tensor of the weight's shape.

    Example:
        >>> over_outputs(nn.Linear(2, 2), torch.tensor([1.0, 2.0]), (2, 2))
        tensor([[1., 1.],
                [2., 2.]])
    """
    rows = units.view(-1, 1).expand(-1, math.prod(shape) // units.numel())
    return from_output_rows(module, rows, shape).clone(memory_format=torch.contiguous_format)
