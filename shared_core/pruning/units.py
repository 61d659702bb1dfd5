"""Output units: what of every tensor goes when a neuron, channel, head, filter or layer goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared_core.pruning.axes import output_axis
from shared_core.pruning.removal.groups import ChannelGroup, Kind, Slice

_MASKED = ("out", "norm")


def filter_groups(modules: Mapping[str, nn.Module]) -> list[ChannelGroup]:
    """Return every output unit of every layer, each by itself: its row of the weight, and its bias.

    Args:
        modules: Weight name to the module that holds it as ``weight``.
    """
    return [_layer_group(name, module, "filter", whole_layer=False) for name, module in modules.items()]


def layer_groups(modules: Mapping[str, nn.Module]) -> list[ChannelGroup]:
    """Return every layer as a group of one unit: all of its weight, and its bias.

    Args:
        modules: Weight name to the module that holds it as ``weight``.
    """
    return [_layer_group(name, module, "layer", whole_layer=True) for name, module in modules.items()]


def _layer_group(name: str, module: nn.Module, kind: Kind, *, whole_layer: bool) -> ChannelGroup:
    weight = cast("Tensor", module.weight)
    axis = output_axis(module)
    outputs: NDArray[np.int64] = np.arange(weight.shape[axis])
    tensors: list[tuple[str, int, NDArray[np.int64]]] = [(name, axis, outputs)]
    bias = module._parameters.get("bias")
    if bias is not None:
        # a grouped transposed convolution holds outputs of one group in the weight and all of them in the bias
        of_bias = np.arange(bias.numel()).reshape(-1, len(outputs)).T if bias.numel() != len(outputs) else outputs
        tensors.append((f"{name.removesuffix('weight')}bias", 0, of_bias))
    slices = tuple(
        Slice(tensor, along, places.reshape(1 if whole_layer else len(outputs), -1), "out")
        for tensor, along, places in tensors
    )
    return ChannelGroup(name=name, kind=kind, units=1 if whole_layer else len(outputs), slices=slices)


def prunable_groups(groups: Iterable[ChannelGroup], granularity: str, chosen: Iterable[str]) -> Iterator[ChannelGroup]:
    """Yield the groups of a granularity whose weights are all within reach.

    Args:
        groups: As traced.
        granularity: ``neuron``, ``channel`` or ``head``.
        chosen: Names of the weights that may be pruned.
    """
    reach = set(chosen)
    for group in groups:
        weights = {part.tensor for part in group.slices if part.role == "out" and not part.tensor.endswith("bias")}
        if group.kind == granularity and group.reason_kept is None and group.units > 1 and weights and weights <= reach:
            yield group


def masked_slices(group: ChannelGroup) -> list[Slice]:
    """Return what of a group is set to zero: outputs, their biases, and the scales and shifts of their norms."""
    return [part for part in group.slices if part.role in _MASKED]


@torch.no_grad()
def masks_of_units(
    groups: Iterable[ChannelGroup], keeps: Iterable[Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return by name which elements to keep, given which units of each group are kept.

    Args:
        groups: Whose slices may name the same tensor; an element goes if any of its units does.
        keeps: One bool vector a group, True = keep.
        tensors: By name what may be masked; slices of others (running statistics) are left alone.

    Returns:
        bool tensors, for every tensor that any group reaches.
    """
    masks: dict[str, Tensor] = {}
    for group, keep in zip(groups, keeps, strict=True):
        gone = (~keep).cpu().numpy()
        for part in masked_slices(group):
            if part.tensor not in tensors:
                continue
            tensor = tensors[part.tensor]
            if part.tensor not in masks:
                masks[part.tensor] = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
            places = torch.from_numpy(np.asarray(part.positions)[gone].reshape(-1)).to(tensor.device)
            masks[part.tensor].index_fill_(part.axis, places, False)
    return masks


@torch.no_grad()
def kept_units(group: ChannelGroup, masks: Mapping[str, Tensor]) -> Tensor:
    """Return which units of a group whole masks keep: those that keep any element of any output.

    Example:
        >>> group = filter_groups({"weight": nn.Linear(2, 2, bias=False)})[0]
        >>> kept_units(group, {"weight": torch.tensor([[True, False], [False, False]])})
        tensor([ True, False])
    """
    keep = torch.zeros(group.units, dtype=torch.bool)
    for part in masked_slices(group):
        if part.tensor in masks:
            mask = masks[part.tensor].movedim(part.axis, 0).cpu()
            places = torch.from_numpy(np.asarray(part.positions))
            keep |= mask[places].reshape(group.units, -1).any(1)
    return keep
