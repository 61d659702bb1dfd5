"""Matrix products and convolutions. Summed dims are united, and the free dims become labels of the result.

Groups of a grouped convolution are removed whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared_core.channel_graph import graph as constants
from shared_core.channel_graph.graph import Role, Tracer, Tracked, along, flat_ids, join, restrict, rule, varying_dims


@rule("mm", "bmm", "mv", "dot", "matmul", "linear")
def matrix_product(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of a product of two matrices, or batches of them."""
    first, second = args[:2]
    # torch expands broadcast batches and vectors before mm and bmm. Other cases are rare.
    if first.ndim != second.ndim or first.ndim < 2 or len(args) > 2:
        name = func._schema.name.removeprefix("aten::")
        tracer.pin(args, f"the operator {name} in {tracer.here()} is not supported")
        return Tracked()
    return _product(tracer, first, second, out)


@rule("addmm", "baddbmm")
def product_and_sum(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of a product plus another tensor, usually a bias."""
    result = _product(tracer, args[1], args[2], out)
    bias, beta, alpha = args[0], kwargs.get("beta", 1), kwargs.get("alpha", 1)
    return add_bias(tracer, result, bias, out, shape=tuple(bias.shape), factors=(beta, alpha)) if beta else result


@rule("_grouped_mm")
def experts_product(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of tokens multiplied by the matrix of their expert: (tokens, K) and (experts, K, N)."""
    tokens, weights = args[:2]
    source, stacked = tracer.get(tokens) or Tracked(), tracer.get(weights) or Tracked()
    if tokens.ndim != 2 or weights.ndim != 3 or not stacked.is_parameter or (len(args) > 3 and args[3] is not None):
        tracer.pin(args, f"this form of experts in {tracer.here()} is not supported")
        return Tracked()
    labels = []
    # The router chooses experts at run time, so the axis of experts stays.
    for label in stacked.labels:
        if varying_dims(label) not in ((1,), (2,)):
            tracer.positions.pin(label, f"the router of {tracer.here()} chooses among them")
        else:
            # All experts have the same K and N ids, so one matrix represents all.
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
    """Return what is known about a product after adding a bias."""
    found = tracer.get(bias) or Tracked()
    labels = [label.reshape(shape).expand(out.shape) for label in found.labels]
    if found.is_parameter:
        for label in found.labels:
            tracer.positions.mark(label, Role.OUT)
    # A bias without labels has a fixed length and so fixes the rows, and vice versa.
    restrict(tracer, result.labels, bias.reshape(shape).expand(out.shape), labels)
    restrict(tracer, labels, out, result.labels)
    value = None
    if result.value is not None and found.value is not None:
        # beta * bias + alpha * product.
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
                # Along the summed dim a weight consumes positions (IN), along its free dim it produces them (OUT).
                tracer.positions.mark(label, Role.IN if summed in varying_dims(label) else Role.OUT)
    _meet(tracer, found, columns, rows)
    results = []
    for item, summed, free in ((found[0], columns, rows), (found[1], rows, columns)):
        labels = []
        for label in item.labels:
            # The label is summed over and does not reach the result.
            if varying_dims(label) == (summed,):
                continue
            # Replace the summed dim of the label by the other free dim of the result.
            labels.append(label.narrow(summed, 0, 1).expand(_with(out.shape, free, label.shape[free])))
        results.append(labels)
    value = None
    if tracer.constants:
        _note_summed(tracer, found, columns, rows)
        value = _known_product(found, first, second)
    parameter = all(item.is_parameter for item in found)
    return Tracked(join(tracer, results), value, parameter)


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [size if index == dim else length for index, length in enumerate(shape)]


def _meet(tracer: Tracer, found: list[Tracked], columns: int, rows: int) -> None:
    """Unite the labels of the summed dims."""
    here = tracer.here()
    firsts = [label for label in found[0].labels if columns in varying_dims(label)]
    seconds = [label for label in found[1].labels if rows in varying_dims(label)]
    # Only one side is labeled along the sum. The other side has a fixed size, so no single position can be removed.
    if not firsts or not seconds:
        if any(map(tracer.takes_zeros, found)):
            return
        for label, dim in [*((label, columns) for label in firsts), *((label, rows) for label in seconds)]:
            tracer.positions.unite_along(label, (dim,), f"it is combined with a fixed size in {here}")
        return
    weight = found[0].is_parameter or found[1].is_parameter
    for first in firsts:
        for second in seconds:
            # Other dims along which each label varies: the batch dim of bmm, which holds heads (and examples).
            extra = [set(varying_dims(first)) - {columns}, set(varying_dims(second)) - {rows}]
            batch = extra[0] == extra[1] and not extra[0] & {rows, columns}
            # Unite by position. First is (batch, rows, K), second (batch, K, columns). Both lose their free dim.
            if batch:
                tracer.positions.unite(first.select(rows, 0), second.select(columns, 0))
            # A weight's columns and the activations that enter it: each channel can be removed alone.
            if batch and weight:
                continue
            # Two activations (queries times keys): all channels of a head are removed together, so that all heads have
            # the same size. If other dims distinguish heads, a head is removed whole.
            for label, dim in ((first, columns), (second, rows)):
                tracer.positions.unite_along(label, (dim,), f"{here} sums over it together with another tensor's")
                if extra[0] and not weight:
                    tracer.positions.in_heads[flat_ids(label)] = True
                elif extra[0] != extra[1] and varying_dims(label) == (dim,):
                    tracer.positions.pin(label, f"several heads share it in {here}")


def _note_summed(tracer: Tracer, found: list[Tracked], columns: int, rows: int) -> None:
    """Record the constants at the summed positions of a weight."""
    # To remove inputs without changing outputs: constants at removed columns move into the bias, W[:, gone] c.
    for weight, other, dim, other_dim in ((0, 1, columns, rows), (1, 0, rows, columns)):
        if not found[weight].is_parameter or found[other].is_parameter:
            continue
        value = found[other].value
        if value is not None:
            # One number per summed position, over all tokens and examples of the trace.
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
    # If one side is unknown, the product is only known where the known side has a row or column of zeros.
    if values[0] is None or values[1] is None:
        summed = -2 if values[0] is None else -1
        if not any(bool((value == 0).all(summed).any()) for value in values if value is not None):
            return None
    full = [
        torch.full_like(tensor, float("nan")) if value is None else value
        for value, tensor in zip(values, (first, second), strict=True)
    ]
    return constants.unless_unknown(constants.contraction(full[0], full[1], contract))


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the channels of a convolution. Each group of a grouped convolution is removed whole."""
    tensor, weight, bias = args[:3]
    padding, transposed, groups = args[4], args[6], args[8]
    source, kernel = tracer.get(tensor) or Tracked(), tracer.get(weight) or Tracked()
    here = tracer.here()
    out_axis, in_axis = (1, 0) if transposed else (0, 1)
    # Activations are (batch, channels, places), and only the first two dims survive a convolution.
    channels = [label for label in source.labels if varying_dims(label) == (1,)]
    batch = [label for label in source.labels if varying_dims(label) == (0,)]
    for label in source.labels:
        if varying_dims(label) not in ((0,), (1,)):
            tracer.positions.pin(label, f"{here} convolves over it")
    outs = [label for label in kernel.labels if varying_dims(label) == (out_axis,)]
    ins = [label for label in kernel.labels if varying_dims(label) == (in_axis,)]
    for label in kernel.labels:
        if varying_dims(label) not in ((0,), (1,)) or not kernel.is_parameter:
            tracer.positions.pin(label, f"it is the kernel size in {here}")
    for label in outs:
        tracer.positions.mark(label, Role.OUT)
        tracer.positions.in_convolutions[flat_ids(label)] = True
    # (outputs,) to (1, outputs, 1, ...), expanded: a label on dim 1 of the result.
    produced = [_channels(along(label, out_axis), out) for label in outs]
    if groups == 1:
        for label in ins:
            tracer.positions.mark(label, Role.IN)
            if not channels:
                tracer.positions.pin(label, f"it is combined with a fixed size in {here}")
            # groups = 1: every output reads every input channel, so each can be removed alone.
            for other in channels:
                tracer.positions.unite(along(other, 1), along(label, in_axis))
        for label in channels if not ins and not tracer.takes_zeros(kernel) else ():
            tracer.positions.pin(label, f"it is combined with a fixed size in {here}")
    elif transposed or not outs or not channels:
        tracer.pin((tensor, weight), f"{here} is a grouped convolution that is not supported")
        produced = []
    else:
        # Each group reads its own inputs and makes its own outputs, so the group is the unit.
        for label in ins:
            tracer.positions.pin(label, f"it is the group size in {here}")
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
    # At a padded border, and anywhere after a transposed convolution, some terms of the sum are missing.
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
    # Without input constants, the output is only known for kernels of zeros.
    if source.value is None and not bool((kernel.value.flatten(1) == 0).all(1).any()) and not args[6]:
        return None

    def contract(first: Tensor, second: Tensor) -> Tensor:
        result: Tensor = func(first, second, None, *args[3:])
        return result

    value = torch.full_like(tensor, float("nan")) if source.value is None else source.value
    return constants.unless_unknown(constants.contraction(value, kernel.value, contract))
