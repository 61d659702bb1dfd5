"""Select units that can be removed, and cut them from tensors and layers.

A unit can be removed exactly if its contribution to every sum is independent of the input. Narrowing a norm's input
is exact for root-mean-square norms, and an approximation for layer norms.
"""

from __future__ import annotations

import copy
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared_core.channel_graph.groups import UNREAD, ChannelGroup, Traced
from shared_core.errors import CompatibilityError, ConfigError, nearest
from shared_core.modules.matching import is_transformers_conv1d
from shared_core.modules.weight_views import input_axis

Mask = NDArray[np.bool_]


@dataclass
class Selection:
    """The units to remove, by group, and why the others stay.

    `removable`: units that could be removed. `costly`: those of them whose constant must be folded into biases.
    """

    groups: dict[str, ChannelGroup]
    removable: dict[str, Mask]
    costly: dict[str, Mask]
    reasons: dict[str, str] = field(default_factory=dict)

    def choose(self, name: str, count: int) -> Mask:
        """Return `count` of a group's removable units: first those with nothing to fold, then by position."""
        removable = np.flatnonzero(self.removable[name])
        # Stable, with units that have nothing to fold first: they change no bias, so there is no rounding.
        order = np.argsort(self.costly[name][removable], kind="stable")
        chosen = np.zeros(len(self.removable[name]), dtype=bool)
        chosen[removable[order[:count]]] = True
        return chosen


def select(traced: Traced, biases: Mapping[str, str | None], *, create_biases: bool) -> Selection:
    """Return which units of a traced model can be removed exactly.

    A unit can go if its value in every sum is known from the weights alone. Usually it is zero,
    because its rows are zero. Otherwise its contribution is added to the bias of the layer that sums.
    """
    found = Selection({}, {}, {})
    for group in traced.groups:
        found.groups[group.name] = group
        removable, costly, reason = _of_group(traced, group, biases, create_biases)
        if group.reason_kept is not None:
            reason = group.reason_kept if removable.any() else None
            removable[:] = False
        elif removable.all():
            # A model cannot be built with a layer without units.
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
    # By unit. blocked: its value in a sum depends on the input. costly: a constant other than 0 reaches a sum.
    blocked, costly, summed = (np.zeros(group.units, dtype=bool) for _ in range(3))
    no_bias = np.zeros(group.units, dtype=bool)
    for part in group.slices:
        # Positions are numbered in the tracer; (units, positions of a unit) of this slice's axis.
        ids = tracer.positions.axes[part.tensor, part.axis].start + part.positions
        is_summed, constant = tracer.is_summed[ids], tracer.constant_of[ids]
        summed |= is_summed.any(1)
        # NaN in constant_of means "not constant".
        blocked |= (is_summed & np.isnan(constant)).any(1)
        left = (is_summed & (constant != 0) & ~np.isnan(constant)).any(1)
        costly |= left
        # A constant may go only if the layer that sums it has, or can get, a bias for it.
        if part.tensor not in biases or (biases[part.tensor] is None and not create_biases):
            no_bias |= left
    # Dead: a known constant in every sum. A unit that is never summed (such as a normalized width) is not known to be
    # removable.
    dead = summed & ~blocked
    reason = None
    if (dead & no_bias).any():
        reason = f"{int((dead & no_bias).sum())} units are constant, not zero, and the next layer has no bias for them"
    return dead & ~no_bias, costly, reason


def why_uncalled_layers_need(model: nn.Module, traced: Traced) -> dict[str, str]:
    """Return, by group, a layer that the example does not call and that may read the group's units.

    It is unknown what such a layer reads. So a group stays if such a layer has as many inputs as an axis to cut.
    """
    modules = {f"{name}.weight".removeprefix("."): module for name, module in model.named_modules()}
    readers: dict[int, str] = {}
    for group in traced.groups:
        for part in group.slices if group.reason_kept == UNREAD else ():
            if part.tensor not in modules:
                continue  # a bias, or a value of the model's own (a mask token), which reads nothing
            is_matrix = traced.tracer.names[part.tensor].ndim > 1
            axis = input_axis(modules[part.tensor]) if is_matrix else part.axis
            if part.axis == axis:
                readers.setdefault(traced.tracer.positions.axes[part.tensor, axis].size, part.tensor)
    found = {}
    for group in traced.groups if readers else ():
        axes = [traced.tracer.positions.axes[part.tensor, part.axis].size for part in group.slices]
        if group.reason_kept is None and (reader := next((readers[size] for size in axes if size in readers), None)):
            found[group.name] = (
                f"{reader}, which the example does not call, may read it: use an example that calls its layer, or "
                "remove the layer from the model"
            )
    return found


