"""Weight clustering: every nonzero weight becomes the centroid of its cluster; zeros stay zeros.

k-means on a line is exact: Lloyd's iterations by one sort and prefix sums. Many small weights are clustered as one
bundle, so that a step takes a dozen operations and not a dozen for each weight.
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
    """Return the centroids of a fixed point of Lloyd's iterations, and the smallest value of each but the first.

    ``min Σ_i Σ_{w in C_i} (w - c_i)²``, from centroids spaced linearly between the smallest and the largest value,
    which is the initialisation that kept most accuracy because large weights, few but important, get centroids of
    their own (Han, Mao and Dally 2016, arXiv:1510.00149, sections 3.1 and 3.2). On a line a cluster is a run of the
    sorted values, so one pass costs a binary search for each centroid, however many values there are. Clusters
    that end up empty, as those do which fall between the negative and the positive weights of a pruned tensor, are
    placed anew, in the halves of the clusters with the largest error, as long as that lowers the sum.

    Args:
        ordered: Finite values, ascending, shape (n,), n >= 1, float32 or float64; sums are made in float64.
        num_clusters: Most clusters, at least 1. With no more distinct values than that each is a centroid, exactly.

    Returns:
        Centroids, float64, ascending, none of them empty, shape (k,), and the thresholds, shape (k - 1,): a value
        belongs to cluster ``np.searchsorted(thresholds, value, side="right")``, which is its nearest centroid's; at
        equal distances the lower one.

    Example:
        >>> centroids, thresholds = kmeans_1d(np.array([-1.0, -0.9, 0.5, 0.6, 0.7]), 2)
        >>> centroids.round(6).tolist(), thresholds.tolist()
        ([-0.95, 0.6], [0.5])
    """
    # Fewer distinct values than clusters: each is a centroid, without error.
    is_first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    if np.count_nonzero(is_first) <= num_clusters:
        distinct = ordered[is_first]
        return distinct.astype(np.float64), distinct[1:]
    # relative to the middle, so that the prefix sums stay small
    shift = float(ordered[len(ordered) // 2])
    sums = np.zeros(len(ordered) + 1)
    np.cumsum(np.subtract(ordered, shift, dtype=np.float64), out=sums[1:])
    # Linear initialisation over the range: Han, Mao and Dally (2016, arXiv:1510.00149), section 3.2, found it the
    # best, as it keeps centroids at large weights.
    centroids, edges = _lloyd(
        ordered, sums, shift, np.linspace(ordered[0], ordered[-1], num_clusters, dtype=np.float64)
    )
    # Linear initialisation leaves clusters empty in sparse tails: their centroids are put where they lower the error
    # most.
    for _ in range(_ROUNDS):
        if np.diff(edges).all():
            break
        errors = _errors(ordered, edges)
        placed = _split_largest(ordered, centroids, edges, errors)
        centroids_now, edges_now = _lloyd(ordered, sums, shift, placed)
        # Lloyd's iterations from the new start may end worse: keep the better one.
        if not _errors(ordered, edges_now).sum() < errors.sum():
            break
        centroids, edges = centroids_now, edges_now
    starts = edges[:-1][np.diff(edges) > 0]
    counts = np.diff([*starts, len(ordered)])
    # summed pairwise, which the prefix sums are not: exact for clusters of few values among very many
    means = shift + np.add.reduceat(np.subtract(ordered, shift, dtype=np.float64), starts) / counts
    return means, ordered[starts[1:]]


def _lloyd(
    ordered: Floats, sums: NDArray[np.float64], shift: float, centroids: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return centroids, also those of empty clusters, and where each cluster's run begins and ends."""
    edges = np.empty(0, dtype=np.intp)
    for _ in range(_PASSES):
        # In one dimension a cluster is a run of sorted values between two middles: a pass costs K searches and not N
        # distances.
        middles = (centroids[:-1] + centroids[1:]) / 2
        # rounded down to the values' dtype, which changes no comparison and spares a copy of all values
        highest = middles.astype(ordered.dtype)
        highest = np.where(highest > middles, np.nextafter(highest, -np.inf, dtype=ordered.dtype), highest)
        # A value at a middle belongs to the lower cluster (side="right" counts those equal to it).
        found = np.concatenate([[0], np.searchsorted(ordered, highest, side="right"), [len(ordered)]])
        # The same runs as before: a fixed point, as centroids are a function of the runs.
        if np.array_equal(found, edges):
            break
        edges = found
        # Means from prefix sums: two look-ups a cluster.
        counts = np.diff(edges)
        means = shift + np.diff(sums[edges]) / np.maximum(counts, 1)
        # An empty cluster keeps its centroid, so that it may get members later.
        centroids = np.where(counts > 0, means, centroids)
    return centroids, edges


