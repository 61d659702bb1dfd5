"""Operators that only move, copy or repeat elements: labels and constants move with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared_core.pruning.removal.joins import join, restrict
from shared_core.pruning.removal.positions import FIXED, Role, varying_dims
from shared_core.pruning.removal.trace import Tracer, Tracked, rule


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def view(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels in the new shape: exact for every shape, because a label holds an id for every element."""
    source = tracer.get(args[0]) or Tracked()
    value = None if source.value is None else source.value.reshape(out.shape)
    return Tracked([label.reshape(out.shape) for label in source.labels], value, source.is_parameter)


@rule(
    "permute", "transpose", "t", "expand", "squeeze", "unsqueeze", "slice", "select", "split", "split_with_sizes",
    "unbind", "alias", "detach", "roll", "flip", "repeat", "movedim", "unfold", "diagonal", "pixel_shuffle",
    "pixel_unshuffle", "channel_shuffle", "chunk", "narrow", "unsafe_split",
    "unsafe_split_with_sizes", "unsafe_chunk",
)  # fmt: skip
def move(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Tracked]:
    """Return what the same operator makes of labels and constants."""
    source = tracer.get(args[0]) or Tracked()
    labels = [_listed(func(label, *args[1:], **kwargs)) for label in source.labels]
    count = len(_listed(out))
    values = [None] * count if source.value is None else _listed(func(source.value, *args[1:], **kwargs))
    return [Tracked([moved[i] for moved in labels], values[i], source.is_parameter) for i in range(count)]


@rule("clone", "_to_copy", "contiguous", "lift_fresh", "dropout", "native_dropout", "to")
def copy(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the same labels, and constants of the new type."""
    source = tracer.get(args[0]) or Tracked()
    target = out[0] if isinstance(out, tuple) else out
    value = source.value if source.value is None or not target.is_floating_point() else source.value.to(target.dtype)
    return Tracked(list(source.labels), value, source.is_parameter)


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def filled(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of what gave the shape."""
    source = tracer.get(args[0]) or Tracked()
    return Tracked(list(source.labels), out if out.is_floating_point() and tracer.constants else None)


@rule("copy")
def copy_into(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels after writing into a tensor: into a view of another, which keeps its own, they are fixed."""
    target, source = tracer.get(args[0]), tracer.get(args[1])
    if tracer.is_aliased(args[0]) or source is None or target is not None:
        tracer.pin(args[:2], f"it is written into a part of another tensor in {tracer.here()}")
        return Tracked()
    return Tracked([label.expand(out.shape) for label in source.labels])


@rule("cat", "concat")
def cat(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels behind each other along the dim, united across the operands along every other."""
    tensors = [tensor for tensor in args[0] if tensor.numel()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    found = [tracer.get(tensor) or Tracked() for tensor in tensors]
    across = [[label for label in item.labels if dim not in varying_dims(label)] for item in found]
    along = [[label for label in item.labels if dim in varying_dims(label)] for item in found]
    wide = [[label.narrow(dim, 0, 1).expand(out.shape) for label in labels] for labels in across]
    for index, labels in enumerate(wide):
        for other, tensor in enumerate(tensors):
            if other != index:
                restrict(tracer, labels, tensor.narrow(dim, 0, 1).expand(out.shape), wide[other])
    merged = join(tracer, wide)
    if any(along):
        pieces = []
        for labels, tensor in zip(along, tensors, strict=True):
            for extra in labels[1:]:
                tracer.positions.pin(extra, f"it is concatenated with another axis in {tracer.here()}")
            fixed = torch.full((1,), FIXED, device=tensor.device).expand(tensor.shape)
            pieces.append(labels[0] if labels else fixed)
        merged.append(torch.cat(pieces, dim))
    value = None
    if any(item.value is not None for item in found):
        parts = [
            torch.full_like(tensor, float("nan"), dtype=out.dtype) if item.value is None else item.value.to(out.dtype)
            for item, tensor in zip(found, tensors, strict=True)
        ]
        value = torch.cat(parts, dim)
    parameter = all(item.is_parameter for item in found)
    return Tracked(merged, value, parameter)


@rule("stack")
def stack(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels united across the operands; the new dim is of fixed size."""
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    found = [tracer.get(tensor) or Tracked() for tensor in args[0]]
    wide = [[label.unsqueeze(dim).expand(out.shape) for label in item.labels] for item in found]
    for index, labels in enumerate(wide):
        for other, tensor in enumerate(args[0]):
            if other != index:
                restrict(tracer, labels, tensor.unsqueeze(dim).expand(out.shape), wide[other])
    values = [item.value for item in found]
    value = (
        torch.stack([item for item in values if item is not None], dim)
        if all(item is not None for item in values)
        else None
    )
    return Tracked(join(tracer, wide), value, all(item.is_parameter for item in found))


@rule("constant_pad_nd")
def pad(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels of a padded tensor; padding along a labelled dim fixes its size."""
    source = tracer.get(args[0]) or Tracked()
    labels = []
    for label in source.labels:
        if any(label.shape[dim] != out.shape[dim] for dim in varying_dims(label)):
            tracer.positions.pin(label, f"it is padded to a fixed size in {tracer.here()}")
            continue
        for dim in range(label.ndim):
            if label.shape[dim] != out.shape[dim]:
                label = label.narrow(dim, 0, 1)
        labels.append(label.expand(out.shape))
    value = None if source.value is None else func(source.value, *args[1:], **kwargs)
    return Tracked(labels, value)


@rule("index", "index_select", "gather", "embedding_bag", "take_along_dim")
def index(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels of picked elements; positions that are picked by number stay."""
    source = tracer.get(args[0]) or Tracked()
    name = func._schema.name
    if name == "aten::index":
        picked = {dim for dim, item in enumerate(args[1]) if item is not None}
        if any(item is not None and item.dtype == torch.bool and item.ndim > 1 for item in args[1]):
            picked = set(range(args[0].ndim))
    elif name in ("aten::index_select", "aten::gather"):
        picked = {args[1] % args[0].ndim}
        if name == "aten::gather":
            picked |= {dim for dim in range(out.ndim) if out.shape[dim] != args[0].shape[dim]}
    else:
        picked = set(range(args[0].ndim))
    labels = []
    for label in source.labels:
        if picked & set(varying_dims(label)):
            tracer.positions.pin(label, f"its positions are picked by number in {tracer.here()}")
        else:
            labels.append(func(label, *args[1:], **kwargs))
    value = None if source.value is None else func(source.value, *args[1:], **kwargs)
    return Tracked(labels, value, source.is_parameter)


@rule("embedding")
def embedding(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of a table's columns; its rows are picked by the input and stay."""
    source = tracer.get(args[0]) or Tracked()
    labels = []
    for label in source.labels:
        if varying_dims(label) == (1,):
            tracer.positions.mark(label, Role.OUT)
            labels.append(label[0].expand(out.shape))
        else:
            tracer.positions.pin(label, f"its rows are picked by the input in {tracer.here()}")
    value = None
    if source.value is not None:
        same = (source.value == source.value[:1]).all(0)
        value = torch.where(same, source.value[0], torch.full_like(source.value[0], float("nan"))).expand(out.shape)
    return Tracked(labels, value)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]
