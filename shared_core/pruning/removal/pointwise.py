"""Elementwise operators, reductions and pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shared_core.pruning.removal import constants
from shared_core.pruning.removal.joins import join, restrict
from shared_core.pruning.removal.positions import Role, core, varying_dims
from shared_core.pruning.removal.trace import Normalised, Tracer, Tracked, rule

_SCALES = ("mul", "div", "_prelu_kernel")
_SUMS = ("sum", "linalg_vector_norm", "norm")
_SOFT = (
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "argmax",
    "argmin",
)  # fmt: skip
_POOLS = (
    "max_pool2d_with_indices", "max_pool2d", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool1d", "max_pool1d",
    "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d",
    "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "upsample_linear1d",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
)  # fmt: skip


@rule("pointwise", "_prelu_kernel")
def pointwise(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels united over the operands, and what the operator makes of constants."""
    name = func._schema.name.removeprefix("aten::")
    name = name.removesuffix("_") if func._schema.is_mutable else name
    if func._schema.is_mutable and tracer.is_aliased(args[0]):
        tracer.pin((args, kwargs), f"it is written into a part of another tensor in {tracer.here()}")
        return Tracked()
    operands = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    found = [tracer.get(item) or Tracked() for item in operands]
    wide = [[label.expand(out.shape) for label in item.labels] for item in found]
    for index, labels in enumerate(wide):
        for other, tensor in enumerate(operands):
            if other != index and labels:
                restrict(tracer, labels, tensor.expand(out.shape), wide[other])
    parameter = all(item.is_parameter for item in found)
    if not parameter:
        for item in found:
            for label in item.labels if item.is_parameter else ():
                tracer.positions.mark(label, Role.NORM if name in _SCALES else Role.OUT)
    value = None
    if any(item.value is not None for item in found):
        known = {id(tensor): item.value for tensor, item in zip(operands, found, strict=True)}
        value = _constants(name, func, args, kwargs, known)
    return Tracked(join(tracer, wide), value, parameter)


def _constants(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: dict[int, Tensor | None]
) -> Tensor | None:
    def constant(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        value = known[id(item)]
        if value is not None:
            return value.clone() if func._schema.is_mutable and item is args[0] else value
        return torch.full_like(item, float("nan")) if item.is_floating_point() else item

    if name not in ("where", "masked_fill") and any(
        isinstance(item, Tensor) and not item.is_floating_point() and known[id(item)] is None and item.numel() > 1
        for item in args
    ):
        return None
    found_args, found_kwargs = tree_map(constant, args), tree_map(constant, kwargs)
    value = constants.unless_unknown(constants.pointwise(name, func, found_args, found_kwargs))
    if value is None or name in ("mul", "div", "where", "masked_fill"):
        return value
    for item in found_args:  # some operators give a number for NaN: sign, fmax, nan_to_num
        if isinstance(item, Tensor) and item.is_floating_point():
            value = torch.where(item.isnan(), torch.full_like(value, float("nan")), value)
    return value


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    ndim = args[0].ndim
    if given is None or given == []:
        return tuple(range(ndim))
    return tuple(dim % ndim for dim in (given if isinstance(given, list | tuple) else [given]))


@rule("sum", "mean", "linalg_vector_norm", "norm", "amax", "amin", "var", "std", "var_mean", "logsumexp", "prod")
def reduction(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return labels over what is left; a sum over labelled positions wants them to be zero."""
    source = tracer.get(args[0]) or Tracked()
    name = func._schema.name.removeprefix("aten::")
    if isinstance(out, tuple):
        tracer.pin(args[0], f"{name} in {tracer.here()} is not followed")
        return Tracked()
    if name in _SUMS[1:]:
        dims = _dims((args[0], *args[2:]), kwargs) if len(args) > 2 else _dims((args[0],), kwargs)
    else:
        dims = _dims(args, kwargs)
    keep = out.ndim == args[0].ndim
    labels = []
    for label in source.labels:
        summed = tuple(dim for dim in varying_dims(label) if dim in dims)
        if summed:
            reduce_label(tracer, label, summed, source.value, name)
        if summed and summed == varying_dims(label):
            continue
        for dim in sorted(dims, reverse=True):
            label = label.narrow(dim, 0, 1) if keep else label.select(dim, 0)
        labels.append(label)
    value = None if source.value is None else func(source.value, *args[1:], **kwargs)
    return Tracked(labels, value, source.is_parameter)


def reduce_label(tracer: Tracer, label: Tensor, dims: tuple[int, ...], value: Tensor | None, name: str) -> None:
    """Note that a label is reduced along dims of its own.

    Args:
        tracer: Notes it.
        label: Varies along all of `dims`.
        dims: If they are not all that it varies along, each line goes as a whole, and its result with it.
        value: Constants of the tensor.
        name: The operator; after a sum zeros are not missed, a norm divides by their number.
    """
    if dims != varying_dims(label):
        tracer.positions.unite_along(label, dims, "")
    elif name in _SUMS:
        _summed(tracer, label, value)
    elif name in ("mean", "rms", "layer"):
        _summed(tracer, label, value)
        tracer.norms.append(Normalised(name, tracer.here(), core(label), dims))
    else:
        tracer.positions.pin(label, f"{name} in {tracer.here()} needs all of it")


def _summed(tracer: Tracer, label: Tensor, value: Tensor | None) -> None:
    if value is None:
        tracer.sum_over(label, None)
        return
    dims = tuple(dim for dim in range(label.ndim) if dim not in varying_dims(label))
    found = constants.agreed(value.expand(label.shape), dims)
    # what is not zero has no bias to go into
    tracer.sum_over(label, torch.where(found == 0, found, torch.full_like(found, float("nan"))))


@rule(*_SOFT)
def needs_all(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Tracked]:
    """Return the labels along the other dims: along this one nothing can go."""
    source = tracer.get(args[0]) or Tracked()
    name = func._schema.name.removeprefix("aten::")
    default = {"topk": -1, "sort": -1}.get(name, 0)
    position = 2 if name == "topk" else 1
    given = args[position] if len(args) > position else kwargs.get("dim", default)
    dim = (given if isinstance(given, int) else default) % args[0].ndim
    outs = list(out) if isinstance(out, tuple) else [out]
    labels = []
    for label in source.labels:
        if dim in varying_dims(label):
            tracer.positions.unite_along(label, (dim,), f"{name} in {tracer.here()} needs all of it")
        if label.shape == outs[0].shape:
            labels.append(label)
        elif label.ndim == outs[0].ndim and dim not in varying_dims(label):
            labels.append(label.narrow(dim, 0, 1).expand(outs[0].shape))
        else:
            tracer.positions.pin(label, f"{name} in {tracer.here()} is not followed")
    return [Tracked(list(labels)) for _ in outs]


@rule(*_POOLS)
def pool(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the labels of channels; pooling and resizing act on the dims behind them."""
    source = tracer.get(args[0]) or Tracked()
    target = out[0] if isinstance(out, tuple) else out
    labels = []
    for label in source.labels:
        if any(label.shape[dim] != target.shape[dim] for dim in varying_dims(label)):
            tracer.positions.pin(label, f"{func._schema.name.removeprefix('aten::')} in {tracer.here()} resizes it")
            continue
        for dim in range(label.ndim):
            if dim not in varying_dims(label):
                label = label.narrow(dim, 0, 1)
        labels.append(label.expand(target.shape))
    value = None
    if source.value is not None:
        found = func(source.value, *args[1:], **kwargs)
        value = constants.unless_unknown(found[0] if isinstance(found, tuple) else found)
    return Tracked(labels, value)