def _errors(ordered: Floats, edges: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return each cluster's sum of squared distances to its mean; 0 for an empty one."""
    errors = np.zeros(len(edges) - 1)
    for index, (first, last) in enumerate(itertools.pairwise(edges)):
        if last > first:
            run = ordered[first:last].astype(np.float64)
            errors[index] = np.square(run - run.mean()).sum()
    return errors


def _split_largest(
    ordered: Floats, centroids: NDArray[np.float64], edges: NDArray[np.intp], errors: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return centroids without empty clusters; as many of those with the largest errors are split in two."""
    counts = np.diff(edges)
    # As many of the worst clusters as there are empty ones. Stable, so that equal errors give the same result
    # everywhere.
    largest = np.argsort(-errors, kind="stable")[: int((counts == 0).sum())]
    chosen = {int(index) for index in largest if errors[index] > 0}
    placed = [centroids[index] for index in np.flatnonzero(counts) if int(index) not in chosen]
    for index in sorted(chosen):
        run = ordered[edges[index] : edges[index + 1]].astype(np.float64)
        # a cluster with an error has a value on either side of its mean
        upper = run > run.mean()
        placed += [run[~upper].mean(), run[upper].mean()]
    return np.sort(np.array(placed))


SHARED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PIECE = 1 << 20
CACHED = 1 << 18
"""Elements at a time in a training step: what is made in between stays in cache, four times as fast."""


@dataclass(frozen=True)
class SharedValues:
    """A tensor as codes into a short list of values.

    `codes` has the tensor's shape, on CPU, uint8 or int16: 0 for a zero, i for ``values[i - 1]``. `values` has its
    dtype, shape (k,), ascending, each once.
    """

    codes: Tensor
    values: Tensor

    def weight(self) -> Tensor:
        """Return the tensor whose weights are shared, on CPU."""
        weight = torch.empty(self.codes.shape, dtype=self.values.dtype)
        put_values_(weight, self.codes, self.values)
        return weight


def check_bits(bits: object, where: str) -> int:
    """Return `bits` if it is a whole number in [2, 8]."""
    is_whole = isinstance(bits, int) and not isinstance(bits, bool)
    told = f"bits must be a whole number in [{MIN_BITS}, {MAX_BITS}], got {bits!r}"
    require(is_whole and bits in range(MIN_BITS, MAX_BITS + 1), where, told)
    return bits  # type: ignore[return-value]


def wide(tensor: Tensor) -> NDArray[np.floating]:
    """Return a floating-point tensor's elements, flat, in a dtype that numpy has; exactly the same numbers."""
    flat = tensor.detach().to("cpu").reshape(-1)
    # numpy has no bfloat16; float32 holds all 16-bit numbers exactly.
    values: NDArray[np.floating] = (flat if flat.dtype == torch.float64 else flat.float()).numpy()
    return values


@torch.no_grad()
def share_values(weight: Tensor, bits: int, *, name: str = "weight") -> SharedValues:
    """Return a tensor whose nonzero weights share at most ``2**bits`` values, found by k-means; zeros stay zeros.

    A tensor that has no more distinct nonzero values than that keeps them all: sharing again changes nothing. Zero is
    no cluster, so all of them serve the weights that are left after pruning (Han, Mao and Dally 2016,
    arXiv:1510.00149, section 3).

    Args:
        weight: float16, bfloat16, float32 or float64, any shape and device.
        bits: Of a code, in [2, 8].
        name: For errors.

    Returns:
        Codes and values. Centroids are rounded to the weight's dtype, those that become equal are one.

    Raises:
        ConfigError: If `bits` is out of range or the dtype is another.
        TrainingError: If a weight is NaN or infinite.

    Example:
        >>> shared = share_values(torch.tensor([0.0, 1.0, 1.1, -1.0, 0.0, 3.0, 5.0]), 2)
        >>> shared.values, shared.codes
        (tensor([-1.0000,  1.0500,  3.0000,  5.0000]), tensor([0, 2, 2, 1, 0, 3, 4], dtype=torch.uint8))
    """
    check_bits(bits, name)
    told = f"weight must be float16, bfloat16, float32 or float64, got {weight.dtype}"
    require(weight.dtype in SHARED_DTYPES, name, told)
    flat = wide(weight)
    # Zeros are not clustered: a pruned weight stays zero, and its code is 0.
    live = flat != 0
    ordered = flat[live]
    if not np.isfinite(ordered).all():
        bad = int((~np.isfinite(flat)).argmax())
        raise TrainingError(
            name,
            f"weights must be finite to share values, got {flat[bad]} at flat index {bad}",
            "training has diverged, or this tensor is no weight: leave it out",
        )
    ordered.sort()
    if not len(ordered):
        codes = torch.zeros(weight.shape, dtype=torch.uint8)
        return SharedValues(codes, torch.empty(0, dtype=weight.dtype))
    centroids, thresholds = kmeans_1d(ordered, 2**bits)
    # adding zero turns -0.0, which a mean may round to, into +0.0
    # Rounded to the weight's dtype, neighbouring centroids may become one value: they get one code.
    values, index = torch.unique_consecutive(torch.from_numpy(centroids).to(weight.dtype) + 0.0, return_inverse=True)
    number = 1 + index.numpy()
    # 256 values and the code of zeros need 257 codes.
    narrow = np.uint8 if len(values) < 256 else np.int16
    codes_of = np.zeros(len(flat), dtype=narrow)
    for first in range(0, len(flat), _PIECE):
        piece = slice(first, first + _PIECE)
        # The same comparison that `kmeans_1d` cut the runs with.
        clusters = np.searchsorted(thresholds, flat[piece], side="right")
        codes_of[piece] = np.where(live[piece], number[clusters], 0)
    return SharedValues(torch.from_numpy(codes_of).view(weight.shape), values)


def summed_by_code(gradient: Tensor, codes: Tensor, num_values: int) -> Tensor:
    """Return the gradient of each shared value: the sum over the weights that have it, in float64.

    ``∂L/∂c_k = Σ_ij ∂L/∂w_ij · 1(I_ij = k)`` (Han, Mao and Dally 2016, arXiv:1510.00149, equation 3). The order of the
    sum is fixed on CPU and on CUDA, so equal gradients give equal sums on every rank.

    Args:
        gradient: Floating point, of the weight's shape.
        codes: Integer, the same shape and device: 0 for a zero, whose gradient goes nowhere, i for value i - 1.
        num_values: k.

    Returns:
        float64, shape (k,), on the gradient's device.

    Example:
        >>> summed_by_code(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 2, 1]), 2)
        tensor([9., 4.], dtype=torch.float64)
    """
    flat, places = gradient.detach().reshape(-1), codes.reshape(-1)
    if flat.is_cpu and flat.numel() <= CACHED:
        # Slot 0 collects the zeros and is left out: their gradient is not used.
        return torch.bincount(places, weights=flat.double(), minlength=num_values + 1)[1:]
    sums = torch.zeros(num_values + 1, dtype=torch.float64, device=flat.device)
    if not flat.is_cpu:
        # bincount and index_add_ add in no fixed order on CUDA; this sorts first
        return sums.index_put_((places.long(),), flat.double(), accumulate=True)[1:]
    # In pieces: bincount takes float64 weights and int64 places, eight bytes each.
    for part, of in zip(torch.split(flat, CACHED), torch.split(places, CACHED), strict=True):
        sums += torch.bincount(of, weights=part.double(), minlength=num_values + 1)
    return sums[1:]


@torch.no_grad()
def put_values_(weight: Tensor, codes: Tensor, values: Tensor) -> None:
    """Give every weight the value that its code says, in place, and +0.0 where the code is 0.

    Args:
        weight: Floating point, any layout; parameters too.
        codes: Integer, of the same shape and device.
        values: Of the weight's dtype, shape (k,), on its device.

    Example:
        >>> weight = torch.ones(4)
        >>> put_values_(weight, torch.tensor([2, 0, 1, 2]), torch.tensor([0.5, -1.0]))
        >>> weight
        tensor([-1.0000,  0.0000,  0.5000, -1.0000])
    """
    # Code 0 is the number 0, so zeros need no case of their own.
    table, places = torch.cat([values.new_zeros(1), values]), codes.reshape(-1)
    flat = weight.detach().reshape(-1)
    if flat.is_cpu and flat.numel() > CACHED:
        for part, of in zip(torch.split(flat, CACHED), torch.split(places, CACHED), strict=True):
            # index_select writes straight into the piece; table[places] would make a copy of each.
            torch.index_select(table, 0, of.int(), out=part)
    else:
        torch.index_select(table, 0, places.int(), out=flat)
    # reshape copied (channels_last): write it back in the weight's own order.
    if flat.data_ptr() != weight.data_ptr():
        weight.detach().copy_(flat.view(weight.shape))


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
        """True if the first members of all clusters are here."""
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
    """The clusters of every weight, bundled where weights are small and of one device and dtype."""

    def __init__(self, singles: Iterable[Bundle] = (), weights: Mapping[str, nn.Parameter] | None = None) -> None:
        self._singles = {single.names[0]: single for single in singles}
        alike: dict[object, list[list[Bundle]]] = {}
        for name, single in self._singles.items():
            weight = (weights or {})[name]
            groups = alike.setdefault(name if is_sharded(weight) else (weight.device, weight.dtype), [[]])
            # Small weights of one device and dtype are joined, so that a step runs one kernel for many of them;
            # sharded ones are not, as their parts are of different lengths on different processes.
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
            # A weight without a gradient, or whose gradient has another dtype, cannot be in the joined row.
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
        # Codes are moved past those of the weights before, but 0 stays 0: a zero of any weight.
        codes.append(torch.where(places > 0, places + values, 0))
        first.append(bundle.first + elements)
        of.append(bundle.of + values)
        elements, values = elements + len(places), values + bundle.num_values
    names = tuple(name for bundle in bundles for name in bundle.names)
    return Bundle(names, torch.cat(codes), torch.cat(first), torch.cat(of), values)
