"""What is known of a model that is shrunk, and the smaller tensors of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared_core.pruning.removal.cutting import Plan, cut_state, replaced, tell_heads, tied_names
from shared_core.pruning.removal.groups import Traced
from shared_core.pruning.removal.selection import Selection
from shared_core.pruning.removal.width import Rescale, apply_rescales, rescales, tell_eps

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass
class Change:
    """A part of a plan that is made whole or not at all."""

    name: str
    plan: Plan
    values: dict[tuple[str | int, ...], Any] = field(default_factory=dict)


def joined(changes: list[Change]) -> Plan:
    """Return the plan of several changes."""
    plan: Plan = {}
    for change in changes:
        for name, units in change.plan.items():
            plan[name] = np.logical_or(plan[name], units) if name in plan else units
    return plan


class Work:
    """What is known of the model that is shrunk."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        traced: Traced,
        selection: Selection,
        biases: Mapping[str, str | None],
        multiple_of: int,
    ) -> None:
        self.model, self.example_inputs, self.traced, self.selection = model, example_inputs, traced, selection
        self.biases, self.multiple_of = biases, multiple_of
        self.ties = tied_names(model)
        self.state = {name: tensor for name, tensor in model.state_dict().items() if self.ties.get(name, name) == name}
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.tolerance = _TOLERANCE.get(dtype, 1e-5)

    def is_exact(self, changes: list[Change]) -> bool:
        """Return whether changes leave the outputs as they are: they narrow no layer norm."""
        return all(norm.exact for norm in rescales(self.model, self.traced, joined(changes)))

    def allowed(self, name: str) -> int:
        """Return how many units of a group may go, with a multiple of `multiple_of` left."""
        removable, group = self.selection.removable[name], self.selection.groups[name]
        count = int(removable.sum())
        if group.kind in ("neuron", "channel") and self.multiple_of > 1:
            left = -(-(group.units - count) // self.multiple_of) * self.multiple_of
            count = max(0, group.units - left)
        return count

    def changes(self) -> list[Change]:
        """Return one change a group."""
        found = []
        for name in self.selection.groups:
            if count := self.allowed(name):
                found.append(Change(name, {name: self.selection.choose(name, count)}))
        return found

    def cut(self, plan: Plan) -> tuple[dict[str, Tensor], list[Rescale]]:
        """Return the changed tensors of a plan, and what becomes of norms."""
        changed = cut_state(self.state, self.traced, self.selection.groups, plan, self.biases)
        found = rescales(self.model, self.traced, plan)
        apply_rescales(changed, found, self.ties)
        return changed, found

    def build(self, changes: list[Change]) -> nn.Module:
        """Return a copy of the model with these changes."""
        plan = joined(changes)
        changed, norms = self.cut(plan)
        smaller = replaced(self.model, changed)
        tell_heads(smaller, self.selection.groups, plan)
        tell_eps(smaller, norms)
        return smaller
