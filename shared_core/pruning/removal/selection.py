"""Which units can go without a trace: what arrives wherever they are summed up does not depend on the input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared_core.errors import ConfigError, nearest
from shared_core.pruning.removal.groups import ChannelGroup, Slice, Traced

Mask = NDArray[np.bool_]


@dataclass
class Selection:
    """The units to remove, by group, and why the others stay.

    `removable` says which units could be removed, `costly` which of those leave a constant to fold into biases.
    """

    groups: dict[str, ChannelGroup]
    removable: dict[str, Mask]
    costly: dict[str, Mask]
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, name: str, count: int) -> Mask:
        """Return `count` of a group's removable units: first those that leave nothing to fold, then by position."""
        removable = np.flatnonzero(self.removable[name])
        order = np.argsort(self.costly[name][removable], kind="stable")
        chosen = np.zeros(len(self.removable[name]), dtype=bool)
        chosen[removable[order[:count]]] = True
        return chosen


def select(traced: Traced, biases: Mapping[str, str | None], *, create_biases: bool) -> Selection:
    """Return which units of a traced model can be removed exactly.

    A unit goes if, wherever a weight sums over it, a value arrives that is known from the weights alone: mostly zero,
    because its rows are zero; otherwise its contribution is added to the bias of the layer that sums.

    Args:
        traced: With constants.
        biases: By the name of a weight the name of its layer's bias; None where the layer has none.
        create_biases: Whether a layer without a bias can get one.
    """
    found = Selection({}, {}, {})
    for group in traced.groups:
        found.groups[group.name] = group
        removable, costly, reason = _of_group(traced, group, biases, create_biases)
        if group.reason_kept is not None:
            reason = group.reason_kept if removable.any() else None
            removable[:] = False
        elif removable.all():
            removable[0] = False
            reason = "every unit of it is zero: one is kept"
        if reason:
            found.reasons[group.name] = reason
        found.removable[group.name], found.costly[group.name] = removable, costly
    return found


def _of_group(
    traced: Traced, group: ChannelGroup, biases: Mapping[str, str | None], create_biases: bool
) -> tuple[Mask, Mask, str | None]:
    tracer = traced.tracer
    blocked, costly, summed = (np.zeros(group.units, dtype=bool) for _ in range(3))
    no_bias = np.zeros(group.units, dtype=bool)
    for part in group.slices:
        ids = tracer.positions.axes[part.tensor, part.axis].start + part.positions
        is_summed, constant = tracer.is_summed[ids], tracer.constant_of[ids]
        summed |= is_summed.any(1)
        blocked |= (is_summed & np.isnan(constant)).any(1)
        left = (is_summed & (constant != 0) & ~np.isnan(constant)).any(1)
        costly |= left
        if part.tensor not in biases or (biases[part.tensor] is None and not create_biases):
            no_bias |= left
    dead = summed & ~blocked
    reason = None
    if (dead & no_bias).any():
        reason = f"{int((dead & no_bias).sum())} units are constant, not zero, and the next layer has no bias for them"
    return dead & ~no_bias, costly, reason


def masked_state(model: nn.Module, groups: Mapping[str, ChannelGroup], keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that change when the units that are not kept are set to zero.

    Args:
        model: Untouched.
        groups: Of the model, by name.
        keep: By group name, bool of shape (units,), True = keep.

    Raises:
        ConfigError: If a name or a shape is wrong, or nothing of a group is kept.
    """
    state = model.state_dict()
    changed: dict[str, Tensor] = {}
    for name, mask in keep.items():
        if name not in groups:
            raise ConfigError(f"shrink: keep must name groups of the model, got {name!r}{nearest(name, groups)}")
        group = groups[name]
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool or mask.shape != (group.units,):
            raise ConfigError(
                f"shrink: keep[{name!r}] must be bool of shape ({group.units},), got {mask.dtype} {tuple(mask.shape)}"
            )
        if not bool(mask.any()):
            raise ConfigError(f"shrink: keep[{name!r}] must keep at least one unit, got none")
        gone = ~mask.cpu().numpy()
        for part in group.slices:
            if part.role in ("out", "norm"):
                tensor = changed.setdefault(part.tensor, state[part.tensor].clone())
                tensor.index_fill_(part.axis, _index(part, gone, tensor), 0)
    return changed


def _index(part: Slice, units: Mask, like: Tensor) -> Tensor:
    return torch.from_numpy(part.positions[units].reshape(-1)).to(like.device)
