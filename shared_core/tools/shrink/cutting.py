"""Which units can go without a trace: what arrives wherever they are summed up does not depend on the input.

Tensors without the removed positions, and layers that hold them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared_core.channel_graph.groups import UNREAD, ChannelGroup, Slice, Traced
from shared_core.errors import ConfigError, nearest
from shared_core.modules.matching import is_transformers_conv1d
from shared_core.modules.weight_views import input_axis

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
        # Stable, and units with nothing to fold first: those leave every bias as it is, so rounding changes nothing.
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
            # A layer without units has no shape that a model could be built with.
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
    # By unit. blocked: it reaches a sum with a value that depends on the input. costly: a constant other than 0
    # reaches one.
    blocked, costly, summed = (np.zeros(group.units, dtype=bool) for _ in range(3))
    no_bias = np.zeros(group.units, dtype=bool)
    for part in group.slices:
        # Each position has a number in the tracer; (units, positions of a unit) of this slice's axis.
        ids = tracer.positions.axes[part.tensor, part.axis].start + part.positions
        is_summed, constant = tracer.is_summed[ids], tracer.constant_of[ids]
        summed |= is_summed.any(1)
        # NaN in constant_of means "not constant".
        blocked |= (is_summed & np.isnan(constant)).any(1)
        left = (is_summed & (constant != 0) & ~np.isnan(constant)).any(1)
        costly |= left
        # A constant may go only if the layer that sums it up has, or can get, a bias to add it to.
        if part.tensor not in biases or (biases[part.tensor] is None and not create_biases):
            no_bias |= left
    # Dead: everywhere that it is summed up, a known constant arrives. What is never summed (a normalised width, say)
    # is not known to go.
    dead = summed & ~blocked
    reason = None
    if (dead & no_bias).any():
        reason = f"{int((dead & no_bias).sum())} units are constant, not zero, and the next layer has no bias for them"
    return dead & ~no_bias, costly, reason


def why_uncalled_layers_need(model: nn.Module, traced: Traced) -> dict[str, str]:
    """Return, by group, the layer that the example does not call and that may read the group's units elsewhere.

    What such a layer reads is not known. So a group stays if one takes as many inputs as an axis has that would be cut.
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
                f"{reader}, which the example does not call, may read it: give an example that calls its layer, or "
                "take the layer out of the model"
            )
    return found


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
            raise ConfigError("shrink", f"keep must name groups of the model, got {name!r}{nearest(name, groups)}")
        group = groups[name]
        mask = torch.as_tensor(mask)
        if mask.dtype != torch.bool or mask.shape != (group.units,):
            raise ConfigError(
                "shrink", f"keep[{name!r}] must be bool of shape ({group.units},), got {mask.dtype} {tuple(mask.shape)}"
            )
        if not bool(mask.any()):
            raise ConfigError("shrink", f"keep[{name!r}] must keep at least one unit, got none")
        gone = ~mask.cpu().numpy()
        for part in group.slices:
            # Outputs and norms only: a unit whose outgoing weights are zero as well would not be cheaper, and the
            # readers' weights go with it when it is cut.
            if part.role in ("out", "norm"):
                tensor = changed.setdefault(part.tensor, state[part.tensor].clone())
                tensor.index_fill_(part.axis, _index(part, gone, tensor), 0)
    return changed


def _index(part: Slice, units: Mask, like: Tensor) -> Tensor:
    return torch.from_numpy(part.positions[units].reshape(-1)).to(like.device)


Plan = dict[str, Mask]
"""By group name the units to remove."""


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return by every name in the state dict the first name of the same tensor."""
    # By identity: tied names lead to the first one, under which a tensor is cut once.
    first: dict[Tensor, str] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(tensor, name) for name, tensor in tensors}


def bias_names(model: nn.Module) -> dict[str, str | None]:
    """Return by the name of each layer's weight the name of its bias, None where it has none but could."""
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
    """Return new tensors for all that change, by first name: constants folded into biases, then positions removed.

    Args:
        state: The model's tensors by first name.
        traced: Where what arrives at each position is known.
        groups: By name.
        plan: What to remove.
        biases: See `bias_names`; a bias that did not exist is among the result.
    """
    changed: dict[str, Tensor] = {}
    gone: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for name, units in plan.items():
        for part in groups[name].slices:
            positions = part.positions[units].reshape(-1)
            gone[part.tensor, part.axis].append(positions)
    # All constants first, over uncut weights: cutting moves positions.
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
    # sum over removed inputs j of constant_j * W[:, j] is what they added to every output; it goes into the bias.
    weight = state[tensor].double().movedim(axis, 0)[torch.from_numpy(positions).to(state[tensor].device)]
    added = torch.tensordot(torch.from_numpy(constant).to(weight), weight, dims=1)
    if weight.ndim > 2:  # a kernel's places all see the constant
        added = added.flatten(1).sum(1)
    name = biases[tensor] or tensor.removesuffix("weight") + "bias"
    old = changed.get(name, state.get(name))
    # In float64: many small addends. The new bias has the weight's dtype, as the layer computes in it.
    changed[name] = (added if old is None else old.double() + added).to(state[tensor].dtype)


def replaced(model: nn.Module, changed: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a model with these tensors, its layers' attributes told of their new sizes.

    Args:
        model: Untouched.
        changed: By first name; those of a tensor that is tied replace it everywhere.
    """
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
                # One new Parameter for all names of a tied tensor, so that ties stay.
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
        # torch reads sizes from attributes and weights from this list, both made in __init__.
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
        # (in, out / groups, ...) of a transposed convolution, (out, in / groups, ...) of another one.
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
    """Correct, in place, the numbers of heads and their widths that attention modules hold as attributes.

    Args:
        model: With the heads removed.
        groups: Of the model before.
        plan: What was removed.
    """
    for name, units in plan.items():
        group = groups[name]
        if group.kind != "head":
            continue
        outer = [part for part in group.slices if part.role in ("out", "in")]
        widths = {part.positions.shape[1] * group.units for part in outer}
        left = group.units - int(units.sum())
        # An attention module is what its projections have in common, or what holds one of them.
        owners = {tuple(_common_prefix([part.tensor.split(".") for part in outer]))}
        owners |= {tuple(part.tensor.split(".")[:-2]) for part in outer if part.role == "out"}
        for owner in owners:
            module = model.get_submodule(".".join(owner))
            for key, value in vars(module).items():
                # Numbers of heads have "head" in their name, widths do not: both shrink by the same share.
                counts = "head" in key and not any(word in key for word in ("dim", "size", "width"))
                if type(value) is int and value and (value in widths or (counts and value % group.units == 0)):
                    setattr(module, key, value * left // group.units)


def _common_prefix(names: list[list[str]]) -> list[str]:
    prefix = []
    for parts in zip(*(name[:-2] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        prefix.append(parts[0])
    return prefix
