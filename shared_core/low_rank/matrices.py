"""Layers as matrices and back: which two smaller layers a factorised one becomes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LINEAR, CHANNEL, SPATIAL = "linear", "channel", "spatial"


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D, a linear layer whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def schemes(layer: nn.Module) -> tuple[str, ...]:
    """Return how a layer can be factorised.

    Example:
        >>> schemes(nn.Linear(4, 2)), schemes(nn.Conv2d(3, 8, 3)), schemes(nn.Conv2d(3, 8, 1))
        (('linear',), ('channel', 'spatial'), ('channel',))
    """
    if not isinstance(layer, nn.Conv2d):
        return (LINEAR,)
    return (CHANNEL, SPATIAL) if max(layer.kernel_size) > 1 else (CHANNEL,)


def as_matrix(weight: Tensor, scheme: str, transposed: bool) -> Tensor:
    """Return a layer's weight as the matrix that a scheme factorises.

    ``linear``: (out, in). ``channel``: (out, in·kh·kw). ``spatial``: (out·kw, in·kh).
    """
    if scheme == LINEAR:
        return weight.T if transposed else weight
    if scheme == CHANNEL:
        return weight.flatten(1)
    out, into, height, width = weight.shape
    return weight.permute(0, 3, 1, 2).reshape(out * width, into * height)


def from_matrix(matrix: Tensor, scheme: str, transposed: bool, shape: tuple[int, ...]) -> Tensor:
    """Return the weight of a layer from its matrix: the inverse of `as_matrix`."""
    if scheme == LINEAR:
        return matrix.T.contiguous() if transposed else matrix
    if scheme == CHANNEL:
        return matrix.reshape(shape)
    out, into, height, width = shape
    return matrix.reshape(out, width, into, height).permute(0, 2, 3, 1).contiguous()


def empty_factors(layer: Any, scheme: str, rank: int) -> tuple[nn.Module, nn.Module]:
    """Return the two layers, on the layer's device and in its dtype, without values; neither has a bias."""
    new: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
    make: Any = torch.nn.utils.skip_init
    if scheme == LINEAR:
        into, out = layer.weight.shape if is_transposed(layer) else layer.weight.shape[::-1]
        return make(nn.Linear, into, rank, **new), make(nn.Linear, rank, out, **new)
    into, out = layer.in_channels, layer.out_channels
    if scheme == CHANNEL:
        geometry = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        first = make(nn.Conv2d, into, rank, layer.kernel_size, **geometry, **new)
        return first, make(nn.Conv2d, rank, out, 1, **new)
    parts = []
    for axis, (inner, outer) in enumerate(((into, rank), (rank, out))):
        kernel, stride, padding, dilation = (
            _along(getattr(layer, name), axis, rest)
            for name, rest in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
        )
        parts.append(
            make(nn.Conv2d, inner, outer, kernel, stride=stride, padding=padding, dilation=dilation,
                 padding_mode=layer.padding_mode, **new)
        )  # fmt: skip
    return parts[0], parts[1]


def _along(value: Any, axis: int, rest: int) -> Any:
    """Return a pair with its value along one axis and `rest` along the other; ``"same"`` is both."""
    return value if isinstance(value, str) else tuple(value[i] if i == axis else rest for i in (0, 1))


def factor_weights(a: Tensor, b: Tensor, scheme: str, layer: Any) -> tuple[Tensor, Tensor]:
    """Return the weights of the two layers from the factors A (rank, columns) and B (rows, rank)."""
    rank = len(a)
    if scheme == LINEAR:
        return a, b
    height, width = layer.kernel_size
    if scheme == CHANNEL:
        return a.reshape(rank, -1, height, width), b.reshape(-1, rank, 1, 1)
    return (
        a.reshape(rank, -1, height, 1),
        b.reshape(-1, width, rank).permute(0, 2, 1).reshape(-1, rank, 1, width),
    )


def product(first: Tensor, second: Tensor, scheme: str) -> Tensor:
    """Return the matrix ``B A`` from the two layers' weights."""
    if scheme == SPATIAL:
        second = second.squeeze(2).permute(0, 2, 1).flatten(0, 1)
    return second.flatten(1) @ first.flatten(1)


def input_rows(layer: Any, inputs: Tensor, scheme: str) -> Tensor:
    """Return what a scheme's matrix is multiplied with, one input a row, (n, columns).

    Of ``spatial`` the columns of pixels that its first layer sees: the second adds what it makes of neighbours.
    """
    if scheme == LINEAR:
        return inputs.flatten(0, -2) if inputs.dim() > 1 else inputs[None]
    if inputs.dim() == 3:
        inputs = inputs[None]
    if any(layer._reversed_padding_repeated_twice):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        sides = list(layer._reversed_padding_repeated_twice)
        if scheme == SPATIAL:
            sides[:2] = 0, 0
        inputs = F.pad(inputs, sides, mode=mode)
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if scheme == SPATIAL:
        kernel, stride, dilation = ((pair[0], 1) for pair in (kernel, stride, dilation))
    patches = F.unfold(inputs, kernel, dilation=dilation, stride=stride)
    return patches.transpose(1, 2).flatten(0, 1)
