"""Weight clustering: every nonzero weight becomes the centroid of its cluster, and zeros stay zeros.

k-means in one dimension uses one sort and prefix sums for Lloyd's iterations. Small weights are clustered in one
bundle, so that a step needs a dozen operations in total instead of a dozen per weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.errors import TrainingError, require
from shared_core.weight_clustering.config import MAX_BITS, MIN_BITS

Floats = NDArray[np.floating]

_PASSES = 1000
_ROUNDS = 16


def kmeans_1d(ordered: Floats, num_clusters: int) -> tuple[NDArray[np.float64], Floats]:
    """Return the centroids at a fixed point of Lloyd's iterations, and the smallest value of each except the first.

    ``min Σ_i Σ_{w in C_i} (w - c_i)²``, starting from centroids spaced linearly between the smallest and the largest
    value. This initialization preserved accuracy best, because the few but important large weights get their own
    centroids (Han, Mao and Dally 2016, arXiv:1510.00149, sections 3.1 and 3.2). In one dimension a cluster is a run of
    the sorted values, so one pass costs a binary search per centroid, for any number of values. Clusters that end up
    empty, such as those between the negative and positive weights of a pruned tensor, are moved into halves of the
    clusters with the largest error, as long as that lowers the sum.

    Args:
        ordered: Finite values, ascending, shape (n,), n >= 1, float32 or float64. Sums are computed in float64.
        num_clusters: Maximum number of clusters, at least 1. If there are no more distinct values, each is a centroid.

    Returns:
        Centroids, float64, ascending, without empty clusters, shape (k,), and the thresholds, shape (k - 1,). A value
        belongs to cluster ``np.searchsorted(thresholds, value, side="right")``, the one with the nearest centroid. At
        equal distances the lower one wins.

    Example:
        >>> centroids, thresholds = kmeans_1d(np.array([-1.0, -0.9, 0.5, 0.6, 0.7]), 2)
        >>> centroids.round(6).tolist(), thresholds.tolist()
        ([-0.95, 0.6], [0.5])
    """
    # If there are no more distinct values than clusters, each is a centroid, without error.
    is_first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    if np.count_nonzero(is_first) <= num_clusters:
        distinct = ordered[is_first]
        return distinct.astype(np.float64), distinct[1:]
    # Relative to the middle, so that prefix sums stay small.
    shift = float(ordered[len(ordered) // 2])
    sums = np.zeros(len(ordered) + 1)
    np.cumsum(np.subtract(ordered, shift, dtype=np.float64), out=sums[1:])
    # Linear initialization over the range: Han, Mao and Dally (2016, arXiv:1510.00149), section 3.2, found it best,
    # because it keeps centroids at large weights.
    centroids, edges = _lloyd(
        ordered, sums, shift, np.linspace(ordered[0], ordered[-1], num_clusters, dtype=np.float64)
    )
    # Linear initialization leaves clusters empty in sparse tails. Move their centroids where they lower the error most.
    for _ in range(_ROUNDS):
        if np.diff(edges).all():
            break
        errors = _errors(ordered, edges)
        placed = _split_largest(ordered, centroids, edges, errors)
        centroids_now, edges_now = _lloyd(ordered, sums, shift, placed)
        # Lloyd's iterations may end worse from the new start, so keep the better result.
        if not _errors(ordered, edges_now).sum() < errors.sum():
            break
        centroids, edges = centroids_now, edges_now
    starts = edges[:-1][np.diff(edges) > 0]
    counts = np.diff([*starts, len(ordered)])
    # Pairwise summation, unlike the prefix sums, is exact for small clusters among very many values.
    means = shift + np.add.reduceat(np.subtract(ordered, shift, dtype=np.float64), starts) / counts
    return means, ordered[starts[1:]]


def _lloyd(
    ordered: Floats, sums: NDArray[np.float64], shift: float, centroids: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return centroids, including those of empty clusters, and the edges of the clusters' runs."""
    edges = np.empty(0, dtype=np.intp)
    for _ in range(_PASSES):
        # In one dimension a cluster is a run of sorted values between two midpoints, so a pass costs K searches instead
        # of N distances.
        middles = (centroids[:-1] + centroids[1:]) / 2
        # Rounded down to the values' dtype, which changes no comparison and avoids a copy of all values.
        highest = middles.astype(ordered.dtype)
        highest = np.where(highest > middles, np.nextafter(highest, -np.inf, dtype=ordered.dtype), highest)
        # A value at a midpoint belongs to the lower cluster (side="right" includes values equal to it).
        found = np.concatenate([[0], np.searchsorted(ordered, highest, side="right"), [len(ordered)]])
        # The same runs as before are a fixed point, because centroids are a function of the runs.
        if np.array_equal(found, edges):
            break
        edges = found
        # Means from prefix sums, with two look-ups per cluster.
        counts = np.diff(edges)
        means = shift + np.diff(sums[edges]) / np.maximum(counts, 1)
        # An empty cluster keeps its centroid, so that it may gain members later.
        centroids = np.where(counts > 0, means, centroids)
    return centroids, edges


