"""Ids for the positions of every tensor's axes, and which of them can only be removed together."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]

FIXED = 0
"""The id of what can never be removed."""


class Role(enum.IntFlag):
    """What an axis of a tensor does for the values at its positions."""

    OUT = 1
    """It makes them: rows of a weight, its bias, an embedding's columns."""
    NORM = 2
    """It scales or shifts them: the parameters of a norm, a layer scale."""
    IN = 4
    """It consumes them in a sum: columns of a weight."""
    STAT = 8
    """It is measured from them: the running mean and variance of a batch norm."""


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor: its positions have the ids from `start` on."""

    tensor: str
    axis: int
    start: int
    size: int


def varying_dims(label: Tensor) -> tuple[int, ...]:
    """Return the dims along which a label's ids differ.

    A label is an int64 tensor of the shape of what it labels; along every other dim its stride is 0.
    """
    return tuple(
        dim
        for dim, (size, stride) in enumerate(zip(label.shape, label.stride(), strict=True))
        if size > 1 and stride != 0
    )


def core(label: Tensor) -> Tensor:
    """Return the label with size 1 along the dims where its ids do not differ."""
    varying = varying_dims(label)
    for dim in range(label.ndim):
        if dim not in varying:
            label = label.narrow(dim, 0, 1)
    return label


def along(label: Tensor, dim: int) -> Tensor:
    """Return the ids along one dim, at the first place of every other.

    Example:
        >>> along(torch.tensor([[1, 2], [3, 4]]), 0)
        tensor([1, 3])
    """
    for other in reversed(range(label.ndim)):
        if other != dim:
            label = label.select(other, 0)
    return label


def compact(label: Tensor) -> Tensor:
    """Return the same label with stride 0 along every dim where its ids do not differ.

    Example:
        >>> varying_dims(compact(torch.tensor([[1, 2], [1, 2]])))
        (1,)
    """
    shape, inner = label.shape, core(label)
    for dim in range(inner.ndim):
        first = inner.narrow(dim, 0, 1)
        if inner.shape[dim] > 1 and torch.equal(inner, first.expand_as(inner)):
            inner = first
    return inner.expand(shape)


class Positions:
    """Union-find over ids, in bulk: what is removed together, what must stay and why, and what each id is.

    Args:
        shapes: Shape of every tensor by name; each of their axes gets ids.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.axes: dict[tuple[str, int], Axis] = {}
        start = FIXED + 1
        for name, shape in shapes.items():
            for axis, size in enumerate(shape):
                self.axes[name, axis] = Axis(name, axis, start, size)
                start += size
        self.count = start
        self.roles = np.zeros(start, dtype=np.uint8)
        self.in_heads = np.zeros(start, dtype=bool)
        self.in_convolutions = np.zeros(start, dtype=bool)
        self._pairs: list[tuple[Ids, Ids]] = []
        self._pins: list[tuple[Ids, str]] = []

    def label(self, name: str, axis: int, like: Tensor) -> Tensor:
        """Return the label of one axis of a tensor, in the tensor's shape."""
        found = self.axes[name, axis]
        ids = torch.arange(found.start, found.start + found.size, device=like.device)
        return ids.view([-1 if dim == axis else 1 for dim in range(like.ndim)]).expand(like.shape)

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Note that ids at equal places are removed together; the labels broadcast against each other."""
        first, second = core(first), core(second)
        shape = np.broadcast_shapes(first.shape, second.shape)
        flat = [label.expand(shape).reshape(-1).cpu().numpy() for label in (first, second)]
        pairs = np.unique(np.stack(flat), axis=1)
        self._pairs.append((pairs[0], pairs[1]))

    def unite_along(self, label: Tensor, dims: tuple[int, ...], reason: str) -> None:
        """Note that along `dims` all goes or nothing; where nothing else varies, it stays, for `reason`."""
        varying = varying_dims(label)
        dims = tuple(dim for dim in dims if dim in varying)
        if dims == varying:
            self.pin(label, reason)
            return
        inner = core(label)
        first = inner
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        if dims:
            self.unite(inner, first)

    def pin(self, label: Tensor, reason: str) -> None:
        """Note that none of these ids can be removed; the first reason given is the one that is told."""
        self._pins.append((flat_ids(label), reason))

    def mark(self, label: Tensor, role: Role) -> None:
        """Note what an axis does for the positions it names."""
        self.roles[flat_ids(label)] |= int(role)

    def components(self) -> Ids:
        """Return, for every id, the smallest id among those it is removed with."""
        parent: Ids = np.arange(self.count, dtype=np.int64)
        if not self._pairs:
            return parent
        first = np.concatenate([pair[0] for pair in self._pairs])
        second = np.concatenate([pair[1] for pair in self._pairs])
        while True:
            low, high = np.minimum(parent[first], parent[second]), np.maximum(parent[first], parent[second])
            open_pairs = low != high
            if not open_pairs.any():
                return parent
            np.minimum.at(parent, high[open_pairs], low[open_pairs])
            while not np.array_equal(parent, parent[parent]):
                parent = parent[parent]

    def pinned(self, components: Ids) -> dict[int, str]:
        """Return the reason why a component stays, by its smallest id."""
        reasons: dict[int, str] = {FIXED: "it is joined to a tensor of fixed size"}
        for ids, reason in self._pins:
            for root in np.unique(components[ids]):
                reasons.setdefault(int(root), reason)
        return reasons


def flat_ids(label: Tensor) -> Ids:
    """Return the different ids of a label."""
    found: Ids = np.unique(core(label).reshape(-1).cpu().numpy())
    return found
