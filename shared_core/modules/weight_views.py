"""Views of the weights of Linear, Conv, transposed Conv and recurrent layers by output and input channel."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.errors import ConfigError
from shared_core.modules.matching import (
    StackedExperts,
    expert_weights,
    is_transformers_conv1d,
    output_axis_of_experts,
    plain_name,
)

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
PACKED = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Layers of torch that hold several weights, or one under another name. They multiply by these themselves."""
_Conv = nn.modules.conv._ConvNd


def output_axis(module: nn.Module) -> int:
    """Return the axis of a module's weight along which the outputs lie.

    0 for linear layers and convolutions, 1 for transposed convolutions and transformers' ``Conv1D`` (GPT-2), 1 or 2 for
    stacked experts.
    """
    stacked = output_axis_of_experts(module)
    return int(isinstance(module, TRANSPOSED) or is_transformers_conv1d(module)) if stacked is None else stacked


def input_axis(module: nn.Module) -> int:
    """Return the axis of a module's weight along which the inputs lie."""
    return (3 if isinstance(module, StackedExperts) else 1) - output_axis(module)


def check_layout(module: nn.Module, where: str) -> None:
    """Raise an error if the layout of a layer's weight is unknown."""
    if not isinstance(module, nn.Linear | _Conv) and not is_transformers_conv1d(module):
        raise ConfigError(
            where, f"layer must be linear or convolutional, got {type(module).__name__}", "leave it out with skip"
        )


def output_rows(module: nn.Module, tensor: Tensor) -> Tensor:
    """Return a tensor of the weight's shape as (output units, weights of one unit)."""
    if is_transformers_conv1d(module):
        return tensor.t()
    if isinstance(module, TRANSPOSED):
        tensor = output_channels_first(tensor, module.groups)
    return tensor.reshape(len(tensor), -1)


