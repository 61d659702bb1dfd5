"""One forward of a model, followed or not, and what its output is judged by.

The units of a model that can be removed: channels, neurons, heads, with all the positions that go with each.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from shared_core.channel_graph import elementwise_rules, product_rules
from shared_core.channel_graph.graph import FIXED, Axis, Ids, Role, Tracer
from shared_core.modules.calls import call as call
from shared_core.modules.calls import evaluated

_BY_PRODUCTS = ("past_key_values", "hidden_states", "attentions", "encoder_", "decoder_", "cross_attentions")


def run(model: nn.Module, example_inputs: Any, *, constants: bool, cuts: bool = True) -> Tracer:
    """Return the tracer after one forward in eval mode without gradients.

    The model's modes are restored, and nothing of it is changed.
    """
    tracer = Tracer(model, constants=constants, cuts=cuts)
    # `restrict` must not take an input's repeated values for a constant that any width may have.
    leaves = [] if callable(example_inputs) else tree_leaves(dict(_named_inputs(example_inputs)))
    tracer.inputs = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
    # The tracer is innermost: it sees the operators that attention and compiled modules decompose into.
    with evaluated(model), decomposed(), _hooked(model, tracer), _parametrized(model, tracer), tracer:
        out = call(model, example_inputs)
    # Outputs are what users and losses read: their size and order stay.
    for name, tensor in outputs_of(out):
        tracer.pin(tensor, f"it is an output of the model{f' ({name})' if name else ''}")
    return tracer


def _named_inputs(example_inputs: Any) -> Mapping[Any, Any]:
    return example_inputs if isinstance(example_inputs, Mapping) else {0: example_inputs}


def outputs_of(output: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return names and tensors that an output is judged by: logits and loss, or else all but by-products."""
    if isinstance(output, Tensor):
        return [(name, output)]
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, Mapping):
        only = [key for key in ("logits", "loss") if output.get(key) is not None]
        named = {str(key): value for key, value in output.items()}
        keys = only or [key for key in named if not key.startswith(_BY_PRODUCTS)]
        return [found for key in keys for found in outputs_of(named[key], key)]
    if isinstance(output, tuple | list):
        return [found for value in output for found in outputs_of(value, name)]
    return [(name, leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


@contextmanager
def decomposed() -> Iterator[None]:
    """Have attention and compiled modules run as the operators they are made of."""
    # Fused attention and the encoder fast path are single operators, in which no channel can be followed.
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _hooked(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    handles = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: tracer.module_names.append(name)

    def leave(*_: Any) -> None:
        tracer.module_names.pop()

    for name, module in model.named_modules():
        # Before the user's hooks, so that operators inside those have a module's name too.
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _parametrized(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Compute parametrized weights (spectral norm) before the forward, where no unit is cut."""
    # A cut would change what is computed (a spectral norm); zeros that arrive at such a weight do not.
    with parametrize.cached():
        for name, module in () if tracer.cuts else model.named_modules():
            for tensor, chain in getattr(module, "parametrizations", {}).items():
                inside = f"{name}.parametrizations.{tensor}.".lstrip(".")
                sources = [inside + own for own in chain.state_dict()]
                tracer.set_computed(getattr(module, tensor), sources)
        yield


RULES_OF = (elementwise_rules, product_rules)
"""Importing them registers their rules."""

UNREAD = "the forward that was followed does not use it"
"""`ChannelGroup.reason_kept` of units that no operator read: of layers that were not called."""

Kind = Literal["channel", "neuron", "head", "width", "filter", "layer"]
"""The last two are not traced: single layers' outputs and whole layers, as masks know them."""


@dataclass(frozen=True, eq=False)
class Slice:
    """The share of a group's units in one axis of a tensor.

    `tensor` is named as in ``model.state_dict()`` (of a tied tensor, its first name); `positions` has the shape
    (units, k): row u are the indices along `axis` of unit u. `role`: ``out`` makes the unit's values (a weight's
    rows, its bias, an embedding's columns), ``norm`` scales and shifts them, ``in`` consumes them (a weight's
    columns), ``stat`` are a batch norm's running statistics.
    """

    tensor: str
    axis: int
    positions: NDArray[np.int64]
    role: Literal["out", "in", "norm", "stat"]


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Units of one kind, any of which can be removed with all its slices.

    A unit is a channel of convolutions, a neuron, an attention head (a key-value head with its query heads) or a
    position of the residual width that norms divide by. `reason_kept` says why none of them can be removed; None: they
    can.
    """

    name: str
    kind: Kind
    units: int
    slices: tuple[Slice, ...]
    reason_kept: str | None = None


@dataclass
class Traced:
    """The result of a trace: the groups, by unit the ids of its positions, by id what it is removed with."""

    groups: list[ChannelGroup]
    unit_ids: dict[str, list[Ids]]
    components: Ids
    tracer: Tracer


def find_groups(model: nn.Module, example_inputs: Any, *, cuts: bool = True) -> list[ChannelGroup]:
    """Return the groups of units of a model, in the order of its tensors, found by following one forward.

    Every operator that runs is followed, so control flow, residual connections, concatenation, tied weights, grouped
    convolutions, gated layers and grouped-query attention need no declaration; what an operator cannot pass on stays,
    with the reason.

    Args:
        model: Any; nothing of it is changed. It runs in eval mode, without gradients.
        example_inputs: A tensor, a tuple of arguments or a mapping of keyword arguments; a batch of 2 is enough.
        cuts: Whether units are to be removed; False: they are zeroed, so that layers that compute their weight may read
            them.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> for group in find_groups(net, torch.ones(2, 4)):
        ...     print(group.name, group.kind, group.units, [(s.tensor, s.axis, s.role) for s in group.slices])
        0 neuron 3 [('0.weight', 0, 'out'), ('0.bias', 0, 'out'), ('2.weight', 1, 'in')]
        2 neuron 2 [('2.weight', 0, 'out'), ('2.bias', 0, 'out')]
    """
    return trace(model, example_inputs, constants=False, cuts=cuts).groups


@dataclass
class _Unit:
    root: int
    parts: list[tuple[Axis, Ids]] = field(default_factory=list)


def trace(model: nn.Module, example_inputs: Any, *, constants: bool, cuts: bool = True) -> Traced:
    """Return the groups of a model and what was learnt on the way."""
    tracer = run(model, example_inputs, constants=constants, cuts=cuts)
    positions = tracer.positions
    components = positions.components()
    reasons = positions.pinned(components)
    # What depends on a unit that nothing computed with is not known: another forward may return it to the user.
    used = np.zeros(positions.count, dtype=bool)
    np.logical_or.at(used, components, positions.roles > 0)
    for root in np.unique(components[~used[components]]):
        reasons.setdefault(int(root), UNREAD)
    # By component, what it has of each axis. `parts` come in the order of axes, the same for units that are alike.
    units: dict[int, _Unit] = {}
    for axis in positions.axes.values():
        roots = components[axis.start : axis.start + axis.size]
        order = np.argsort(roots, kind="stable")
        found, starts = np.unique(roots[order], return_index=True)
        for root, members in zip(found, np.split(order, starts[1:]), strict=True):
            units.setdefault(int(root), _Unit(int(root))).parts.append((axis, members))
            # A whole axis in one unit: removing it would leave an empty tensor.
            if len(members) == axis.size:
                reasons.setdefault(int(root), "all of it is one unit")
    wide = _normalised(tracer, components)
    alike: dict[tuple[Any, ...], list[_Unit]] = defaultdict(list)
    for root in sorted(units):
        # Units of one group have as many positions in the same axes, and stay for the same reason: those are
        # interchangeable, and a mask or a cut may take any of them.
        unit = units[root]
        signature = tuple((axis.tensor, axis.axis, len(members)) for axis, members in unit.parts)
        alike[(*signature, reasons.get(root) if root != FIXED else "fixed")].append(unit)
    groups: list[ChannelGroup] = []
    unit_ids: dict[str, list[Ids]] = {}
    taken: dict[str, int] = {}
    for found_units in alike.values():
        slices = tuple(_slices(positions.roles, found_units))
        outs = [part for part in slices if part.role == "out"]
        # No output axis, or only kernel sizes (axes above 1): nothing that produces values.
        if not outs or all(part.axis > 1 for part in outs):
            continue  # an axis that only consumes: the model's input
        name = outs[0].tensor.rpartition(".")[0] or outs[0].tensor
        taken[name] = taken.get(name, 0) + 1
        name = name if taken[name] == 1 else f"{name}#{taken[name]}"
        ids = [np.concatenate([axis.start + index for axis, index in unit.parts]) for unit in found_units]
        reason = reasons.get(found_units[0].root)
        groups.append(ChannelGroup(name, _kind(tracer, np.concatenate(ids), wide), len(found_units), slices, reason))
        unit_ids[name] = ids
    return Traced(groups, unit_ids, components, tracer)


def _slices(roles: NDArray[np.uint8], members: list[_Unit]) -> list[Slice]:
    slices = []
    for index, (axis, _) in enumerate(members[0].parts):
        # (units, positions each): unit i owns row i in this axis.
        indices = np.stack([unit.parts[index][1] for unit in members])
        # A tensor may play several roles (tied weights): what produces decides first, then what scales.
        found = Role(int(np.bitwise_or.reduce(roles[axis.start + indices].reshape(-1))))
        if not found:
            role: Literal["out", "in", "norm", "stat"] = "out"
        elif Role.OUT in found:
            role = "out"
        elif Role.NORM in found:
            role = "norm"
        else:
            role = "in" if Role.IN in found else "stat"
        slices.append(Slice(axis.tensor, axis.axis, indices, role))
    return slices


def _normalised(tracer: Tracer, components: Ids) -> set[int]:
    """Return the components of which only a part of what a norm divides by belongs to each."""
    return {int(root) for norm in tracer.norms for root in np.unique(components[norm.label.reshape(-1).numpy()])}


def _kind(tracer: Tracer, ids: Ids, wide: set[int]) -> Kind:
    if int(ids.min()) in wide:
        return "width"
    if tracer.positions.in_heads[ids].any():
        return "head"
    return "channel" if tracer.positions.in_convolutions[ids].any() else "neuron"
