"""Convolutions: input and output channels, and groups, which are removed whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared_core.pruning.removal import constants
from shared_core.pruning.removal.contractions import add_bias
from shared_core.pruning.removal.positions import Role, along, flat_ids, varying_dims
from shared_core.pruning.removal.trace import Tracer, Tracked, rule


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the channels of a convolution; a group of a grouped one is removed whole."""
    tensor, weight, bias = args[:3]
    padding, transposed, groups = args[4], args[6], args[8]
    source, kernel = tracer.get(tensor) or Tracked(), tracer.get(weight) or Tracked()
    here = tracer.here()
    out_axis, in_axis = (1, 0) if transposed else (0, 1)
    channels = [label for label in source.labels if varying_dims(label) == (1,)]
    batch = [label for label in source.labels if varying_dims(label) == (0,)]
    for label in source.labels:
        if varying_dims(label) not in ((0,), (1,)):
            tracer.positions.pin(label, f"{here} slides over it")
    outs = [label for label in kernel.labels if varying_dims(label) == (out_axis,)]
    ins = [label for label in kernel.labels if varying_dims(label) == (in_axis,)]
    for label in kernel.labels:
        if varying_dims(label) not in ((0,), (1,)) or not kernel.is_parameter:
            tracer.positions.pin(label, f"it is the kernel's size in {here}")
    for label in outs:
        tracer.positions.mark(label, Role.OUT)
        tracer.positions.in_convolutions[flat_ids(label)] = True
    produced = [_channels(along(label, out_axis), out) for label in outs]
    if groups == 1:
        for label in ins:
            tracer.positions.mark(label, Role.IN)
            if not channels:
                tracer.positions.pin(label, f"it meets what has a fixed size in {here}")
            for other in channels:
                tracer.positions.unite(along(other, 1), along(label, in_axis))
        for label in channels if not ins else ():
            tracer.positions.pin(label, f"it meets what has a fixed size in {here}")
    elif transposed or not outs or not channels:
        tracer.pin((tensor, weight), f"{here} is a grouped convolution that is not followed")
        produced = []
    else:
        for label in ins:
            tracer.positions.pin(label, f"each group of {here} has that many")
        _unite_groups(tracer, channels[0], outs[0], groups)
    value = None
    if tracer.constants:
        value = _known_convolution(func, args, source, kernel, tensor)
        for label in ins if groups == 1 else ():
            tracer.sum_over(label, _arriving(source.value, any(padding) or transposed))
    result = Tracked([*produced, *(label.narrow(1, 0, 1).expand(out.shape) for label in batch)], value)
    if bias is None:
        return result
    return add_bias(tracer, result, bias, out, shape=(-1, *[1] * (out.ndim - 2)))


def _arriving(value: Tensor | None, uneven: bool) -> Tensor | None:
    if value is None:
        return None
    found = constants.agreed(value, tuple(dim for dim in range(value.ndim) if dim != 1))
    # at a padded border, and anywhere after a transposed convolution, fewer terms of the sum are constants
    return torch.where(found == 0, found, torch.full_like(found, float("nan"))) if uneven else found


def _channels(label: Tensor, out: Tensor) -> Tensor:
    return label.reshape(1, -1, *[1] * (out.ndim - 2)).expand(out.shape)


def _unite_groups(tracer: Tracer, channels: Tensor, outs: Tensor, groups: int) -> None:
    entering = along(channels, 1).reshape(groups, -1)
    leaving = along(outs, 0).reshape(groups, -1)
    for label in (entering, leaving):
        tracer.positions.unite(label, label[:, :1])
    tracer.positions.unite(entering[:, :1], leaving[:, :1])


def _known_convolution(
    func: Any, args: tuple[Any, ...], source: Tracked, kernel: Tracked, tensor: Tensor
) -> Tensor | None:
    if kernel.value is None:
        return None
    if source.value is None and not bool((kernel.value.flatten(1) == 0).all(1).any()) and not args[6]:
        return None

    def contract(first: Tensor, second: Tensor) -> Tensor:
        result: Tensor = func(first, second, None, *args[3:])
        return result

    value = torch.full_like(tensor, float("nan")) if source.value is None else source.value
    return constants.unless_unknown(constants.contraction(value, kernel.value, contract))
