"""The weights of Linear, Conv and transposed Conv layers, seen by output and input channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared_core.quantization.layers import TRANSPOSED


def num_outputs(module: nn.Module) -> int:
    """Return the number of a layer's output channels."""
    return int(getattr(module, "out_channels", 0) or module.out_features)  # type: ignore[arg-type]


def num_inputs(module: nn.Module) -> int:
    """Return the number of a layer's input channels."""
    return int(getattr(module, "in_channels", 0) or module.in_features)  # type: ignore[arg-type]


def is_depthwise(module: nn.Module) -> bool:
    """Return whether every output channel of a convolution reads one input channel of its own.

    Example:
        >>> is_depthwise(nn.Conv2d(4, 4, 3, groups=4)), is_depthwise(nn.Conv2d(1, 1, 3))
        (True, False)
    """
    groups = getattr(module, "groups", 1)
    return bool(groups > 1 and groups == num_inputs(module) == num_outputs(module))


def by_channel(weight: Tensor, module: nn.Module, channels: int | None = None) -> Tensor:
    """Return a view (groups, outputs a group, inputs a group, …) of a layer's weight.

    Args:
        weight: Of the shape of ``module.weight``.
        module: The layer.
        channels: For a Linear layer that reads a flattened (channels, positions) map: the channels of that map;
            None: every input feature is a channel.

    Example:
        >>> layer = nn.Conv2d(4, 6, 3, groups=2)
        >>> tuple(by_channel(layer.weight, layer).shape)
        (2, 3, 2, 3, 3)
    """
    if isinstance(module, nn.Linear):
        return _split(weight.unsqueeze(0), 2, channels or module.in_features)
    grouped = _split(weight, 0, int(module.groups))  # type: ignore[arg-type]
    return grouped.transpose(1, 2) if isinstance(module, TRANSPOSED) else grouped


def largest_by_output(view: Tensor) -> Tensor:
    """Return max|w| of each output channel of a `by_channel` view."""
    return view.abs().amax(dim=tuple(range(2, view.dim()))).flatten()


def largest_by_input(view: Tensor) -> Tensor:
    """Return max|w| of each input channel of a `by_channel` view."""
    return view.abs().amax(dim=(1, *range(3, view.dim()))).flatten()


def scale_outputs_(view: Tensor, factor: Tensor) -> None:
    """Multiply each output channel of a `by_channel` view in place."""
    view.mul_(factor.reshape(view.shape[0], view.shape[1], *[1] * (view.dim() - 2)))


def scale_inputs_(view: Tensor, factor: Tensor) -> None:
    """Multiply each input channel of a `by_channel` view in place."""
    view.mul_(factor.reshape(view.shape[0], 1, view.shape[2], *[1] * (view.dim() - 3)))


def scaled_outputs(weight: Tensor, module: nn.Module, factor: Tensor) -> Tensor:
    """Return `weight` with every output channel multiplied; gradients reach both.

    Args:
        weight: Of the shape of ``module.weight``.
        module: The layer.
        factor: Of shape (output channels,).

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> scaled_outputs(torch.ones(2, 2), layer, torch.tensor([1.0, 3.0]))
        tensor([[1., 1.],
                [3., 3.]])
    """
    if not isinstance(module, TRANSPOSED):
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    groups = int(module.groups)
    shaped = factor.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))
    return (_split(weight, 0, groups) * shaped).flatten(0, 1)


def _split(weight: Tensor, axis: int, parts: int) -> Tensor:
    """Return a view with `axis` split in two; unlike reshape, also for channels_last weights never a copy."""
    return torch.unflatten(weight, axis, (parts, weight.shape[axis] // max(parts, 1)))


def channel_sums(output: Tensor, module: nn.Module) -> tuple[Tensor, int]:
    """Return (sum of each channel in float64, number of values a channel) of a layer's output."""
    axis = -1 if isinstance(module, nn.Linear) else -1 - len(module.kernel_size)  # type: ignore[arg-type]
    values = output.detach().movedim(axis, 0).flatten(1)
    return values.sum(1, dtype=torch.float64), values.shape[1]
