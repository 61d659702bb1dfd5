"""Putting a ticket's weights in place of a model's: under whose names, and whether anything moves at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CheckpointError
from shared_core.module_match import plain_name
from shared_core.pruning.lottery.ticket import Ticket
from shared_core.ranks import all_reduce_, is_main, local_part
from shared_core.sharded import fill_, is_sharded, place_of, whole


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied one once, under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[object] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        storage: object = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        storage = id(value) if is_sharded(value) else storage  # this process's part of it may be empty
        if storage not in seen:
            seen.add(storage)
            found[plain_name(name)] = value.detach()
    return found


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return `own_tensors` to be written: what FSDP2 shards is gathered one by one, into the main process's memory.

    Every process must call it; the others then hold nothing.
    """
    own = own_tensors(model)
    if not any(map(is_sharded, own.values())):
        return own
    gathered = ((name, whole(value)) for name, value in own.items())
    return {name: value.cpu() for name, value in gathered if is_main()}


def renamed(ticket: Ticket, weights: Mapping[str, Tensor], source: str) -> Ticket:
    """Return the ticket under the names of the weights to mask: a ticket found in one trainer serves in another.

    The names may differ by a prefix that they all have (``net.`` in a LightningModule).

    Args:
        ticket: As it was read.
        weights: What its masks must be of.
        source: Its file, for errors.

    Raises:
        CheckpointError: If it is of other weights.
    """
    add, remove = _prefixes(list(ticket.masks), list(weights))
    masks = {add + name.removeprefix(remove): mask for name, mask in ticket.masks.items()}
    for name in sorted({*masks, *weights}):
        if name not in masks or name not in weights:
            side = "the model" if name not in masks else "the ticket"
            raise CheckpointError(
                f"ticket: {source} must be a ticket of this model's weights, but only {side} has {name}; train the "
                "model that it was found in, with the same include, skip and min_size"
            )
        if masks[name].shape != weights[name].shape:
            raise CheckpointError(
                f"ticket: {source} must be a ticket of this model's weights, but {name} has shape "
                f"{tuple(weights[name].shape)} and its mask {tuple(masks[name].shape)}"
            )
    if not (add or remove):
        return ticket
    return dataclasses.replace(ticket, masks=masks, weights=_Renamed(ticket.weights, add, remove))


def _prefixes(theirs: list[str], own: list[str]) -> tuple[str, str]:
    """Return what to add to all of their names and what to remove, so that they become our own; else nothing."""
    if not theirs or set(theirs) == set(own):
        return "", ""
    for name in own:
        if name.endswith(f".{theirs[0]}"):
            prefix = name.removesuffix(theirs[0])
            if {prefix + other for other in theirs} == set(own):
                return prefix, ""
    for name in own:
        if theirs[0].endswith(f".{name}"):
            prefix = theirs[0].removesuffix(name)
            if {other.removeprefix(prefix) for other in theirs} == set(own):
                return "", prefix
    return "", ""


class _Renamed(Mapping[str, Tensor]):
    def __init__(self, weights: Mapping[str, Tensor], add: str, remove: str) -> None:
        self._weights = weights
        self._names = {add + name.removeprefix(remove): name for name in weights}

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def first_difference(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], source: str) -> str | None:
    """Return the name of the first tensor that is not equal bit for bit, None if all are; every process must call it.

    Of a sharded one each process compares its part.

    Raises:
        CheckpointError: If they are not the tensors of one model.
    """
    odd = next((name for name in sorted({*own, *theirs}) if name not in own or name not in theirs), None)
    if odd is None:
        odd = next((name for name, value in own.items() if _kind(value) != _kind(theirs[name])), None)
    if odd is not None:
        told = [str(_kind(side[odd])) if odd in side else "none" for side in (own, theirs)]
        raise CheckpointError(
            f"ticket: {source} must hold the weights of this model, but {odd} is {told[0]} in the model and {told[1]} "
            "in the ticket; train the model that it was found in"
        )
    if not any(map(is_sharded, own.values())):
        return next((name for name, value in own.items() if not same_bits(value, theirs[name])), None)
    differ = [not same_bits(local_part(value), theirs[name][place_of(value)]) for name, value in own.items()]
    all_reduce_(joined := torch.tensor(differ, dtype=torch.int32, device=next(iter(own.values())).device), "max")
    return next((name for name, is_odd in zip(own, joined.tolist(), strict=True) if is_odd), None)


def _kind(value: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(value.shape), value.dtype


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bits, also where these are NaN or -0.0.

    Example:
        >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
        True
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    bits = [side.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for side in (first, second)]
    return torch.equal(*bits)


@torch.no_grad()
def load_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into the model's own tensors, in place."""
    for name, value in own_tensors(model).items():
        fill_(value, weights[name])


def set_learning_rates(optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[Sequence[Any]]) -> None:
    """Give every parameter group of every optimizer its learning rate."""
    for optimizer, its in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, its, strict=True):
            group["lr"] = rate


def learning_rates(
    optimizers: Sequence[torch.optim.Optimizer], as_type: Callable[[Any], Any] = float
) -> tuple[tuple[Any, ...], ...]:
    """Return the learning rate of every parameter group of every optimizer."""
    return tuple(tuple(as_type(group["lr"]) for group in optimizer.param_groups) for optimizer in optimizers)


def fitting_rates(
    optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[Sequence[float]]
) -> Sequence[Sequence[float]] | None:
    """Return saved learning rates for these parameter groups; one that all groups had serves any groups; else None."""
    sizes = [len(its) for its in learning_rates(optimizers)]
    if [len(its) for its in rates] == sizes:
        return rates
    values = {rate for its in rates for rate in its}
    return [list(values) * size for size in sizes] if len(values) == 1 else None
