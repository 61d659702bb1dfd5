"""The units of a model that can be removed (channels, neurons, heads), each with all its positions.

They are found by tracing one forward.
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
from shared_core.modules.calls import evaluated, remove_hooks

_BY_PRODUCTS = ("past_key_values", "cache", "hidden_states", "attentions", "encoder_", "decoder_", "cross_attentions")


def run(model: nn.Module, example_inputs: Any, *, constants: bool, cuts: bool = True) -> Tracer:
    """Run one forward in eval mode without gradients, and return the tracer.

    The model's modes are restored, and nothing else changes.
    """
    tracer = Tracer(model, constants=constants, cuts=cuts)
    # `restrict` must not mistake repeated values of an input for a constant of any width.
    inputs = dict(example_inputs) if isinstance(example_inputs, Mapping) else example_inputs
    leaves = [] if callable(inputs) else tree_leaves(inputs)
    tracer.inputs = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
    # The tracer is innermost, so that it sees the operators that attention and compiled modules decompose into.
    with evaluated(model), decomposed(), _hooked(model, tracer), _parametrized(model, tracer), tracer:
        out = call(model, example_inputs)
    # Users and losses read outputs, so their size and order must stay.
    for name, tensor in outputs_of(out):
        tracer.pin(tensor, f"it is an output of the model{f' ({name})' if name else ''}")
    return tracer


def outputs_of(output: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return names and tensors of the relevant outputs: logits and loss, or else everything except by-products."""
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
    """Make attention and compiled modules run as basic operators."""
    # Fused attention and the encoder fast path are single operators, through which channels cannot be tracked.
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
        # Before the user's hooks, so that operators in those also have a module name.
        handles.append(module.register_forward_pre_hook(enter(name), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        remove_hooks(handles)


@contextmanager
def _parametrized(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Compute parametrized weights (spectral norm) before the forward, if no unit is cut."""
    # A cut would change the computed weight (a spectral norm), but zero inputs do not.
    with parametrize.cached():
        for name, module in () if tracer.cuts else model.named_modules():
            for tensor, chain in getattr(module, "parametrizations", {}).items():
                inside = f"{name}.parametrizations.{tensor}.".lstrip(".")
                sources = [inside + own for own in chain.state_dict()]
                tracer.set_computed(getattr(module, tensor), sources)
        yield


RULES_OF = (elementwise_rules, product_rules)
"""Importing them registers their rules."""

UNREAD = "the traced forward does not use it"
"""`ChannelGroup.reason_kept` of units that no operator used, such as those of layers that were not called."""

Kind = Literal["channel", "neuron", "head", "width", "filter", "layer"]
"""The last two are not traced: outputs of single layers, and whole layers."""


@dataclass(frozen=True, eq=False)
class Slice:
    """The positions of a group's units along one axis of a tensor.

    Attributes:
        tensor: Name as in ``model.state_dict()``. For a tied tensor, its first name.
        axis: The axis along which the positions lie.
        positions: (units, k). Row u has the indices along `axis` of unit u.
        role: ``out`` produces the unit's values (a weight's rows, its bias, an embedding's columns), ``norm`` scales
            and shifts them, ``in`` consumes them (a weight's columns), ``stat`` are a batch norm's running statistics.
    """

    tensor: str
    axis: int
    positions: NDArray[np.int64]
    role: Literal["out", "in", "norm", "stat"]


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Units of one kind, each of which can be removed with all its slices.

    A unit is a channel of convolutions, a neuron, an attention head (a key-value head with its query heads), or a
    position of the residual width that norms divide by. `reason_kept` says why the units cannot be removed. None means
    they can.
    """

    name: str
    kind: Kind
    units: int
    slices: tuple[Slice, ...]
    reason_kept: str | None = None


@dataclass
class Traced:
    """The result of a trace: groups, the ids of each unit's positions, and the component of each id."""

    groups: list[ChannelGroup]
    unit_ids: dict[str, list[Ids]]
    components: Ids
    tracer: Tracer


def find_groups(model: nn.Module, example_inputs: Any, *, cuts: bool = True) -> list[ChannelGroup]:
    """Trace one forward and return the groups of units of a model, in the order of its tensors.

    Every operator that runs is traced, so control flow, residual connections, concatenation, tied weights, grouped
    convolutions, gated layers and grouped-query attention need no declaration. Units that cannot be traced through an
    operator are kept, with the reason.

    Args:
        model: Any model. It runs in eval mode, without gradients, and is not changed.
        example_inputs: A tensor, a tuple of arguments or a mapping of keyword arguments. A batch of 2 is enough.
        cuts: True if units will be removed. With False they are only zeroed, so layers with computed weights may read
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
    """Trace one forward and return the groups together with the tracer's findings."""
    tracer = run(model, example_inputs, constants=constants, cuts=cuts)
    positions = tracer.positions
    components = positions.components()
    reasons = positions.pinned(components)
    # If no operator used a unit, its effects are unknown: another forward may return it to the user.
    used = np.zeros(positions.count, dtype=bool)
    np.logical_or.at(used, components, positions.roles > 0)
    for root in np.unique(components[~used[components]]):
        reasons.setdefault(int(root), UNREAD)
    # Each component's positions by axis. `parts` are in the order of axes, the same for similar units.
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
    wide = _normalized(tracer, components)
    alike: dict[tuple[Any, ...], list[_Unit]] = defaultdict(list)
    for root in sorted(units):
        # Units of one group have equally many positions in the same axes, and the same reason to stay. They are
        # interchangeable, so a mask or a cut may use any of them.
        unit = units[root]
        signature = tuple((axis.tensor, axis.axis, len(members)) for axis, members in unit.parts)
        alike[(*signature, reasons.get(root) if root != FIXED else "fixed")].append(unit)
    groups: list[ChannelGroup] = []
    unit_ids: dict[str, list[Ids]] = {}
    taken: dict[str, int] = {}
    for found_units in alike.values():
        slices = tuple(_slices(positions.roles, found_units))
        outs = [part for part in slices if part.role == "out"]
        # Skip groups without an output axis, or with only kernel sizes (axes above 1): nothing produces values.
        if not outs or all(part.axis > 1 for part in outs):
            continue  # an axis that only consumes, such as the model's input
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
        # (units, positions each): row i belongs to unit i on this axis.
        indices = np.stack([unit.parts[index][1] for unit in members])
        # A tensor may have several roles (tied weights). OUT takes precedence, then NORM.
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


def _normalized(tracer: Tracer, components: Ids) -> set[int]:
    """Return the components that norms divide by."""
    return {int(root) for norm in tracer.norms for root in np.unique(components[norm.label.reshape(-1).numpy()])}


def _kind(tracer: Tracer, ids: Ids, wide: set[int]) -> Kind:
    if int(ids.min()) in wide:
        return "width"
    if tracer.positions.in_heads[ids].any():
        return "head"
    return "channel" if tracer.positions.in_convolutions[ids].any() else "neuron"
