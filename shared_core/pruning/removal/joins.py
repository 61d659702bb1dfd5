"""What it means that labelled tensors meet: equal positions are united, what cannot follow is fixed."""

from __future__ import annotations

from torch import Tensor

from shared_core.pruning.removal.positions import varying_dims
from shared_core.pruning.removal.trace import Tracer


def real_dims(tensor: Tensor) -> set[int]:
    """Return the dims along which a tensor has different elements, not one that is repeated."""
    return {
        dim
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and stride != 0
    }


def covered(labels: list[Tensor]) -> set[int]:
    """Return the dims along which one of the labels varies."""
    return {dim for label in labels for dim in varying_dims(label)}


def restrict(tracer: Tracer, labels: list[Tensor], other: Tensor, other_labels: list[Tensor]) -> None:
    """Fix labels along the dims of another operand that no label of its own covers: its size stays.

    Args:
        tracer: Notes it.
        labels: Of the shape of the result.
        other: The other operand, expanded to that shape.
        other_labels: Its labels in that shape.
    """
    fixed = (real_dims(other) - covered(other_labels)) & covered(labels)
    # what is the same for all positions is made as wide as it must be: zeros to which a mask was added
    if fixed and other.untyped_storage().data_ptr() not in tracer.inputs:
        fixed = {dim for dim in fixed if not bool((other == other.narrow(dim, 0, 1)).all())}
    for label in labels:
        dims = tuple(dim for dim in varying_dims(label) if dim in fixed)
        if dims:
            reason = f"it meets a tensor of fixed size in {tracer.here()}"
            tracer.positions.unite_along(label, dims, reason)


def join(tracer: Tracer, operands: list[list[Tensor]]) -> list[Tensor]:
    """Return the labels of a result whose operands have these, all of its shape, and unite what meets.

    Two labels over the same dims are united place by place. Where one varies over a part of the other's dims, the
    finer one can follow only if that part is its first dim (the heads of heads x head size): then each head is removed
    whole. Otherwise (a vector over the head size, shared by all heads) the coarser one stays as it is.
    """
    merged: list[Tensor] = []
    for labels in operands:
        for label in labels:
            merged = _add(tracer, merged, label)
    return merged


def _add(tracer: Tracer, merged: list[Tensor], label: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    dims = set(varying_dims(label))
    for other in merged:
        others = set(varying_dims(other))
        if not dims & others:
            kept.append(other)
        elif dims == others:
            tracer.positions.unite(other, label)
            label = other
        elif dims < others or others < dims:
            fine, coarse = (other, label) if dims < others else (label, other)
            _follow(tracer, fine, coarse)
            label, dims = fine, set(varying_dims(fine))
        else:
            reason = f"it meets another axis in {tracer.here()}"
            tracer.positions.pin(label, reason)
            tracer.positions.pin(other, reason)
            kept.append(other)
    return [*kept, label]


def _follow(tracer: Tracer, fine: Tensor, coarse: Tensor) -> None:
    fine_dims, coarse_dims = varying_dims(fine), varying_dims(coarse)
    if fine_dims[0] in coarse_dims:
        rest = tuple(dim for dim in fine_dims if dim not in coarse_dims)
        tracer.positions.unite_along(fine, rest, "")
        tracer.positions.unite(fine, coarse)
        return
    tracer.positions.unite_along(fine, coarse_dims, f"it meets a shared axis in {tracer.here()}")
    tracer.positions.pin(coarse, f"it is shared by several heads in {tracer.here()}")
