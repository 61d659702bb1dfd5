"""Tensors without the removed positions, and layers that hold them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared_core.module_match import is_transformers_conv1d
from shared_core.pruning.removal.groups import ChannelGroup, Traced
from shared_core.pruning.removal.selection import Mask

Plan = dict[str, Mask]
"""By group name the units to remove."""


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return by every name in the state dict the first name of the same tensor."""
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
    for (tensor, axis), found in gone.items():
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
    weight = state[tensor].double().movedim(axis, 0)[torch.from_numpy(positions).to(state[tensor].device)]
    added = torch.tensordot(torch.from_numpy(constant).to(weight), weight, dims=1)
    if weight.ndim > 2:  # a kernel's places all see the constant
        added = added.flatten(1).sum(1)
    name = biases[tensor] or tensor.removesuffix("weight") + "bias"
    old = changed.get(name, state.get(name))
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
                made[first] = nn.Parameter(changed[first].clone(), requires_grad=grad)
            module._parameters[name] = made[first]
            touched = True
        for name in list(module._buffers):
            if (first := ties.get(prefix + name, "")) in changed:
                module._buffers[name] = changed[first].clone()
                touched = True
        if touched:
            _tell_sizes(module, old)
    return new


def _tell_sizes(module: nn.Module, old: Mapping[str, torch.Size]) -> None:
    if isinstance(module, nn.RNNBase):
        module.input_size = int(module._parameters["weight_ih_l0"].shape[1])  # type: ignore[union-attr]
        module.hidden_size = int(module._parameters["weight_hh_l0"].shape[1])  # type: ignore[union-attr]
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
        target.in_channels, target.out_channels = shape[0], shape[1] * module.groups
    elif isinstance(module, nn.modules.conv._ConvNd):
        if module.groups > 1:
            target.groups = shape[0] * module.groups // was[0]
        target.out_channels, target.in_channels = shape[0], shape[1] * module.groups
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        target.num_features = shape[0]
    elif isinstance(module, nn.GroupNorm):
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


def tell_heads(model: nn.Module, groups: Mapping[str, ChannelGroup], plan: Plan) -> None:
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
        owners = {tuple(_common_prefix([part.tensor.split(".") for part in outer]))}
        owners |= {tuple(part.tensor.split(".")[:-2]) for part in outer if part.role == "out"}
        for owner in owners:
            module = model.get_submodule(".".join(owner))
            for key, value in vars(module).items():
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
