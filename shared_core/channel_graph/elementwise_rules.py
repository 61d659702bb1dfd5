"""Rules for operators that keep channels apart: moves, copies, element-wise functions, reductions, pooling, norms.

Each rule maps the channel ids and the known constants of its inputs to its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shared_core.channel_graph import graph as constants
from shared_core.channel_graph.graph import (
    FIXED,
    Normalized,
    Role,
    Tracer,
    Tracked,
    along,
    core,
    join,
    restrict,
    rule,
    varying_dims,
)


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def view(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels in the new shape. This is exact, because a label holds an id for every element."""
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
    """Apply the same operator to labels and constants."""
    source = tracer.get(args[0]) or Tracked()
    # The operator itself runs on the int64 ids, so ids move with their elements.
    labels = [_listed(func(label, *args[1:], **kwargs)) for label in source.labels]
    count = len(_listed(out))
    values = [None] * count if source.value is None else _listed(func(source.value, *args[1:], **kwargs))
    return [Tracked([moved[i] for moved in labels], values[i], source.is_parameter) for i in range(count)]


@rule("clone", "_to_copy", "contiguous", "lift_fresh", "dropout", "native_dropout", "to")
def copy(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the same labels, and constants in the new dtype."""
    source = tracer.get(args[0]) or Tracked()
    target = out[0] if isinstance(out, tuple) else out
    # Integers computed from constants (masks, indices) are not tracked: their values may depend on sizes.
    value = source.value if source.value is None or not target.is_floating_point() else source.value.to(target.dtype)
    return Tracked(list(source.labels), value, source.is_parameter)


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def filled(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of the tensor that gives the shape."""
    source = tracer.get(args[0]) or Tracked()
    # A tensor of zeros as wide as another shrinks with it, so it gets its labels although no value came from it.
    return Tracked(list(source.labels), out if out.is_floating_point() and tracer.constants else None)


@rule("copy")
def copy_into(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels after writing into a tensor. Writing into a view pins them, as its base keeps its own."""
    target, source = tracer.get(args[0]), tracer.get(args[1])
    # A view shares memory with its base, whose labels would also have to change. Pin instead.
    if tracer.is_aliased(args[0]) or source is None or target is not None:
        tracer.pin(args[:2], f"it is written into a part of another tensor in {tracer.here()}")
        return Tracked()
    return Tracked([label.expand(out.shape) for label in source.labels])


@rule("cat", "concat")
def cat(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels concatenated along the dim and united across operands along all other dims."""
    tensors = [tensor for tensor in args[0] if tensor.numel()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    found = [tracer.get(tensor) or Tracked() for tensor in tensors]
    # Labels along the dim are concatenated. Labels across it must agree between operands.
    across = [[label for label in item.labels if dim not in varying_dims(label)] for item in found]
    along = [[label for label in item.labels if dim in varying_dims(label)] for item in found]
    # Across the dim a label is equal at each index, so one slice of it can be expanded to the longer result.
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
            # An operand without a label along the dim gets ids that can never be removed.
            fixed = torch.full((1,), FIXED, device="cpu").expand(tensor.shape)
            pieces.append(labels[0] if labels else fixed)
        merged.append(torch.cat(pieces, dim))
    value = None
    if any(item.value is not None for item in found):
        parts = [
            # Unknown constants are NaN in this module. Known parts of a concatenation stay known.
            torch.full_like(tensor, float("nan"), dtype=out.dtype) if item.value is None else item.value.to(out.dtype)
            for item, tensor in zip(found, tensors, strict=True)
        ]
        value = torch.cat(parts, dim)
    parameter = all(item.is_parameter for item in found)
    return Tracked(merged, value, parameter)


@rule("stack")
def stack(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return labels united across the operands. The new dim has a fixed size."""
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    found = [tracer.get(tensor) or Tracked() for tensor in args[0]]
    wide = [[label.unsqueeze(dim).expand(out.shape) for label in item.labels] for item in found]
    for index, labels in enumerate(wide):
        for other, tensor in enumerate(args[0]):
            # As in `cat`: an operand without its own label has a fixed size, which binds the others.
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
    """Return the labels of a padded tensor. Padding along a labeled dim fixes its size."""
    source = tracer.get(args[0]) or Tracked()
    # Padding adds positions without an id, so the size would be the old one plus the padding.
    labels = _resized(tracer, source.labels, out.shape, "it is padded to a fixed size in")
    value = None if source.value is None else func(source.value, *args[1:], **kwargs)
    return Tracked(labels, value)


def _resized(tracer: Tracer, labels: list[Tensor], shape: torch.Size, reason: str) -> list[Tensor]:
    """Expand labels to another shape. Labels along a dim whose size changes are pinned with `reason` and the module."""
    found = []
    for label in labels:
        if any(label.shape[dim] != shape[dim] for dim in varying_dims(label)):
            tracer.positions.pin(label, f"{reason} {tracer.here()}")
        else:
            found.append(core(label).expand(shape))
    return found


@rule("index", "index_select", "gather", "embedding_bag", "take_along_dim")
def index(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of indexed elements. Positions selected by number cannot be removed."""
    source = tracer.get(args[0]) or Tracked()
    name = func._schema.name
    if name == "aten::index":
        picked = {dim for dim, item in enumerate(args[1]) if item is not None}
        # A bool index covers as many dims as it has. Treat all dims as indexed, for simplicity.
        if any(item is not None and item.dtype == torch.bool and item.ndim > 1 for item in args[1]):
            picked = set(range(args[0].ndim))
    elif name in ("aten::index_select", "aten::gather"):
        picked = {args[1] % args[0].ndim}
        if name == "aten::gather":
            # gather also shortens the other dims to the size of its index.
            picked |= {dim for dim in range(out.ndim) if out.shape[dim] != args[0].shape[dim]}
    else:
        picked = set(range(args[0].ndim))
    labels, places = [], tree_map(_any_places, args[1:])
    for label in source.labels:
        if picked & set(varying_dims(label)):
            tracer.positions.pin(label, f"its positions are selected by number in {tracer.here()}")
        else:
            labels.append(func(label, *places, **kwargs))
    value = None if source.value is None else func(source.value, *args[1:], **kwargs)
    return Tracked(labels, value, source.is_parameter)


def _any_places(index: Any) -> Any:
    """Return an index for labels, on the CPU. Labels are equal along indexed dims, so only its shape matters."""
    if not isinstance(index, Tensor):
        return index
    return index.cpu() if index.dtype in (torch.bool, torch.uint8) else torch.zeros_like(index, device="cpu")


@rule("embedding")
def embedding(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tracked:
    """Return the labels of a table's columns. Its rows are selected by the input and cannot be removed."""
    source = tracer.get(args[0]) or Tracked()
    labels = []
    for label in source.labels:
        # The table is (rows, columns), and only the columns reach the output.
        if varying_dims(label) == (1,):
            tracer.positions.mark(label, Role.OUT)
            labels.append(label[0].expand(out.shape))
        else:
            tracer.positions.pin(label, f"its rows are selected by the input in {tracer.here()}")
    value = None
    if source.value is not None:
        # The output is known where all rows agree, for any input.
        same = (source.value == source.value[:1]).all(0)
        value = torch.where(same, source.value[0], torch.full_like(source.value[0], float("nan"))).expand(out.shape)
    return Tracked(labels, value)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


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
    """Return labels united over the operands, and the operator's result on constants."""
    name = func._schema.name.removeprefix("aten::")
    name = name.removesuffix("_") if func._schema.is_mutable else name
    if func._schema.is_mutable and tracer.is_aliased(args[0]):
        tracer.pin((args, kwargs), f"it is written into a part of another tensor in {tracer.here()}")
        return Tracked()
    operands = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    found = [tracer.get(item) or Tracked() for item in operands]
    # Broadcasting also expands labels. Stride 0 marks that ids do not differ along the new dims.
    wide = [[label.expand(out.shape) for label in item.labels] for item in found]
    # In both directions: each operand's size may bind the labels of every other.
    for index, labels in enumerate(wide):
        for other, tensor in enumerate(operands):
            if other != index and labels:
                restrict(tracer, labels, tensor.expand(out.shape), wide[other])
    parameter = all(item.is_parameter for item in found)
    # A parameter combined with an activation scales it (NORM) or contributes to it (OUT), as a bias does. Two
    # parameters alone (weight norm) give a parameter, whose role is determined where it is used.
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
        # An in-place operator would write into constants that other tensors share.
        value = known[id(item)]
        if value is not None:
            return value.clone() if func._schema.is_mutable and item is args[0] else value
        return torch.full_like(item, float("nan")) if item.is_floating_point() else item

    # An unknown index or bool may select any value, so nothing of the result is known.
    if name not in ("where", "masked_fill") and any(
        isinstance(item, Tensor) and not item.is_floating_point() and known[id(item)] is None and item.numel() > 1
        for item in args
    ):
        return None
    found_args, found_kwargs = tree_map(constant, args), tree_map(constant, kwargs)
    value = constants.unless_unknown(constants.pointwise(name, func, found_args, found_kwargs))
    # These four have their own rules, where 0 times unknown is 0. Others return NaN for NaN.
    if value is None or name in ("mul", "div", "where", "masked_fill"):
        return value
    for item in found_args:  # some operators return a number for NaN: sign, fmax, nan_to_num
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
    """Return labels over the remaining dims. A sum over labeled positions needs removed ones to be zero."""
    source = tracer.get(args[0]) or Tracked()
    name = func._schema.name.removeprefix("aten::")
    if isinstance(out, tuple):
        tracer.pin(args[0], f"{name} in {tracer.here()} is not followed")
        return Tracked()
    # norm(x, p, dim): the dims come after p.
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
        # A label that only varies along reduced dims does not reach the result.
        if summed and summed == varying_dims(label):
            continue
        for dim in sorted(dims, reverse=True):
            label = label.narrow(dim, 0, 1) if keep else label.select(dim, 0)
        labels.append(label)
    value = None if source.value is None else func(source.value, *args[1:], **kwargs)
    return Tracked(labels, value, source.is_parameter)


def reduce_label(tracer: Tracer, label: Tensor, dims: tuple[int, ...], value: Tensor | None, name: str) -> None:
    """Record that a label is reduced along some of its dims."""
    # If it varies along other dims too ((head, channel), reduced over channels), remove all or nothing per head.
    if dims != varying_dims(label):
        tracer.positions.unite_along(label, dims, "")
    elif name in _SUMS:
        _summed(tracer, label, value)
    elif name in ("mean", "rms", "layer"):
        _summed(tracer, label, value)
        # A mean divides by the number of positions. Whoever removes some must rescale.
        tracer.norms.append(Normalized(name, tracer.here(), core(label), dims))
    else:
        tracer.positions.pin(label, f"{name} in {tracer.here()} needs all of it")


def _summed(tracer: Tracer, label: Tensor, value: Tensor | None) -> None:
    if value is None:
        tracer.sum_over(label, None)
        return
    dims = tuple(dim for dim in range(label.ndim) if dim not in varying_dims(label))
    # Constants must agree over all other dims, or there is no single number per position.
    found = constants.agreed(value.expand(label.shape), dims)
    # A nonzero constant has no bias to move into.
    tracer.sum_over(label, torch.where(found == 0, found, torch.full_like(found, float("nan"))))


@rule(*_SOFT)
def needs_all(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Tracked]:
    """Return the labels along the other dims. Nothing can be removed along this one."""
    source = tracer.get(args[0]) or Tracked()
    name = func._schema.name.removeprefix("aten::")
    default = {"topk": -1, "sort": -1}.get(name, 0)
    # topk(x, k, dim).
    position = 2 if name == "topk" else 1
    given = args[position] if len(args) > position else kwargs.get("dim", default)
    dim = (given if isinstance(given, int) else default) % args[0].ndim
    outs = list(out) if isinstance(out, tuple) else [out]
    labels = []
    for label in source.labels:
        if dim in varying_dims(label):
            # Softmax over channels: without one of them all others change, so the whole axis stays.
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
    """Return the labels of channels. Pooling and resizing act on the later dims."""
    source = tracer.get(args[0]) or Tracked()
    target = out[0] if isinstance(out, tuple) else out
    # Pooling changes the size of the last dims, and ids cannot be tracked through a resize.
    name = func._schema.name.removeprefix("aten::")
    labels = _resized(tracer, source.labels, target.shape, f"it is resized by {name} in")
    value = None
    if source.value is not None:
        found = func(source.value, *args[1:], **kwargs)
        value = constants.unless_unknown(found[0] if isinstance(found, tuple) else found)
    return Tracked(labels, value)


@rule(
    "native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm",
    "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update",
)  # fmt: skip
def batch_norm(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the channels, united with their parameters and running statistics."""
    tensor, weight, bias = args[:3]
    statistics = [item for item in args[3:5] if isinstance(item, Tensor)]
    shape = [1, -1, *[1] * (tensor.ndim - 2)]
    source = tracer.get(tensor) or Tracked()
    operands = [source.labels]
    for item, role in ((weight, Role.NORM), (bias, Role.NORM), *((found, Role.STAT) for found in statistics)):
        labels = _parameter(tracer, item, role)
        operands.append([label.reshape(shape).expand(tensor.shape) for label in labels])
    value = _affine(tracer, weight, bias, shape)
    # In eval mode (running statistics as arguments) a constant input gives a constant output.
    if len(statistics) == 2 and source.value is not None:
        found = func(source.value, *args[1:], **kwargs)
        # Where the input is unknown, the output is still the bias if the scale is 0.
        value = found[0] if value is None else torch.where(found[0].isnan(), value.expand(tensor.shape), found[0])
    return Tracked(join(tracer, operands), None if value is None else value.expand(tensor.shape))


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the labels, united with the parameters. If a labeled dim is normalized over, record the norm."""
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
        # Normalized over labeled positions: removing some changes the mean and variance of the others.
        over = tuple(dim for dim in varying_dims(label) if dim in dims)
        if over:
            reduce_label(tracer, label, over, source.value, "rms" if is_rms else "layer")
    value = _affine(tracer, weight, bias, None)
    # RMS norm maps 0 to 0. Layer norm subtracts the mean of all, so a constant input does not give a constant output.
    if is_rms and source.value is not None:
        zero = torch.where(source.value == 0, source.value, torch.full_like(source.value, float("nan")))
        value = zero if value is None else torch.where(zero.isnan(), value.expand(tensor.shape), zero)
    return Tracked(join(tracer, operands), None if value is None else value.expand(tensor.shape))


@rule("native_group_norm")
def group_norm(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Tracked:
    """Return the channels. Those of a group share statistics and are removed together."""
    tensor, weight, bias = args[:3]
    groups = args[6]
    shape = [1, -1, *[1] * (tensor.ndim - 2)]
    source = tracer.get(tensor) or Tracked()
    operands = [source.labels]
    for item in (weight, bias):
        operands.append([label.reshape(shape).expand(tensor.shape) for label in _parameter(tracer, item, Role.NORM)])
    for label in source.labels:
        if varying_dims(label) != (1,):
            tracer.positions.pin(label, f"{tracer.here()} normalizes over it")
            continue
        # (groups, channels per group): each group has its own statistics, so it is removed whole or not at all.
        channels = along(label, 1).reshape(groups, -1)
        if groups == 1:
            tracer.positions.pin(label, f"{tracer.here()} normalizes over all of it")
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
    """Return the bias where the scale is zero, because the output is constant there."""
    found = tracer.get(weight)
    if not tracer.constants or found is None or found.value is None:
        return None
    shift = tracer.get(bias)
    constant = shift.value if shift is not None and shift.value is not None else torch.zeros_like(found.value)
    value = torch.where(found.value == 0, constant, torch.full_like(constant, float("nan")))
    return constants.unless_unknown(value if shape is None else value.reshape(shape))