def _errors(ordered: Floats, edges: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return each cluster's sum of squared distances to its mean, 0 if empty."""
    errors = np.zeros(len(edges) - 1)
    for index, (first, last) in enumerate(itertools.pairwise(edges)):
        if last > first:
            run = ordered[first:last].astype(np.float64)
            errors[index] = np.square(run - run.mean()).sum()
    return errors


def _split_largest(
    ordered: Floats, centroids: NDArray[np.float64], edges: NDArray[np.intp], errors: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Remove empty clusters, and split as many of the clusters with the largest errors in two."""
    counts = np.diff(edges)
    # As many of the worst clusters as there are empty ones. A stable sort gives the same result everywhere.
    largest = np.argsort(-errors, kind="stable")[: int((counts == 0).sum())]
    chosen = {int(index) for index in largest if errors[index] > 0}
    placed = [centroids[index] for index in np.flatnonzero(counts) if int(index) not in chosen]
    for index in sorted(chosen):
        run = ordered[edges[index] : edges[index + 1]].astype(np.float64)
        # A cluster with an error has values on both sides of its mean.
        upper = run > run.mean()
        placed += [run[~upper].mean(), run[upper].mean()]
    return np.sort(np.array(placed))


SHARED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PIECE = 1 << 20
CACHED = 1 << 18
"""Elements per piece in a training step. Intermediate results stay in cache, which is four times as fast."""


@dataclass(frozen=True)
class SharedValues:
    """A tensor as codes into a short list of values.

    Attributes:
        codes: The tensor's shape, on the CPU, uint8 or int16: 0 for a zero, i for ``values[i - 1]``.
        values: The tensor's dtype, shape (k,), ascending and distinct.
    """

    codes: Tensor
    values: Tensor

    def weight(self) -> Tensor:
        """Return the tensor with shared weights, on the CPU."""
        weight = torch.empty(self.codes.shape, dtype=self.values.dtype)
        put_values_(weight, self.codes, self.values)
        return weight


def check_bits(bits: object, where: str) -> int:
    """Return `bits` if it is a whole number in [2, 8]."""
    is_whole = isinstance(bits, int) and not isinstance(bits, bool)
    rule = f"bits must be a whole number in [{MIN_BITS}, {MAX_BITS}], got {bits!r}"
    require(is_whole and bits in range(MIN_BITS, MAX_BITS + 1), where, rule)
    return bits  # type: ignore[return-value]


def wide(tensor: Tensor) -> NDArray[np.floating]:
    """Return a floating-point tensor's elements, flat and exact, in a dtype that numpy supports."""
    flat = tensor.detach().to("cpu").reshape(-1)
    # numpy has no bfloat16, and float32 represents all 16-bit numbers exactly.
    values: NDArray[np.floating] = (flat if flat.dtype == torch.float64 else flat.float()).numpy()
    return values


@torch.no_grad()
def share_values(weight: Tensor, bits: int, *, name: str = "weight") -> SharedValues:
    """Cluster the nonzero weights of a tensor by k-means to at most ``2**bits`` values. Zeros stay zeros.

    A tensor with no more distinct nonzero values keeps them all, so sharing again changes nothing. Zero is not a
    cluster, so all values serve the weights that remain after pruning (Han, Mao and Dally 2016, arXiv:1510.00149,
    section 3).

    Args:
        weight: float16, bfloat16, float32 or float64, any shape and device.
        bits: Bits per code, in [2, 8].
        name: Name for error messages.

    Returns:
        Codes and values. Centroids are rounded to the weight's dtype, and merged if that makes them equal.

    Raises:
        ConfigError: If `bits` is out of range or the dtype is not supported.
        TrainingError: If a weight is NaN or infinite.

    Example:
        >>> shared = share_values(torch.tensor([0.0, 1.0, 1.1, -1.0, 0.0, 3.0, 5.0]), 2)
        >>> shared.values, shared.codes
        (tensor([-1.0000,  1.0500,  3.0000,  5.0000]), tensor([0, 2, 2, 1, 0, 3, 4], dtype=torch.uint8))
    """
    check_bits(bits, name)
    rule = f"weight must be float16, bfloat16, float32 or float64, got {weight.dtype}"
    require(weight.dtype in SHARED_DTYPES, name, rule)
    flat = wide(weight)
    # Zeros are not clustered: a pruned weight stays zero, with code 0.
    live = flat != 0
    ordered = flat[live]
    if not np.isfinite(ordered).all():
        bad = int((~np.isfinite(flat)).argmax())
        raise TrainingError(
            name,
            f"weights must be finite to share values, got {flat[bad]} at flat index {bad}",
            "training has diverged, or this tensor is not a weight: exclude it with skip",
        )
    ordered.sort()
    if not len(ordered):
        codes = torch.zeros(weight.shape, dtype=torch.uint8)
        return SharedValues(codes, torch.empty(0, dtype=weight.dtype))
    centroids, thresholds = kmeans_1d(ordered, 2**bits)
    # Adding zero turns -0.0, which a mean may round to, into +0.0.
    # Neighboring centroids may round to the same value, and then share a code.
    values, index = torch.unique_consecutive(torch.from_numpy(centroids).to(weight.dtype) + 0.0, return_inverse=True)
    number = 1 + index.numpy()
    # 256 values and the code for zeros need 257 codes.
    narrow = np.uint8 if len(values) < 256 else np.int16
    codes_of = np.zeros(len(flat), dtype=narrow)
    for first in range(0, len(flat), _PIECE):
        piece = slice(first, first + _PIECE)
        # The same comparison with which `kmeans_1d` split the runs.
        clusters = np.searchsorted(thresholds, flat[piece], side="right")
        codes_of[piece] = np.where(live[piece], number[clusters], 0)
    return SharedValues(torch.from_numpy(codes_of).view(weight.shape), values)


def summed_by_code(gradient: Tensor, codes: Tensor, num_values: int) -> Tensor:
    """Return the gradient of each shared value: the sum over its weights, in float64.

    ``∂L/∂c_k = Σ_ij ∂L/∂w_ij · 1(I_ij = k)`` (Han, Mao and Dally 2016, arXiv:1510.00149, equation 3). The order of
    summation is fixed on CPU and CUDA, so equal gradients give equal sums on every rank.

    Args:
        gradient: Floating point, shape of the weight.
        codes: Integer, same shape and device: 0 for a zero, whose gradient is ignored, i for value i - 1.
        num_values: k.

    Returns:
        float64, shape (k,), on the gradient's device.

    Example:
        >>> summed_by_code(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 2, 1]), 2)
        tensor([9., 4.], dtype=torch.float64)
    """
    flat, places = gradient.detach().reshape(-1), codes.reshape(-1)
    if flat.is_cpu and flat.numel() <= CACHED:
        # Slot 0 collects the gradients of zeros, which are ignored.
        return torch.bincount(places, weights=flat.double(), minlength=num_values + 1)[1:]
    sums = torch.zeros(num_values + 1, dtype=torch.float64, device=flat.device)
    if not flat.is_cpu:
        # bincount and index_add_ have no fixed order on CUDA. This sorts first.
        return sums.index_put_((places.long(),), flat.double(), accumulate=True)[1:]
    # In pieces, because bincount needs float64 weights and int64 positions, eight bytes each.
    for part, of in zip(torch.split(flat, CACHED), torch.split(places, CACHED), strict=True):
        sums += torch.bincount(of, weights=part.double(), minlength=num_values + 1)
    return sums[1:]


@torch.no_grad()
def put_values_(weight: Tensor, codes: Tensor, values: Tensor) -> None:
    """Set every weight to the value of its code, in place, and to +0.0 for code 0.

    Args:
        weight: Floating point, any layout, including parameters.
        codes: Integer, same shape and device.
        values: Dtype and device of the weight, shape (k,).

    Example:
        >>> weight = torch.ones(4)
        >>> put_values_(weight, torch.tensor([2, 0, 1, 2]), torch.tensor([0.5, -1.0]))
        >>> weight
        tensor([-1.0000,  0.0000,  0.5000, -1.0000])
    """
    # Code 0 is the number 0, so zeros need no special case.
    table, places = torch.cat([values.new_zeros(1), values]), codes.reshape(-1)
    flat = weight.detach().reshape(-1)
    if flat.is_cpu and flat.numel() > CACHED:
        for part, of in zip(torch.split(flat, CACHED), torch.split(places, CACHED), strict=True):
            # index_select writes directly into the piece, table[places] would copy each.
            torch.index_select(table, 0, of.int(), out=part)
    else:
        torch.index_select(table, 0, places.int(), out=flat)
    # reshape copied (channels_last), so write back in the weight's own order.
    if flat.data_ptr() != weight.data_ptr():
        weight.detach().copy_(flat.view(weight.shape))


@dataclass(frozen=True)
class Bundle:
    """The clusters of one weight, or of several small ones in a row.

    Attributes:
        names: The weights, in order.
        codes: Flat integers: 0 for a zero, i for the i-th cluster of the bundle.
        first: int64 flat indices of first members. For a sharded weight those in the local part.
        of: The clusters of these first members, ascending.
        num_values: Number of clusters.
    """

    names: tuple[str, ...]
    codes: Tensor
    first: Tensor
    of: Tensor
    num_values: int

    @property
    def is_whole(self) -> bool:
        """True if the first members of all clusters are on this process."""
        return len(self.of) == self.num_values

    def flat(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the elements of the named tensors in one row, as a view if possible."""
        tensors = [parts[name] for name in self.names]
        if len(tensors) == 1:
            return tensors[0].reshape(-1)
        flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        return flat

    def put_(self, flat: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Write the changed result of `flat` back into the tensors, unless it is a view of them."""
        tensors = [parts[name] for name in self.names]
        if len(tensors) > 1:
            torch._foreach_copy_(tensors, _unflatten_dense_tensors(flat, tensors))  # type: ignore[no-untyped-call]
        elif flat.data_ptr() != tensors[0].data_ptr():  # not contiguous, such as channels_last
            tensors[0].copy_(flat.view(tensors[0].shape))


class Bundles:
    """The clusters of every weight. Small weights of one device and dtype are bundled."""

    def __init__(self, singles: Iterable[Bundle] = (), weights: Mapping[str, nn.Parameter] | None = None) -> None:
        self._singles = {single.names[0]: single for single in singles}
        alike: dict[object, list[list[Bundle]]] = {}
        for name, single in self._singles.items():
            weight = (weights or {})[name]
            groups = alike.setdefault(name if is_sharded(weight) else (weight.device, weight.dtype), [[]])
            # Join small weights of one device and dtype, so that a step runs one kernel for many of them. Sharded ones
            # are not joined, because their parts have different lengths on different processes.
            if groups[-1] and sum(len(each.codes) for each in groups[-1]) + len(single.codes) > CACHED:
                groups.append([])
            groups[-1].append(single)
        self._all = [_joined(group) for groups in alike.values() for group in groups if group]

    @property
    def num_values(self) -> int:
        """Total number of clusters."""
        return sum(bundle.num_values for bundle in self._all)

    def of(self, parts: Mapping[str, Tensor]) -> Iterator[Bundle]:
        """Yield the bundles of the weights in `parts`, or single weights where one is missing or has another dtype."""
        for bundle in self._all:
            # A weight without a gradient, or with a gradient of another dtype, cannot be in the joined row.
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
        # Shift codes past those of earlier weights, but keep 0 as the zero of every weight.
        codes.append(torch.where(places > 0, places + values, 0))
        first.append(bundle.first + elements)
        of.append(bundle.of + values)
        elements, values = elements + len(places), values + bundle.num_values
    names = tuple(name for bundle in bundles for name in bundle.names)
    return Bundle(names, torch.cat(codes), torch.cat(first), torch.cat(of), values)
