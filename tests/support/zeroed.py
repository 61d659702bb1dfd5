"""Units of a model that are zero, as pruning leaves them."""

import torch

from shared_core.channel_graph import find_groups


def zero_units(model, group, units, roles=("out", "norm")):
    """Zero units of a group in place: a slice, numbers or a mask of them."""
    state = model.state_dict()
    for part in group.slices:
        if part.role in roles:
            places = torch.from_numpy(part.positions[units].reshape(-1))
            state[part.tensor].index_fill_(part.axis, places, 0)


def zero_every(step, model, inputs, kinds=("channel", "neuron", "head"), roles=("out", "norm")):
    """Zero one unit in `step`, in place, of every group that can lose some; return these groups."""
    groups = [group for group in find_groups(model, inputs) if group.reason_kept is None and group.kind in kinds]
    for group in groups:
        zero_units(model, group, slice(1, None, step), roles)
    return groups
