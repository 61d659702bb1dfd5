"""Clusters of several small weights as those of one tensor: a step's arithmetic is a few operations, not some a weight.

With many small weights a step takes what a dozen operations on each take, whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from shared_core.pruning.compression.sharing import CACHED
from shared_core.sharded import is_sharded


@dataclass(frozen=True)
class Bundle:
    """The clusters of weights that lie one after another; of most bundles it is one weight.

    `codes` are integers, flat: 0 for a zero, i for the i-th cluster of the bundle. `first` are flat indices of first
    members, int64, and `of` the clusters that they are of, ascending: of a sharded weight those in the part here.
    """

    names: tuple[str, ...]
    codes: Tensor
    first: Tensor
    of: Tensor
    num_values: int

    @property
    def is_whole(self) -> bool:
        """Whether the first members of all clusters are here."""
        return len(self.of) == self.num_values

    def flat(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the elements of tensors of these names in one row: a view where there is one."""
        tensors = [parts[name] for name in self.names]
        if len(tensors) == 1:
            return tensors[0].reshape(-1)
        flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        return flat

    def put_(self, flat: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Write what `flat` returned, changed in place, into the tensors where it is no view of them."""
        tensors = [parts[name] for name in self.names]
        if len(tensors) > 1:
            torch._foreach_copy_(tensors, _unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]
        elif flat.data_ptr() != tensors[0].data_ptr():  # not laid out in order, as channels_last is not
            tensors[0].copy_(flat.view(tensors[0].shape))


class Bundles:
    """The clusters of every weight, bundled where weights are small and of one device and dtype.

    Args:
        singles: A bundle of each weight alone.
        weights: By name; sharded ones stay alone, as their sums are collected from all processes.
    """

    def __init__(self, singles: Iterable[Bundle] = (), weights: Mapping[str, nn.Parameter] | None = None) -> None:
        self._singles = {single.names[0]: single for single in singles}
        alike: dict[object, list[list[Bundle]]] = {}
        for name, single in self._singles.items():
            weight = (weights or {})[name]
            groups = alike.setdefault(name if is_sharded(weight) else (weight.device, weight.dtype), [[]])
            if groups[-1] and sum(len(each.codes) for each in groups[-1]) + len(single.codes) > CACHED:
                groups.append([])
            groups[-1].append(single)
        self._all = [_joined(group) for groups in alike.values() for group in groups if group]

    @property
    def num_values(self) -> int:
        """The number of clusters of all weights."""
        return sum(bundle.num_values for bundle in self._all)

    def of(self, parts: Mapping[str, Tensor]) -> Iterator[Bundle]:
        """Yield the bundles of the weights in `parts`: those of which one is missing or of another dtype one by one."""
        for bundle in self._all:
            found = {part.dtype if (part := parts.get(name)) is not None else None for name in bundle.names}
            if len(found) == 1 and None not in found:
                yield bundle
            else:
                yield from (self._singles[name] for name in bundle.names if name in parts)


def _joined(bundles: list[Bundle]) -> Bundle:
    if len(bundles) == 1:
        return bundles[0]
    codes, first, of = [], [], []
    elements = values = 0
    for bundle in bundles:
        places = bundle.codes.int()
        codes.append(torch.where(places > 0, places + values, 0))
        first.append(bundle.first + elements)
        of.append(bundle.of + values)
        elements, values = elements + len(places), values + bundle.num_values
    names = tuple(name for bundle in bundles for name in bundle.names)
    return Bundle(names, torch.cat(codes), torch.cat(first), torch.cat(of), values)
