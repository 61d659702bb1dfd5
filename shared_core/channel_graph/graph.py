"""The channel graph: an id for each position of each tensor axis. Positions with the same id are removed together.

Operator rules unite the ids of positions that depend on each other, or mark them as fixed. Values that no input changes
are tracked too, with NaN for unknown values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


def unless_unknown(value: Tensor | None) -> Tensor | None:
    """Return the constants, or None if none is known."""
    return None if value is None or not value.is_floating_point() or bool(value.isnan().all()) else value


def product(first: Tensor, second: Tensor) -> Tensor:
    """Return the product of two tensors of constants, where zero times unknown is zero."""
    result = first * second
    # IEEE gives 0 * NaN = NaN, but here NaN is an unknown finite number, and 0 times that is 0.
    return torch.where((first == 0) | (second == 0), torch.zeros_like(result), result)


def contraction(first: Tensor, second: Tensor, contract: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a sum of products of constants. It is unknown if any term is unknown times nonzero."""
    # Sum with unknown values as 0. The number of terms that are unknown times nonzero is (nonzero · nonzero) - (known ·
    # known), both from the same contraction. Where it is above 0, the sum is unknown.
    value = contract(first.nan_to_num(0.0), second.nan_to_num(0.0))
    # Counts up to 2^24 are exact in float32, but not in half precision.
    precise = torch.promote_types(value.dtype, torch.float32)
    nonzero = [(item != 0).to(precise) for item in (first, second)]  # NaN != 0
    known = [((item != 0) & ~item.isnan()).to(precise) for item in (first, second)]
    unknown_terms = contract(*nonzero) - contract(*known)
    return value.masked_fill(unknown_terms > 0.5, float("nan"))


