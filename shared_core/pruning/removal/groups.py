"""The units of a model that can be removed: channels, neurons, heads, with all the positions that go with each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from shared_core.pruning.removal import contractions, convolutions, moves, norms, pointwise
from shared_core.pruning.removal.forward import run
from shared_core.pruning.removal.positions import FIXED, Axis, Ids, Role
from shared_core.pruning.removal.trace import Tracer

RULES_OF = (contractions, convolutions, moves, norms, pointwise)
"""Importing them registers their rules."""

Kind = Literal["channel", "neuron", "head", "width", "filter", "layer"]
"""The last two are not traced: single layers' outputs and whole layers, as masks know them."""


@dataclass(frozen=True, eq=False)
class Slice:
    """What the units of a group have in one axis of a tensor.

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
    """What a trace found: the groups, by unit the ids of its positions, by id what it is removed with."""

    groups: list[ChannelGroup]
    unit_ids: dict[str, list[Ids]]
    components: Ids
    tracer: Tracer


def find_groups(model: nn.Module, example_inputs: Any) -> list[ChannelGroup]:
    """Return the groups of units of a model, in the order of its tensors, found by following one forward.

    Every operator that runs is followed, so control flow, residual connections, concatenation, tied weights, grouped
    convolutions, gated layers and grouped-query attention need no declaration; what an operator cannot pass on stays,
    with the reason.

    Args:
        model: Any; nothing of it is changed. It runs in eval mode, without gradients.
        example_inputs: A tensor, a tuple of arguments or a mapping of keyword arguments; a batch of 2 is enough.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> for group in find_groups(net, torch.ones(2, 4)):
        ...     print(group.name, group.kind, group.units, [(s.tensor, s.axis, s.role) for s in group.slices])
        0 neuron 3 [('0.weight', 0, 'out'), ('0.bias', 0, 'out'), ('2.weight', 1, 'in')]
        2 neuron 2 [('2.weight', 0, 'out'), ('2.bias', 0, 'out')]
    """
    return trace(model, example_inputs, constants=False).groups


@dataclass
class _Unit:
    root: int
    parts: list[tuple[Axis, Ids]] = field(default_factory=list)


def trace(model: nn.Module, example_inputs: Any, *, constants: bool) -> Traced:
    """Return the groups of a model and what was learnt on the way."""
    tracer = run(model, example_inputs, constants=constants)
    positions = tracer.positions
    components = positions.components()
    reasons = positions.pinned(components)
    units: dict[int, _Unit] = {}
    for axis in positions.axes.values():
        roots = components[axis.start : axis.start + axis.size]
        order = np.argsort(roots, kind="stable")
        found, starts = np.unique(roots[order], return_index=True)
        for root, members in zip(found, np.split(order, starts[1:]), strict=True):
            units.setdefault(int(root), _Unit(int(root))).parts.append((axis, members))
            if len(members) == axis.size:
                reasons.setdefault(int(root), "all of it is one unit")
    wide = _normalised(tracer, components)
    alike: dict[tuple[Any, ...], list[_Unit]] = defaultdict(list)
    for root in sorted(units):
        unit = units[root]
        signature = tuple((axis.tensor, axis.axis, len(members)) for axis, members in unit.parts)
        alike[(*signature, reasons.get(root) if root != FIXED else "fixed")].append(unit)
    groups: list[ChannelGroup] = []
    unit_ids: dict[str, list[Ids]] = {}
    taken: dict[str, int] = {}
    for found_units in alike.values():
        slices = tuple(_slices(positions.roles, found_units))
        outs = [part for part in slices if part.role == "out"]
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
        indices = np.stack([unit.parts[index][1] for unit in members])
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
    return {int(root) for norm in tracer.norms for root in np.unique(components[norm.label.reshape(-1).cpu().numpy()])}


def _kind(tracer: Tracer, ids: Ids, wide: set[int]) -> Kind:
    if int(ids.min()) in wide:
        return "width"
    if tracer.positions.in_heads[ids].any():
        return "head"
    return "channel" if tracer.positions.in_convolutions[ids].any() else "neuron"
