"""Narrowing what a norm divides by: exact for root-mean-square norms, an approximation for layer norms.

What is known of a model that is shrunk, and the smaller tensors of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared_core.channel_graph.groups import Traced
from shared_core.errors import CompatibilityError
from shared_core.tools.shrink.cutting import Plan, Selection, cut_state, replaced, set_heads, tied_names

_EPS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True, eq=False)
class Rescale:
    """The change of a norm over d positions to one over d′.

    The scale becomes ``(offset + γ)·√(d/d′) − offset`` and ε becomes ``ε·d/d′``: the mean square over d′ positions is
    d/d′ times that over d of which the others are zero.
    """

    module: str
    weight: str
    offset: float
    eps_name: str
    eps: float
    before: int
    kept: NDArray[np.int64]
    exact: bool

    @property
    def after(self) -> int:
        """d′: `kept` are the positions that stay."""
        return len(self.kept)

    @property
    def new_eps(self) -> float:
        """ε of the narrower norm."""
        # An RMS norm over d positions of which k are zero: mean of squares over d' = d - k is d / d' times larger, so
        # x / sqrt(ms + eps) keeps its value if eps becomes eps d / d' and gamma is multiplied by sqrt(d / d').
        return self.eps * self.before / self.after

    def scaled(self, weight: Tensor) -> Tensor:
        """Return γ of the narrower norm."""
        factor = math.sqrt(self.before / self.after)
        # Norms that compute (1 + gamma) store gamma less one: the factor is of the sum.
        return ((weight.double() + self.offset) * factor - self.offset).to(weight.dtype)


def why_not_narrow(model: nn.Module, traced: Traced, allow_inexact: bool) -> dict[str, str]:
    """Return why groups of kind width cannot be narrowed, by name."""
    reasons: dict[str, str] = {}
    for group in traced.groups:
        if group.kind != "width" or group.reason_kept is not None:
            continue
        # The numbers of all positions of this group, in whatever tensor.
        own = np.unique(np.concatenate(traced.unit_ids[group.name]))
        for norm in traced.tracer.norms:
            if not np.isin(norm.label.reshape(-1).numpy(), own).any():
                continue
            module = model.get_submodule(norm.module)
            # A layer norm subtracts a mean, which removed positions belong to, even as zeros: only that of all
            # positions is right.
            if norm.kind == "layer" or isinstance(module, nn.LayerNorm):
                if not allow_inexact:
                    reasons[group.name] = (
                        f"{norm.module} is a layer norm: narrowing what it normalises is not exact; allow_inexact=True "
                        "does it all the same"
                    )
                    break
            elif _offset(module) is None:
                reasons[group.name] = f"{norm.module or 'the model'} takes a mean over it and is no known norm"
                break
    return reasons


def rescales(model: nn.Module, traced: Traced, plan: Plan) -> list[Rescale]:
    """Return what happens to the norms whose width a plan narrows."""
    gone = [traced.unit_ids[name][unit] for name, units in plan.items() for unit in np.flatnonzero(units)]
    if not gone:
        return []
    removed = np.unique(np.concatenate(gone))
    components = traced.components
    # Positions that must be equal share a component: removing one removes all of them.
    removed = np.unique(components[removed])
    found: dict[str, Rescale] = {}
    for norm in traced.tracer.norms:
        ids = components[norm.label.reshape(-1).numpy()]
        kept = np.flatnonzero(~np.isin(ids, removed))
        if len(kept) in (len(ids), 0):
            continue
        module = model.get_submodule(norm.module)
        eps_name = next((name for name in _EPS if hasattr(module, name)), "eps")
        eps = getattr(module, eps_name, None)
        if eps is None:  # nn.RMSNorm's default
            eps = torch.finfo(next(model.parameters()).dtype).eps
        offset = 0.0 if norm.kind == "layer" else (_offset(module) or 0.0)
        weight = f"{norm.module}.weight" if norm.module else "weight"
        found[norm.module] = Rescale(
            norm.module, weight, offset, eps_name, float(eps), len(ids), kept, norm.kind != "layer"
        )
    return list(found.values())


def apply_rescales(changed: dict[str, Tensor], found: list[Rescale], ties: Mapping[str, str]) -> None:
    """Scale, in place, the narrowed parameters of the norms."""
    for item in found:
        name = ties.get(item.weight, item.weight)
        if name in changed:
            changed[name] = item.scaled(changed[name])


def set_eps(model: nn.Module, found: list[Rescale]) -> None:
    """Set ε of the narrowed norms, in place."""
    for item in found:
        setattr(model.get_submodule(item.module), item.eps_name, item.new_eps)


def check_eps(old: nn.Module, new: nn.Module, found: list[Rescale]) -> None:
    """Refuse a model in which an epsilon is not what it must be.

    Raises:
        CompatibilityError: If a configuration's epsilon is also that of norms of another width, or cannot be set.
    """
    wanted = {item.module: item.new_eps for item in found}
    for name, module in new.named_modules():
        for attribute in _EPS:
            value = getattr(module, attribute, None)
            # Those of norms that are not narrowed must be unchanged.
            expected = wanted.get(name, getattr(old.get_submodule(name), attribute, None))
            if isinstance(value, float) and isinstance(expected, float) and not math.isclose(value, expected):
                raise CompatibilityError(
                    "shrink",
                    f"{name}.{attribute} must be {expected:.3g}, got {value:.3g}: the configuration has one epsilon "
                    "for norms of different widths, or none",
                )


@torch.no_grad()
def _offset(module: nn.Module) -> float | None:
    """Return what is added to γ of a root-mean-square norm, found by running it; None if it is not one."""
    weight = module._parameters.get("weight")
    eps = next((getattr(module, name) for name in _EPS if getattr(module, name, None) is not None), None)
    if weight is None or weight.ndim != 1 or len(module._parameters) != 1:
        return None
    eps = torch.finfo(weight.dtype).eps if eps is None else eps
    # Random numbers and a small row: gamma, its offset and the place of epsilon all show in the output.
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(4, len(weight), generator=generator).to(weight)
    tensor[1] *= 1e-3  # the place of epsilon shows where the values are small
    try:
        found = module(tensor)
    except (RuntimeError, TypeError, ValueError):
        return None
    wide = tensor.double()
    # The definition in float64; an offset of 1 is Gemma's (1 + gamma).
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    tolerance = 1e-2 if weight.dtype in (torch.float16, torch.bfloat16) else 1e-4
    for offset in (0.0, 1.0):
        if torch.allclose(found.double(), normed * (weight.double() + offset), rtol=tolerance, atol=tolerance):
            return offset
    return None


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tolerance_of(model: nn.Module) -> float:
    """Return by how much outputs may differ, relative to the largest, for all that rounding does."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return _TOLERANCE.get(dtype, 1e-5)


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
    """The known facts about the model that is shrunk."""

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
        # Tied tensors once: both names would be cut.
        self.state = {name: tensor for name, tensor in model.state_dict().items() if self.ties.get(name, name) == name}
        self.tolerance = tolerance_of(model)

    def is_exact(self, changes: list[Change]) -> bool:
        """Return whether changes leave the outputs as they are: they narrow no layer norm."""
        return all(norm.exact for norm in rescales(self.model, self.traced, joined(changes)))

    def allowed(self, name: str) -> int:
        """Return how many units of a group may go, with a multiple of `multiple_of` left."""
        removable, group = self.selection.removable[name], self.selection.groups[name]
        count = int(removable.sum())
        # Widths that kernels like: units that could go stay, so that a multiple is left. Heads are counted, not
        # aligned.
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
        set_heads(smaller, self.selection.groups, plan)
        set_eps(smaller, norms)
        return smaller