def pointwise(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of an elementwise operator on constants."""
    if name == "mul" and isinstance(args[1], Tensor):
        return product(args[0], args[1])
    if name == "div" and isinstance(args[1], Tensor) and not kwargs:
        result = args[0] / args[1]
        return torch.where(args[0] == 0, torch.zeros_like(result), result)
    if name == "where":
        first, second = (item if isinstance(item, Tensor) else torch.tensor(item) for item in args[1:3])
        # The condition may depend on the input, so the result is only known where both branches agree.
        return torch.where(first == second, first, torch.full_like(first, float("nan")))
    if name == "masked_fill":
        value, fill = args[0], args[2]
        return torch.where(value == fill, value, torch.full_like(value, float("nan")))
    result = func(*args, **kwargs)
    return result if isinstance(result, Tensor) else None


def agreed(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the constants reduced over `dims`, or NaN where they differ along them."""
    if not dims:
        return value
    low, high = value.amin(dims), value.amax(dims)  # NaN if any value is NaN
    return torch.where(low == high, low, torch.full_like(low, float("nan")))


Ids = NDArray[np.int64]

FIXED = 0
"""The id of positions that can never be removed."""


class Role(enum.IntFlag):
    """The role of an axis of a tensor for the values at its positions."""

    OUT = 1
    """It produces them: rows of a weight, its bias, an embedding's columns."""
    NORM = 2
    """It scales or shifts them: the parameters of a norm, a layer scale."""
    IN = 4
    """It consumes them in a sum: columns of a weight."""
    STAT = 8
    """It is computed from them: the running mean and variance of a batch norm."""


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor. Its positions have consecutive ids from `start`."""

    tensor: str
    axis: int
    start: int
    size: int


def varying_dims(label: Tensor) -> tuple[int, ...]:
    """Return the dims along which a label's ids differ.

    A label is an int64 tensor with the shape of the tensor it labels. Along all other dims its stride is 0.
    """
    # An expanded dim has stride 0, which marks equal ids along it without using memory.
    return tuple(
        dim
        for dim, (size, stride) in enumerate(zip(label.shape, label.stride(), strict=True))
        if size > 1 and stride != 0
    )


def core(label: Tensor) -> Tensor:
    """Return the label with size 1 along dims where its ids do not differ."""
    varying = varying_dims(label)
    for dim in range(label.ndim):
        if dim not in varying:
            label = label.narrow(dim, 0, 1)
    return label


def along(label: Tensor, dim: int) -> Tensor:
    """Return the ids along one dim, at the first index of all others."""
    for other in reversed(range(label.ndim)):
        if other != dim:
            label = label.select(other, 0)
    return label


def compact(label: Tensor) -> Tensor:
    """Return the same label with stride 0 along dims where its ids do not differ."""
    # Operators that compute (cat, index, reshape) return dense labels. Expand the repeating dims again.
    shape, inner = label.shape, core(label)
    for dim in range(inner.ndim):
        first = inner.narrow(dim, 0, 1)
        if inner.shape[dim] > 1 and torch.equal(inner, first.expand_as(inner)):
            inner = first
    return inner.expand(shape)


class Positions:
    """Union-find over ids, in bulk: which are removed together, which must stay and why, and their roles."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.axes: dict[tuple[str, int], Axis] = {}
        start = FIXED + 1
        for name, shape in shapes.items():
            for axis, size in enumerate(shape):
                self.axes[name, axis] = Axis(name, axis, start, size)
                start += size
        self.count = start
        self.roles = np.zeros(start, dtype=np.uint8)
        self.in_heads = np.zeros(start, dtype=bool)
        self.in_convolutions = np.zeros(start, dtype=bool)
        self._pairs: list[tuple[Ids, Ids]] = []
        self._pins: list[tuple[Ids, str]] = []

    def label(self, name: str, axis: int, like: Tensor) -> Tensor:
        """Return the label of one axis of a tensor, in the tensor's shape."""
        found = self.axes[name, axis]
        # Always on the CPU: labels are compared in every operator, which would synchronize with a GPU each time.
        ids = torch.arange(found.start, found.start + found.size, device="cpu")
        # One arange along the axis, expanded to the tensor's shape: O(size) memory for any tensor.
        return ids.view([-1 if dim == axis else 1 for dim in range(like.ndim)]).expand(like.shape)

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Record that ids at equal positions are removed together. The labels broadcast against each other."""
        first, second = core(first), core(second)
        shape = np.broadcast_shapes(first.shape, second.shape)
        # Cores broadcast to the smallest common shape: (batch, tokens, channels) has only `channels` ids.
        flat = [label.expand(shape).reshape(-1).numpy() for label in (first, second)]
        # Pairs repeat along every dim in which neither varies.
        pairs = np.unique(np.stack(flat), axis=1)
        self._pairs.append((pairs[0], pairs[1]))

    def unite_along(self, label: Tensor, dims: tuple[int, ...], reason: str) -> None:
        """Record that everything along `dims` is removed together. If no other dim varies, pin it for `reason`."""
        # Nothing else distinguishes members, so they could only be removed all at once, which is never allowed.
        varying = varying_dims(label)
        dims = tuple(dim for dim in dims if dim in varying)
        if dims == varying:
            self.pin(label, reason)
            return
        inner = core(label)
        # Unite each member with the first along `dims`. A star is enough for a union.
        first = inner
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        if dims:
            self.unite(inner, first)

    def pin(self, label: Tensor, reason: str) -> None:
        """Record that none of these ids can be removed. The first reason given is reported."""
        self._pins.append((flat_ids(label), reason))

    def mark(self, label: Tensor, role: Role) -> None:
        """Record the role of an axis for the positions of a label."""
        self.roles[flat_ids(label)] |= int(role)

    def components(self) -> Ids:
        """Return, for every id, the smallest id that it is removed with."""
        parent: Ids = np.arange(self.count, dtype=np.int64)
        if not self._pairs:
            return parent
        first = np.concatenate([pair[0] for pair in self._pairs])
        second = np.concatenate([pair[1] for pair in self._pairs])
        # Connected components by hooking and pointer jumping: every pair hooks the larger root onto the smaller one,
        # then paths are halved until each id points at its root. That takes a few numpy rounds for millions of ids.
        while True:
            low, high = np.minimum(parent[first], parent[second]), np.maximum(parent[first], parent[second])
            open_pairs = low != high
            if not open_pairs.any():
                return parent
            # `minimum.at` is unbuffered: of several hooks onto one root the smallest wins, so no cycle can form.
            np.minimum.at(parent, high[open_pairs], low[open_pairs])
            while not np.array_equal(parent, parent[parent]):
                parent = parent[parent]

    def pinned(self, components: Ids) -> dict[int, str]:
        """Return why components cannot be removed, by their smallest id."""
        reasons: dict[int, str] = {FIXED: "it is combined with a tensor of fixed size"}
        for ids, reason in self._pins:
            for root in np.unique(components[ids]):
                reasons.setdefault(int(root), reason)
        return reasons


def flat_ids(label: Tensor) -> Ids:
    """Return the distinct ids of a label."""
    # Pins and marks repeat over batch and tokens, while the core has each id once.
    found: Ids = np.unique(core(label).reshape(-1).numpy())
    return found


@dataclass
class Tracked:
    """What is known about a tensor.

    Attributes:
        labels: int64 tensors of its shape (see `varying_dims`), one for each set of dims that can be narrowed.
        value: Its values where they do not depend on the input.
        is_parameter: True if it depends only on the model's state.
    """

    labels: list[Tensor] = field(default_factory=list)
    value: Tensor | None = None
    is_parameter: bool = False


@dataclass(frozen=True)
class Normalized:
    """A norm over labeled positions. Narrowing `label` along `dims` changes its divisor."""

    kind: str
    module: str
    label: Tensor
    dims: tuple[int, ...]


Rule = Callable[["Tracer", Any, tuple[Any, ...], dict[str, Any], Any], Any]
RULES: dict[str, Rule] = {}
"""Rules by aten operator name. A rule returns a `Tracked` or None for every output tensor."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks ids and constants through every operator that runs."""

    def __init__(self, model: nn.Module, *, constants: bool, cuts: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants, self.cuts = constants, cuts
        self.names: dict[str, Tensor] = {}
        seen: set[Tensor] = set()
        persistent = set(model.state_dict(keep_vars=True))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # Non-persistent buffers (position ids, causal masks) can be recreated at any size, and are not cut.
            # An empty tensor has nothing to cut.
            if name in persistent and tensor not in seen and tensor.numel():
                seen.add(tensor)
                self.names[name] = tensor
        self.positions = Positions({name: tuple(tensor.shape) for name, tensor in self.names.items()})
        self.constant_of: NDArray[np.float64] = np.zeros(self.positions.count)
        """Constant values at positions that are summed over, NaN where unknown."""
        self.is_summed = np.zeros(self.positions.count, dtype=bool)
        self.norms: list[Normalized] = []
        self.module_names: list[str] = [""]
        self._viewed: set[int] = set()
        self.inputs: set[int] = set()
        """Storage pointers of the example's tensors."""
        self._tracked: Any = WeakTensorKeyDictionary()
        for name, tensor in self.names.items():
            labels = [self.positions.label(name, axis, tensor) for axis in range(tensor.ndim)]
            for label in labels:
                if not varying_dims(label):
                    self.positions.pin(label, "its axis has only one position")
            tracked = Tracked([label for label in labels if varying_dims(label)], is_parameter=True)
            tracked.value = tensor.detach() if constants and tensor.is_floating_point() else None
            self.set(tensor, tracked)

    def get(self, tensor: Any) -> Tracked | None:
        """Return what is known about a tensor, without constants if it was written to through another view since."""
        found = self._tracked.get(tensor) if isinstance(tensor, Tensor) else None
        if found is None:
            return None
        # The version counter reveals an in-place write through a view that no rule saw. Labels describe positions and
        # stay true, but constants do not.
        tracked, version = found
        return tracked if version == tensor._version else Tracked(tracked.labels, None, False)

    def set(self, tensor: Tensor, tracked: Tracked, version: int | None = None) -> None:
        """Record what is known about a tensor, which will have `version` when the operator returns."""
        if tracked.labels or tracked.value is not None or tracked.is_parameter:
            self._tracked[tensor] = (tracked, tensor._version if version is None else version)
        else:
            self._tracked.pop(tensor, None)

    def pin(self, tensors: Any, reason: str) -> None:
        """Pin all positions of all tensors in `tensors`."""
        for tensor in tree_leaves(tensors):
            tracked = self.get(tensor)
            for label in tracked.labels if tracked else ():
                self.positions.pin(label, reason)

    def set_computed(self, tensor: Tensor, sources: list[str]) -> None:
        """Record a weight that the model computes from others (a parametrization), which cannot be cut."""
        for name, axis in self.positions.axes:
            if name in sources:
                self.positions.pin(self.positions.label(name, axis, self.names[name]), "a weight is computed from it")
        self.set(tensor, Tracked(is_parameter=True))

    def takes_zeros(self, weight: Tracked) -> bool:
        """Return True if a weight accepts zero inputs: units are not cut, and the weight is computed."""
        return not self.cuts and weight.is_parameter and not weight.labels

    def is_aliased(self, tensor: Tensor) -> bool:
        """Return True if a tensor without labels may be a view, so that writes to it cannot be tracked."""
        # Views are recorded by their storage when they are made.
        tracked = self.get(tensor)
        return not (tracked and tracked.labels) and tensor.untyped_storage().data_ptr() in self._viewed

    def here(self) -> str:
        """Return the current module, for a reason."""
        return self.module_names[-1] or "the model"

    def sum_over(self, label: Tensor, value: Tensor | None) -> None:
        """Record that positions are summed over, with the constants there."""
        ids = core(label).reshape(-1).numpy()
        found = np.full(ids.shape, np.nan) if value is None else value.reshape(-1).double().cpu().numpy()
        # The same id may occur at several positions (heads, tokens): sort by id, then compare within each run.
        order = np.argsort(ids, kind="stable")
        ids, found = ids[order], found[order]
        starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
        # min = max if all values of one id are equal. If one is NaN, both are, and NaN differs from itself.
        low, high = np.minimum.reduceat(found, starts), np.maximum.reduceat(found, starts)
        found, ids = np.where(low == high, low, np.nan), ids[starts]
        old = self.constant_of[ids]
        # A weight used twice must get the same constant both times.
        self.constant_of[ids] = np.where(self.is_summed[ids] & (old != found), np.nan, found)
        self.is_summed[ids] = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then its rule."""
        kwargs = kwargs or {}
        before = [tracked for leaf in tree_leaves((args, kwargs)) if (tracked := self.get(leaf))]
        name = func._schema.name.removeprefix("aten::")
        mutates = func._schema.is_mutable and args and isinstance(args[0], Tensor) and name.endswith("_")
        is_view = not func._schema.is_mutable and any(item.alias_info is not None for item in func._schema.returns)
        if is_view and isinstance(args[0], Tensor):
            self._viewed.add(args[0].untyped_storage().data_ptr())
        # No operand is tracked, so skip the rules, which cost far more than the operator.
        if not before:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and not is_view and not func._schema.is_mutable:
                self._viewed.discard(out.untyped_storage().data_ptr())  # reused memory of a deleted view
            return out
        known = RULES.get(name.removesuffix("_") if mutates else name)
        # torch tags element-wise operators, so one rule serves all of them.
        if known is None and torch.Tag.pointwise in func.tags:
            known = RULES["pointwise"]
        # An unknown operator may do anything with positions, so none of its inputs can be removed.
        if known is None or (func._schema.is_mutable and not mutates and "batch_norm" not in name):
            out = func(*args, **kwargs)
            self.pin((args, kwargs), f"the operator {name} in {self.here()} is not supported")
            return out
        if not mutates:
            out = func(*args, **kwargs)
            found = self._follow(known, func, args, kwargs, out)
            # A view has its base's version, which is only set after dispatch returns.
            self._note(out, found, args[0]._version if is_view and isinstance(args[0], Tensor) else None)
            return out
        found = self._follow(known, func, args, kwargs, args[0])  # before the tensor is written
        out = func(*args, **kwargs)
        # The counter increases by one when this dispatch returns, and the recorded version must match it then.
        self._note(args[0], found, args[0]._version + 1)
        return out

    def _follow(self, known: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        try:
            return known(self, func, args, kwargs, out)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # an overload that the rule does not know
            name = func._schema.name.removeprefix("aten::")
            self.pin((args, kwargs), f"the operator {name} in {self.here()} is not supported: {error}")
            return Tracked()

    def _note(self, out: Any, found: Any, version: int | None = None) -> None:
        # Versions increase, and views get their base's version, only when this returns.
        outs = out if isinstance(out, tuple | list) else [out]
        tracked = found if isinstance(found, list) else [found]
        for tensor, item in zip(outs, tracked, strict=False):
            if isinstance(tensor, Tensor) and item is not None and tensor.numel():
                item.labels = [label for label in map(compact, item.labels) if self._varies(label)]
                self.set(tensor, item, version)

    def _varies(self, label: Tensor) -> bool:
        if not varying_dims(label):
            self.positions.pin(label, "its axis has only one position")
            return False
        return True


def covered(labels: list[Tensor]) -> set[int]:
    """Return the dims along which one of the labels varies."""
    return {dim for label in labels for dim in varying_dims(label)}


def restrict(tracer: Tracer, labels: list[Tensor], other: Tensor, other_labels: list[Tensor]) -> None:
    """Pin labels along dims of another operand that none of its labels cover, because its size is fixed."""
    fixed = (set(varying_dims(other)) - covered(other_labels)) & covered(labels)
    # A tensor that is constant along a dim can have any width, such as zeros to which a mask was added.
    if fixed and other.untyped_storage().data_ptr() not in tracer.inputs:
        fixed = {dim for dim in fixed if not bool((other == other.narrow(dim, 0, 1)).all())}
    for label in labels:
        dims = tuple(dim for dim in varying_dims(label) if dim in fixed)
        if dims:
            reason = f"it is combined with a tensor of fixed size in {tracer.here()}"
            tracer.positions.unite_along(label, dims, reason)


def join(tracer: Tracer, operands: list[list[Tensor]]) -> list[Tensor]:
    """Unite the labels of operands of one result, all in its shape, and return the labels of the result.

    Two labels over the same dims are united position by position. If one varies over a part of the other's dims, the
    finer one can follow only if that part is its first dim (the heads of heads x head size). Then each head is removed
    whole. Otherwise (a vector over the head size, shared by all heads) the coarser one cannot be removed.
    """
    merged: list[Tensor] = []
    for labels in operands:
        for label in labels:
            merged = _add(tracer, merged, label)
    return merged


def _add(tracer: Tracer, merged: list[Tensor], label: Tensor) -> list[Tensor]:
    # Compare labels by the dims along which they vary. Disjoint (channels, heads): keep both. Equal: unite. One within
    # the other: `_follow`. Overlapping: neither can be cut without the other, so pin both.
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
            reason = f"it is combined with another axis in {tracer.here()}"
            tracer.positions.pin(label, reason)
            tracer.positions.pin(other, reason)
            kept.append(other)
    return [*kept, label]


def _follow(tracer: Tracer, fine: Tensor, coarse: Tensor) -> None:
    fine_dims, coarse_dims = varying_dims(fine), varying_dims(coarse)
    # Fine (head, channel of a head) meets coarse (head): a head is removed with all its channels.
    if fine_dims[0] in coarse_dims:
        rest = tuple(dim for dim in fine_dims if dim not in coarse_dims)
        tracer.positions.unite_along(fine, rest, "")
        tracer.positions.unite(fine, coarse)
        return
    # Fine (head, channel) meets coarse (channel): all heads share a channel, so it cannot be removed from one.
    tracer.positions.unite_along(fine, coarse_dims, f"it is combined with a shared axis in {tracer.here()}")
    tracer.positions.pin(coarse, f"several heads share it in {tracer.here()}")