def from_output_rows(module: nn.Module, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo `output_rows`: return a contiguous tensor of the weight's shape."""
    if is_transformers_conv1d(module):
        return rows.t().contiguous()
    if isinstance(module, TRANSPOSED):
        outputs = rows.reshape(len(rows), shape[0] // module.groups, *shape[2:])
        return output_channels_first(outputs, module.groups).contiguous()
    return rows.reshape(tuple(shape)).contiguous()


def channel_axis(module: nn.Module, x: Tensor) -> int:
    """Return the axis of an input's or output's channels: the last, or before the spatial axes of a convolution."""
    return x.dim() - 1 - (len(module.kernel_size) if isinstance(module, _Conv) else 0)


def over_inputs(module: nn.Module, channels: Tensor, shape: Sequence[int]) -> Tensor:
    """Return values per input channel, (channels,), shaped to multiply a weight of this shape."""
    rest = (1,) * (len(shape) - 2)
    if isinstance(module, TRANSPOSED) or is_transformers_conv1d(module):
        return channels.view(-1, 1, *rest)
    if isinstance(module, _Conv):
        # Channel g * (in / groups) + j is at index j of its group's rows.
        groups = channels.view(module.groups, 1, shape[1]).expand(-1, shape[0] // module.groups, -1)
        return groups.reshape(shape[0], shape[1], *rest)
    return channels.view(1, -1)


def over_outputs(module: nn.Module, units: Tensor, shape: Sequence[int]) -> Tensor:
    """Return values per output unit as a new tensor of the weight's shape."""
    # expand has stride 0, so clone allocates memory.
    rows = units.view(-1, 1).expand(-1, math.prod(shape) // units.numel())
    return from_output_rows(module, rows, shape).clone(memory_format=torch.contiguous_format)


def output_channels_first(weight: Tensor, groups: int = 1) -> Tensor:
    """Return a transposed convolution's weight with output channels along axis 0. It is its own inverse.

    (in, out / groups, ...) becomes (out, in / groups, ...): output channel ``g·(out/groups) + j`` is computed from
    ``weight[g·(in/groups) : (g+1)·(in/groups), j]``, the g-th group's inputs. Code for output channels along
    axis 0 (scales, LSQ, ternary) then works for transposed convolutions too.
    """
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or len(weight) % groups:
        rule = f"groups must divide the first axis of the weight, {len(weight)}, got {groups!r}"
        raise ConfigError("output_channels_first", rule)
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a layer's weights by name. Attention, recurrent layers and stacked experts have several.

    Those of the output projection of attention belong to that layer.

    Example:
        >>> list(weights_of(nn.GRUCell(3, 4))), list(weights_of(nn.MultiheadAttention(4, 2)))
        (['weight_ih', 'weight_hh'], ['in_proj_weight'])
    """
    if isinstance(module, PACKED):
        own = module._parameters.items()
        return {name: value for name, value in own if value is not None and value.ndim == 2 and "weight" in name}
    if stacks := expert_weights(module):
        return stacks
    weight = module._parameters.get("weight")
    return {} if weight is None else {"weight": weight}


def left_alone(model: nn.Module, reasons: Mapping[type[nn.Module], str], apart: Collection[int] = ()) -> dict[str, str]:
    """Return name → reason for the layers with weights that a technique does not change, by its reasons per class.

    `apart` has the ids of modules that do not count.

    Example:
        >>> left_alone(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)), {nn.RNNBase: "no kernel"})
        {'1': 'no kernel'}
    """
    found = {}
    for name, module in model.named_modules():
        why = next((reason for kind, reason in reasons.items() if isinstance(module, kind)), None)
        if why is not None and id(module) not in apart and weights_of(module):
            found[plain_name(name)] = why
    return found


def _has_outputs_first(module: nn.Module) -> bool:
    """Return True for Linear and convolutions. Each forward asks, so it comes before costlier questions."""
    return isinstance(module, (nn.Linear, _Conv)) and not isinstance(module, TRANSPOSED)


def as_rows(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a weight with one row per output channel or embedding vector, experts concatenated."""
    if _has_outputs_first(module):
        return weight.flatten(1)
    if isinstance(module, TRANSPOSED):
        weight = output_channels_first(weight, module.groups)
    if (axis := output_axis_of_experts(module)) is not None:
        return (weight if axis == 1 else weight.mT).flatten(0, 1)
    return weight.t() if is_transformers_conv1d(module) else weight.flatten(1)


def from_rows(module: nn.Module, rows: Tensor, like: Tensor) -> Tensor:
    """Undo `as_rows`: return `rows` in the shape of the weight `like`."""
    if _has_outputs_first(module):
        return rows.view(like.shape)
    if is_transformers_conv1d(module):
        return rows.t()
    if output_axis_of_experts(module) == 2:
        # in the parameter's memory layout, because products in other layouts may differ in the last bits
        return rows.view(like.mT.shape).mT.contiguous()
    if not isinstance(module, TRANSPOSED):
        return rows.view(like.shape)
    shape = len(rows), like.shape[0] // module.groups, *like.shape[2:]
    return output_channels_first(rows.view(shape), module.groups)


def compute(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None = None) -> Tensor:
    """Run a Linear, Conv1D, convolution or transposed convolution with another weight and bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if is_transformers_conv1d(layer):
        # As in transformers, so that results are equal bit for bit.
        return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], layer.nf)  # type: ignore[arg-type]
    if not layer.transposed:
        return layer._conv_forward(x, weight, bias)  # type: ignore[no-any-return]
    dims = len(layer.kernel_size)
    # The user's output_size decides how much is added on one side.
    padding = layer._output_padding(
        x, output_size, layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation
    )
    convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    y: Tensor = convolve(x, weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation)
    return y


def num_outputs(module: nn.Module) -> int:
    """Return the number of a layer's output channels."""
    return int(getattr(module, "out_channels", 0) or module.out_features)  # type: ignore[arg-type]


def num_inputs(module: nn.Module) -> int:
    """Return the number of a layer's input channels."""
    return int(getattr(module, "in_channels", 0) or module.in_features)  # type: ignore[arg-type]


def is_depthwise(module: nn.Module) -> bool:
    """Return True if every output channel of a convolution reads its own single input channel."""
    groups = getattr(module, "groups", 1)
    return bool(groups > 1 and groups == num_inputs(module) == num_outputs(module))


def by_channel(weight: Tensor, module: nn.Module, channels: int | None = None) -> Tensor:
    """Return a view (groups, outputs per group, inputs per group, …) of a layer's weight.

    `channels` are those of the (channels, positions) map that a Linear layer reads flattened, all features by default.
    """
    if isinstance(module, nn.Linear):
        return _split(weight.unsqueeze(0), 2, channels or module.in_features)
    grouped = _split(weight, 0, int(module.groups))  # type: ignore[arg-type]
    return grouped.transpose(1, 2) if isinstance(module, TRANSPOSED) else grouped


def largest_by_output(view: Tensor) -> Tensor:
    """Return max|w| per output channel of a `by_channel` view."""
    return view.abs().amax(dim=tuple(range(2, view.dim()))).flatten()


def largest_by_input(view: Tensor) -> Tensor:
    """Return max|w| per input channel of a `by_channel` view."""
    return view.abs().amax(dim=(1, *range(3, view.dim()))).flatten()


def scale_outputs_(view: Tensor, factor: Tensor) -> None:
    """Multiply each output channel of a `by_channel` view in place."""
    view.mul_(factor.reshape(view.shape[0], view.shape[1], *[1] * (view.dim() - 2)))


def scale_inputs_(view: Tensor, factor: Tensor) -> None:
    """Multiply each input channel of a `by_channel` view in place."""
    view.mul_(factor.reshape(view.shape[0], 1, view.shape[2], *[1] * (view.dim() - 3)))


def scaled_outputs(weight: Tensor, module: nn.Module, factor: Tensor) -> Tensor:
    """Return `weight` with every output channel multiplied by its factor, (channels,). Gradients reach both."""
    if not isinstance(module, TRANSPOSED):
        return weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
    groups = int(module.groups)
    shaped = factor.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))
    return (_split(weight, 0, groups) * shaped).flatten(0, 1)


def _split(weight: Tensor, axis: int, parts: int) -> Tensor:
    """Return a view with `axis` split in two. Unlike reshape, it never copies, even channels_last weights."""
    return torch.unflatten(weight, axis, (parts, weight.shape[axis] // max(parts, 1)))


def channel_sums(output: Tensor, module: nn.Module) -> tuple[Tensor, int]:
    """Return (sum per channel in float64, number of values per channel) of a layer's output."""
    axis = -1 if isinstance(module, nn.Linear) else -1 - len(module.kernel_size)  # type: ignore[arg-type]
    values = output.detach().movedim(axis, 0).flatten(1)
    return values.sum(1, dtype=torch.float64), values.shape[1]