def masked_state(model: nn.Module, groups: Mapping[str, ChannelGroup], keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that change when units that are not kept become zero.

    Args:
        model: The model. It is not changed.
        groups: Its groups, by name.
        keep: By group name, bool of shape (units,), True = keep.
    """
    state = model.state_dict()
    changed: dict[str, Tensor] = {}
    for name, mask in keep.items():
        if name not in groups:
            raise ConfigError("shrink", f"keep must name groups of the model, got {name!r}{nearest(name, groups)}")
        group = groups[name]
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool or mask.shape != (group.units,) or not bool(mask.any()):
            rule = f"keep[{name!r}] must be bool of shape ({group.units},), with at least one unit kept"
            raise ConfigError("shrink", f"{rule}, got {mask.dtype} {tuple(mask.shape)} with {int(mask.sum())}")
        gone = ~mask.cpu().numpy()
        for part in group.slices:
            # Only outputs and norms: zero outgoing weights would save nothing, and the readers' weights go with the
            # unit when it is cut.
            if part.role in ("out", "norm"):
                tensor = changed.setdefault(part.tensor, state[part.tensor].clone())
                places = torch.from_numpy(part.positions[gone].reshape(-1))
                tensor.index_fill_(part.axis, places.to(tensor.device), 0)
    return changed


Plan = dict[str, Mask]
"""The units to remove, by group name."""


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return for every name in the state dict the first name of the same tensor."""
    # By identity: tied names map to the first one, under which a tensor is cut once.
    first: dict[Tensor, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(tensor, name) for name, tensor in tensors}


def bias_names(model: nn.Module) -> dict[str, str | None]:
    """Return the bias name for each layer's weight, None if it has none but could."""
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim > 1 and "bias" in module._parameters:
            prefix = f"{name}." if name else ""
            found[f"{prefix}weight"] = f"{prefix}bias" if module._parameters["bias"] is not None else None
    return found


def cut_state(
    state: Mapping[str, Tensor],
    traced: Traced,
    groups: Mapping[str, ChannelGroup],
    plan: Plan,
    biases: Mapping[str, str | None],
) -> dict[str, Tensor]:
    """Return new tensors for all changes, by first name: constants folded into biases, then positions removed."""
    changed: dict[str, Tensor] = {}
    gone: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for name, units in plan.items():
        for part in groups[name].slices:
            positions = part.positions[units].reshape(-1)
            gone[part.tensor, part.axis].append(positions)
    # All constants first, with uncut weights, because cutting moves positions.
    for (tensor, axis), found in gone.items():
        # A position may be in several groups' plans.
        positions = np.unique(np.concatenate(found))
        _fold(state, changed, traced, tensor, axis, positions, biases)
    for (tensor, axis), found in gone.items():
        value = changed.get(tensor, state[tensor])
        left = np.setdiff1d(np.arange(value.shape[axis]), np.concatenate(found))
        changed[tensor] = value.index_select(axis, torch.from_numpy(left).to(value.device))
    return changed


def _fold(
    state: Mapping[str, Tensor],
    changed: dict[str, Tensor],
    traced: Traced,
    tensor: str,
    axis: int,
    positions: Any,
    biases: Mapping[str, str | None],
) -> None:
    tracer = traced.tracer
    ids = tracer.positions.axes[tensor, axis].start + positions
    constant = np.where(tracer.is_summed[ids], tracer.constant_of[ids], 0.0)
    if not constant.any() or tensor not in biases:
        return
    # sum over removed inputs j of constant_j * W[:, j] is their contribution to each output; it goes into the bias.
    weight = state[tensor].double().movedim(axis, 0)[torch.from_numpy(positions).to(state[tensor].device)]
    added = torch.tensordot(torch.from_numpy(constant).to(weight), weight, dims=1)
    if weight.ndim > 2:  # the constant reaches every position of a kernel
        added = added.flatten(1).sum(1)
    name = biases[tensor] or tensor.removesuffix("weight") + "bias"
    old = changed.get(name, state.get(name))
    # In float64: many small addends. The new bias has the weight's dtype, as the layer computes in it.
    changed[name] = (added if old is None else old.double() + added).to(state[tensor].dtype)


def replaced(model: nn.Module, changed: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a model with these tensors and its layers' attributes set to the new sizes."""
    ties = tied_names(model)
    new = copy.deepcopy(model)
    made: dict[str, nn.Parameter] = {}
    for module_name, module in new.named_modules():
        prefix = f"{module_name}." if module_name else ""
        old = {name: tensor.shape for name, tensor in module._parameters.items() if tensor is not None}
        touched = False
        for name, parameter in list(module._parameters.items()):
            first = ties.get(prefix + name, prefix + name)
            if first not in changed:
                continue
            if first not in made:
                grad = parameter.requires_grad if parameter is not None else True
                # One new Parameter for all names of a tied tensor, so that they stay tied.
                made[first] = nn.Parameter(changed[first].clone(), requires_grad=grad)
            module._parameters[name] = made[first]
            touched = True
        for name in list(module._buffers):
            if (first := ties.get(prefix + name, "")) in changed:
                module._buffers[name] = changed[first].clone()
                touched = True
        if touched:
            _set_sizes(module, old)
    return new


def _set_sizes(module: nn.Module, old: Mapping[str, torch.Size]) -> None:
    if isinstance(module, nn.RNNBase):
        module.input_size = int(module._parameters["weight_ih_l0"].shape[1])  # type: ignore[union-attr]
        module.hidden_size = int(module._parameters["weight_hh_l0"].shape[1])  # type: ignore[union-attr]
        # torch reads sizes from attributes and weights from this list, both set in __init__.
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        return
    weight = module._parameters.get("weight")
    if weight is None:
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            module.num_features = module.running_mean.shape[0]
        return
    shape, was = weight.shape, old["weight"]
    target: Any = module
    if isinstance(module, nn.Linear):
        target.out_features, target.in_features = shape
    elif isinstance(module, nn.modules.conv._ConvTransposeNd):
        # (in, out / groups, ...) of a transposed convolution, (out, in / groups, ...) of other ones.
        target.in_channels, target.out_channels = shape[0], shape[1] * module.groups
    elif isinstance(module, nn.modules.conv._ConvNd):
        if module.groups > 1:
            # A grouped convolution loses whole groups: as many as its outputs shrink by.
            target.groups = shape[0] * module.groups // was[0]
        target.out_channels, target.in_channels = shape[0], shape[1] * module.groups
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        target.num_features = shape[0]
    elif isinstance(module, nn.GroupNorm):
        # Channels of a group stay as they are; the number of groups shrinks with them.
        target.num_groups = shape[0] * module.num_groups // was[0]
        target.num_channels = shape[0]
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        target.normalized_shape = tuple(shape)
    elif isinstance(module, nn.Embedding):
        target.embedding_dim = shape[1]
    elif isinstance(module, nn.PReLU):
        target.num_parameters = shape[0]
    elif is_transformers_conv1d(module):
        target.nx, target.nf = shape


def set_heads(model: nn.Module, groups: Mapping[str, ChannelGroup], plan: Plan) -> None:
    """Update, in place, the numbers and widths of heads that attention modules store as attributes."""
    for name, units in plan.items():
        group = groups[name]
        if group.kind != "head":
            continue
        outer = [part for part in group.slices if part.role in ("out", "in")]
        widths = {part.positions.shape[1] * group.units for part in outer}
        left = group.units - int(units.sum())
        # An attention module is the common parent of its projections, or the parent of a single one.
        names = ["/".join(part.tensor.split(".")[:-2]) for part in outer]
        owners = [
            os.path.commonpath(names or [""]),
            *(name for name, part in zip(names, outer, strict=True) if part.role == "out"),
        ]
        for owner in dict.fromkeys(owners):
            module = model.get_submodule(owner.replace("/", "."))
            for key, value in vars(module).items():
                # Numbers of heads have "head" in their name, widths do not: both shrink by the same share.
                counts = "head" in key and not any(word in key for word in ("dim", "size", "width"))
                if type(value) is int and value and (value in widths or (counts and value % group.units == 0)):
                    setattr(module, key, value * left // group.units)


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
            # A layer norm subtracts the mean, which includes removed positions even if they are zero: only the mean of
            # all positions is right.
            if norm.kind == "layer" or isinstance(module, nn.LayerNorm):
                if not allow_inexact:
                    reasons[group.name] = (
                        f"{norm.module} is a layer norm: narrowing its input is not exact; allow_inexact=True "
                        "does it anyway"
                    )
                    break
            elif _offset(module) is None:
                reasons[group.name] = f"{norm.module or 'the model'} takes a mean over it and is not a known norm"
                break
    return reasons


def rescales(model: nn.Module, traced: Traced, plan: Plan) -> list[Rescale]:
    """Return the changes of norms whose width a plan narrows."""
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


def check_eps(old: nn.Module, new: nn.Module, found: list[Rescale]) -> None:
    """Raise an error if a norm of the smaller model has a wrong epsilon."""
    wanted = {item.module: item.new_eps for item in found}
    for name, module in new.named_modules():
        for attribute in _EPS:
            value = getattr(module, attribute, None)
            # Those of norms that are not narrowed must be unchanged.
            expected = wanted.get(name, getattr(old.get_submodule(name), attribute, None))
            if isinstance(value, float) and isinstance(expected, float) and not math.isclose(value, expected):
                why = "the configuration has one epsilon for norms of different widths, or none"
                rule = f"{name}.{attribute} must be {expected:.3g}, got {value:.3g}: {why}"
                raise CompatibilityError("shrink", rule)


@torch.no_grad()
def _offset(module: nn.Module) -> float | None:
    """Return the number added to γ of a root-mean-square norm, found by running it; None if it is not one."""
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
    """Return the rounding tolerance of outputs, relative to the largest."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return _TOLERANCE.get(dtype, 1e-5)


@dataclass
class Change:
    """A part of a plan that is applied completely or not at all."""

    name: str
    plan: Plan
    values: dict[tuple[str | int, ...], Any] = field(default_factory=dict)


def joined(changes: list[Change]) -> Plan:
    """Merge several changes into one plan."""
    plan: Plan = {}
    for change in changes:
        for name, units in change.plan.items():
            plan[name] = np.logical_or(plan[name], units) if name in plan else units
    return plan


class Work:
    """The known facts about the model to shrink."""

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
        # Tied tensors once: otherwise both names would be cut.
        self.state = {name: tensor for name, tensor in model.state_dict().items() if self.ties.get(name, name) == name}
        self.tolerance = tolerance_of(model)

    def is_exact(self, changes: list[Change]) -> bool:
        """Return True if changes keep the outputs: they narrow no layer norm."""
        return all(norm.exact for norm in rescales(self.model, self.traced, joined(changes)))

    def allowed(self, name: str) -> int:
        """Return how many units of a group may go, leaving a multiple of `multiple_of`."""
        removable, group = self.selection.removable[name], self.selection.groups[name]
        count = int(removable.sum())
        # Widths that kernels like: units that could go stay, so that a multiple is left. Heads are counted, not
        # aligned.
        if group.kind in ("neuron", "channel") and self.multiple_of > 1:
            left = -(-(group.units - count) // self.multiple_of) * self.multiple_of
            count = max(0, group.units - left)
        return count

    def changes(self) -> list[Change]:
        """Return one change per group."""
        counts = {name: self.allowed(name) for name in self.selection.groups}
        return [Change(name, {name: self.selection.choose(name, count)}) for name, count in counts.items() if count]

    def cut(self, plan: Plan) -> tuple[dict[str, Tensor], list[Rescale]]:
        """Return the changed tensors of a plan, and the changes of norms."""
        changed = cut_state(self.state, self.traced, self.selection.groups, plan, self.biases)
        found = rescales(self.model, self.traced, plan)
        for item in found:
            name = self.ties.get(item.weight, item.weight)
            if name in changed:
                changed[name] = item.scaled(changed[name])
        return changed, found

    def build(self, changes: list[Change]) -> nn.Module:
        """Return a copy of the model with these changes."""
        plan = joined(changes)
        changed, norms = self.cut(plan)
        smaller = replaced(self.model, changed)
        set_heads(smaller, self.selection.groups, plan)
        for item in norms:
            setattr(smaller.get_submodule(item.module), item.eps_name, item.new_eps)
        return smaller
