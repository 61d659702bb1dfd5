"""Matrix products: what is summed over is united, the rest becomes the labels of the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared_core.pruning.removal import constants
from shared_core.pruning.removal.joins import join, restrict
from shared_core.pruning.removal.positions import Role, flat_ids, varying_dims
from shared_core.pruning.removal.trace import Tracer, Tracked, rule


@rule("mm", "bmm", "mv", "dot", "matmul", "linear")
def matrix_product(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of a product of two matrices, or batches of them."""
    first, second = args[:2]
    if first.ndim != second.ndim or first.ndim < 2 or len(args) > 2:
        name = func._schema.name.removeprefix("aten::")
        tracer.pin(args, f"the operator {name} in {tracer.here()} is not followed")
        return Tracked()
    return _product(tracer, first, second, out)


@rule("addmm", "baddbmm")
def product_and_sum(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of a product to which something is added, mostly a bias."""
    result = _product(tracer, args[1], args[2], out)
    bias, beta, alpha = args[0], kwargs.get("beta", 1), kwargs.get("alpha", 1)
    return add_bias(tracer, result, bias, out, shape=tuple(bias.shape), factors=(beta, alpha)) if beta else result


@rule("_grouped_mm")
def experts_product(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of tokens multiplied each by the matrix of its expert: (tokens, K) and (experts, K, N)."""
    tokens, weights = args[:2]
    source, stacked = tracer.get(tokens) or Tracked(), tracer.get(weights) or Tracked()
    if tokens.ndim != 2 or weights.ndim != 3 or not stacked.is_parameter or (len(args) > 3 and args[3] is not None):
        tracer.pin(args, f"experts in {tracer.here()} are not followed")
        return Tracked()
    labels = []
    for label in stacked.labels:
        if varying_dims(label) not in ((1,), (2,)):
            tracer.positions.pin(label, f"the router of {tracer.here()} chooses among them")
        else:
            labels.append(label[0])
    value = None
    if stacked.value is not None:
        value = constants.agreed(stacked.value, (0,))  # NaN where experts differ: unknown, but not zero
    matrix = Tracked(labels, value, True)
    return _product(tracer, tokens, weights[0], out, (source, matrix))


def add_bias(
    tracer: Tracer,
    result: Tracked,
    bias: Tensor,
    out: Tensor,
    *,
    shape: tuple[int, ...],
    factors: tuple[float, float] = (1, 1),
) -> Tracked:
    """Return what is known of a product after a bias was added.

    Args:
        tracer: Notes what meets.
        result: The product.
        bias: Of any shape that `shape` holds.
        out: The sum.
        shape: Of the bias, for it to broadcast against the sum.
        factors: Of the bias and of the product.
    """
    found = tracer.get(bias) or Tracked()
    labels = [label.reshape(shape).expand(out.shape) for label in found.labels]
    if found.is_parameter:
        for label in found.labels:
            tracer.positions.mark(label, Role.OUT)
    restrict(tracer, result.labels, bias.reshape(shape).expand(out.shape), labels)
    restrict(tracer, labels, out, result.labels)
    value = None
    if result.value is not None and found.value is not None:
        value = result.value * factors[1] + found.value.reshape(shape) * factors[0]
    return Tracked(join(tracer, [result.labels, labels]), value)


def _product(
    tracer: Tracer, first: Tensor, second: Tensor, out: Tensor, known: tuple[Tracked, Tracked] | None = None
) -> Tracked:
    found = list(known) if known else [tracer.get(first) or Tracked(), tracer.get(second) or Tracked()]
    rows, columns = first.ndim - 2, first.ndim - 1  # of the result; summed: columns of the first, rows of the second
    for item, summed in zip(found, (columns, rows), strict=True):
        if item.is_parameter and not all(other.is_parameter for other in found):
            for label in item.labels:
                tracer.positions.mark(label, Role.IN if summed in varying_dims(label) else Role.OUT)
    _meet(tracer, found, columns, rows)
    results = []
    for item, summed, free in ((found[0], columns, rows), (found[1], rows, columns)):
        labels = []
        for label in item.labels:
            if varying_dims(label) == (summed,):
                continue
            labels.append(label.narrow(summed, 0, 1).expand(_with(out.shape, free, label.shape[free])))
        results.append(labels)
    value = None
    if tracer.constants:
        _note_summed(tracer, found, (first, second), columns, rows)
        value = _known_product(found, first, second)
    parameter = all(item.is_parameter for item in found)
    return Tracked(join(tracer, results), value, parameter)


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [size if index == dim else length for index, length in enumerate(shape)]


def _meet(tracer: Tracer, found: list[Tracked], columns: int, rows: int) -> None:
    """Unite the labels of what is summed over."""
    here = tracer.here()
    firsts = [label for label in found[0].labels if columns in varying_dims(label)]
    seconds = [label for label in found[1].labels if rows in varying_dims(label)]
    if not firsts or not seconds:
        for label, dim in [*((label, columns) for label in firsts), *((label, rows) for label in seconds)]:
            tracer.positions.unite_along(label, (dim,), f"it meets what has a fixed size in {here}")
        return
    weight = found[0].is_parameter or found[1].is_parameter
    for first in firsts:
        for second in seconds:
            extra = [set(varying_dims(first)) - {columns}, set(varying_dims(second)) - {rows}]
            batch = extra[0] == extra[1] and not extra[0] & {rows, columns}
            if batch:
                tracer.positions.unite(first.select(rows, 0), second.select(columns, 0))
            if batch and weight:
                continue
            for label, dim in ((first, columns), (second, rows)):
                tracer.positions.unite_along(label, (dim,), f"{here} sums over it together with another tensor's")
                if extra[0] and not weight:
                    tracer.positions.in_heads[flat_ids(label)] = True
                elif extra[0] != extra[1] and varying_dims(label) == (dim,):
                    tracer.positions.pin(label, f"it is shared by several heads in {here}")


def _note_summed(tracer: Tracer, found: list[Tracked], tensors: tuple[Tensor, Tensor], columns: int, rows: int) -> None:
    """Note what arrives at the positions of a weight that are summed over."""
    for weight, other, dim, other_dim in ((0, 1, columns, rows), (1, 0, rows, columns)):
        if not found[weight].is_parameter or found[other].is_parameter:
            continue
        value = found[other].value
        if value is not None:
            value = constants.agreed(value, tuple(index for index in range(value.ndim) if index != other_dim))
        for label in found[weight].labels:
            if dim not in varying_dims(label):
                continue
            if varying_dims(label) != (dim,) or value is None:
                tracer.sum_over(label, None)
            else:
                tracer.sum_over(label, value)


def _known_product(found: list[Tracked], first: Tensor, second: Tensor) -> Tensor | None:
    values = [item.value for item in found]
    if values[0] is None and values[1] is None:
        return None
    contract = torch.bmm if first.ndim == 3 else torch.mm
    if values[0] is None or values[1] is None:
        summed = -2 if values[0] is None else -1
        if not any(bool((value == 0).all(summed).any()) for value in values if value is not None):
            return None
    full = [
        torch.full_like(tensor, float("nan")) if value is None else value
        for value, tensor in zip(values, (first, second), strict=True)
    ]
    return constants.unless_unknown(constants.contraction(full[0], full[1], contract))
