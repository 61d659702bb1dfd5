"""Other tensors in the place of an optimizer's parameters: in its groups and in its state."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import MatchError

HALF = (torch.float16, torch.bfloat16)


def replace_parameters_(optimizer: torch.optim.Optimizer, replacement: Mapping[Tensor, Tensor]) -> None:
    """Put other tensors into an optimizer's groups, in place, with the state of those that they replace.

    Torch's optimizers read their groups when they step, so what is there steps. What `replacement` does not name
    stays; the inverse mapping undoes it, also after groups were added in between.

    Args:
        optimizer: Changed in place; the order of its parameters, and so its state dict, stays.
        replacement: New tensor by the one whose place it takes.

    Example:
        >>> weight, other = torch.zeros(2, dtype=torch.float16), torch.zeros(2)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> replace_parameters_(optimizer, {weight: other})
        >>> other.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist(), other.tolist()
        ([0.0, 0.0], [-1.0, -1.0])
    """
    _replace_(optimizer, {id(old): new for old, new in replacement.items()}, optimizer.state)


def _replace_(optimizer: torch.optim.Optimizer, new: Mapping[int, Tensor], state: Any) -> None:
    # by identity: a tensor's hash is a call of Python's
    for group in optimizer.param_groups:
        # In place: schedulers and trainers may hold the list.
        group["params"][:] = [new.get(id(old), old) for old in group["params"]]
    # State is kept by tensor, so it moves to the new keys. Collected before the clear: `state` may be the optimizer's
    # own dict.
    moved = [(new.get(id(key), key), value) for key, value in optimizer.state.items()]
    state.clear()
    state.update(moved)
    # The very object: defaultdict(dict) with whatever else torch put into it.
    optimizer.state = state


class _Contents:
    """The groups and the state of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = [[*group["params"]] for group in optimizer.param_groups]
        self.state = optimizer.state
        self._keys, self._values = [*self.state], [*self.state.values()]

    def are_groups_of(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = [group["params"] for group in optimizer.param_groups]
        return len(groups) == len(self.groups) and all(map(are_same, groups, self.groups))

    def are_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        state = self.state
        return optimizer.state is state and are_same(state, self._keys) and are_same(state.values(), self._values)


class Exchange:
    """Other tensors for an optimizer's parameters, twice a step: forth and back.

    Both contents of the optimizer are remembered. While nobody changes them, lists and dictionaries are put in their
    places whole, and no parameter is looked up.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        # Two ways, each by id, computed once: an exchange happens twice a step.
        self._other = [{id(one): two for one, two in zip(*way, strict=True)} for way in ((old, new), (new, old))]
        self._contents: list[_Contents | None] = [_Contents(optimizer), None]
        self._side = 0

    @property
    def is_current(self) -> bool:
        """Whether the groups hold the tensors that they held when they were last exchanged."""
        contents = self._contents[0]
        return contents is not None and contents.are_groups_of(self.optimizer)

    def swap_(self) -> None:
        """Put the new tensors into the optimizer, or the old ones once the new ones are there."""
        optimizer, side = self.optimizer, self._side
        here, there = self._contents[side], self._contents[1 - side]
        # Nothing was added or removed since: both sides' lists and states still hold the same objects, so they are
        # exchanged whole. Else (a group added, state made in the first step) the maps are built again.
        if here and there and here.are_groups_of(optimizer) and here.are_state_of(optimizer):
            for group, parameters in zip(optimizer.param_groups, there.groups, strict=True):
                group["params"][:] = parameters
            optimizer.state = there.state
        else:
            self._contents[side] = _Contents(optimizer)
            # copy.copy keeps the class (defaultdict); its contents are replaced next.
            unused = there.state if there and there.state is not optimizer.state else copy.copy(optimizer.state)
            _replace_(optimizer, self._other[side], unused)
            self._contents[1 - side] = _Contents(optimizer)
        self._side = 1 - side


def are_same(one: Collection[object], other: Collection[object]) -> bool:
    """Return whether two collections hold the very same objects in one order."""
    return len(one) == len(other) and all(map(is_, one, other))


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return every parameter of the optimizers once, in their order."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return [*{id(parameter): parameter for parameters in groups for parameter in parameters}.values()]


def trained_in_16_bit(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return every trainable fp16 or bf16 parameter of the optimizers once, in their order."""
    return [*filter(is_trained_in_16_bit, parameters_of(optimizers))]


def is_trained_in_16_bit(parameter: Tensor) -> bool:
    """Return whether a parameter is trainable and fp16 or bf16."""
    return parameter.dtype in HALF and parameter.requires_grad


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the floating-point state of a parameter's shape by name: what torch casts when it is loaded."""
    return {
        name: value
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
    }


def check_match(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters of which none is trained in 16 bit."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if dtypes.isdisjoint(HALF):
        raise MatchError(
            "primary_weights",
            "the model must be loaded in 16 bit, with trainable float16 or bfloat16 parameters, got "
            f"{', '.join(sorted(map(dtype_name, dtypes))) or 'none that are trainable'}",
            "load it so or drop primary_weights: autocast leaves parameters in float32, which need no copy",
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float16`` of ``torch.float16``."""
    return str(dtype).removeprefix("torch.")
