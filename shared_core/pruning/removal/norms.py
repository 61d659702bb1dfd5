"""Normalisation layers that run as one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared_core.pruning.removal import constants
from shared_core.pruning.removal.joins import join, restrict
from shared_core.pruning.removal.pointwise import reduce_label
from shared_core.pruning.removal.positions import Role, along, varying_dims
from shared_core.pruning.removal.trace import Tracer, Tracked, rule


@rule(
    "native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm",
    "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update",
)  # fmt: skip
def batch_norm(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the channels, united with the parameters and running statistics of each."""
    tensor, weight, bias = args[:3]
    statistics = [item for item in args[3:5] if isinstance(item, Tensor)]
    shape = [1, -1, *[1] * (tensor.ndim - 2)]
    source = tracer.get(tensor) or Tracked()
    operands = [source.labels]
    for item, role in ((weight, Role.NORM), (bias, Role.NORM), *((found, Role.STAT) for found in statistics)):
        labels = _parameter(tracer, item, role)
        operands.append([label.reshape(shape).expand(tensor.shape) for label in labels])
    value = _affine(tracer, weight, bias, shape)
    if len(statistics) == 2 and source.value is not None:
        found = func(source.value, *args[1:], **kwargs)
        value = found[0] if value is None else torch.where(found[0].isnan(), value.expand(tensor.shape), found[0])
    return Tracked(join(tracer, operands), None if value is None else value.expand(tensor.shape))


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the labels, united with the parameters; over what is labelled and divided by, notes the norm."""
    tensor, shape = args[:2]
    is_rms = "rms" in func._schema.name
    weight, bias = (args[2] if len(args) > 2 else None), (None if is_rms else args[3])
    source = tracer.get(tensor) or Tracked()
    dims = tuple(range(tensor.ndim - len(shape), tensor.ndim))
    operands = [source.labels]
    for item in (weight, bias):
        labels = [label.expand(tensor.shape) for label in _parameter(tracer, item, Role.NORM)]
        restrict(tracer, labels, tensor, source.labels)
        operands.append(labels)
    if isinstance(weight, Tensor):
        restrict(tracer, source.labels, weight.expand(tensor.shape), operands[1])
    for label in source.labels:
        over = tuple(dim for dim in varying_dims(label) if dim in dims)
        if over:
            reduce_label(tracer, label, over, source.value, "rms" if is_rms else "layer")
    value = _affine(tracer, weight, bias, None)
    if is_rms and source.value is not None:
        zero = torch.where(source.value == 0, source.value, torch.full_like(source.value, float("nan")))
        value = zero if value is None else torch.where(zero.isnan(), value.expand(tensor.shape), zero)
    return Tracked(join(tracer, operands), None if value is None else value.expand(tensor.shape))


@rule("native_group_norm")
def group_norm(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the channels: those of a group share their statistics and are removed together."""
    tensor, weight, bias = args[:3]
    groups = args[6]
    shape = [1, -1, *[1] * (tensor.ndim - 2)]
    source = tracer.get(tensor) or Tracked()
    operands = [source.labels]
    for item in (weight, bias):
        operands.append([label.reshape(shape).expand(tensor.shape) for label in _parameter(tracer, item, Role.NORM)])
    for label in source.labels:
        if varying_dims(label) != (1,):
            tracer.positions.pin(label, f"{tracer.here()} normalises over it")
            continue
        channels = along(label, 1).reshape(groups, -1)
        if groups == 1:
            tracer.positions.pin(label, f"{tracer.here()} normalises over all of it")
        else:
            tracer.positions.unite(channels, channels[:, :1])
    value = _affine(tracer, weight, bias, shape)
    return Tracked(join(tracer, operands), None if value is None else value.expand(tensor.shape))


def _parameter(tracer: Tracer, item: Any, role: Role) -> list[Tensor]:
    tracked = tracer.get(item)
    if tracked is None:
        return []
    for label in tracked.labels:
        tracer.positions.mark(label, role)
    return tracked.labels


def _affine(tracer: Tracer, weight: Any, bias: Any, shape: list[int] | None) -> Tensor | None:
    """Return the bias where the scale is zero: there it is all that is left, whatever the input."""
    found = tracer.get(weight)
    if not tracer.constants or found is None or found.value is None:
        return None
    shift = tracer.get(bias)
    constant = shift.value if shift is not None and shift.value is not None else torch.zeros_like(found.value)
    value = torch.where(found.value == 0, constant, torch.full_like(constant, float("nan")))
    return constants.unless_unknown(value if shape is None else value.reshape(shape))
