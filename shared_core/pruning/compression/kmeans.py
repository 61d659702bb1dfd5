"""k-means of numbers on a line: Lloyd's iterations exactly, by sorting once and prefix sums."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

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
    is_first = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    if np.count_nonzero(is_first) <= num_clusters:
        distinct = ordered[is_first]
        return distinct.astype(np.float64), distinct[1:]
    # relative to the middle, so that the prefix sums stay small
    shift = float(ordered[len(ordered) // 2])
    sums = np.zeros(len(ordered) + 1)
    np.cumsum(np.subtract(ordered, shift, dtype=np.float64), out=sums[1:])
    centroids, edges = _lloyd(
        ordered, sums, shift, np.linspace(ordered[0], ordered[-1], num_clusters, dtype=np.float64)
    )
    for _ in range(_ROUNDS):
        if np.diff(edges).all():
            break
        errors = _errors(ordered, edges)
        placed = _split_largest(ordered, centroids, edges, errors)
        centroids_now, edges_now = _lloyd(ordered, sums, shift, placed)
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
        middles = (centroids[:-1] + centroids[1:]) / 2
        # rounded down to the values' dtype, which changes no comparison and spares a copy of all values
        highest = middles.astype(ordered.dtype)
        highest = np.where(highest > middles, np.nextafter(highest, -np.inf, dtype=ordered.dtype), highest)
        found = np.concatenate([[0], np.searchsorted(ordered, highest, side="right"), [len(ordered)]])
        if np.array_equal(found, edges):
            break
        edges = found
        counts = np.diff(edges)
        means = shift + np.diff(sums[edges]) / np.maximum(counts, 1)
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
    largest = np.argsort(-errors, kind="stable")[: int((counts == 0).sum())]
    chosen = {int(index) for index in largest if errors[index] > 0}
    placed = [centroids[index] for index in np.flatnonzero(counts) if int(index) not in chosen]
    for index in sorted(chosen):
        run = ordered[edges[index] : edges[index + 1]].astype(np.float64)
        # a cluster with an error has a value on either side of its mean
        upper = run > run.mean()
        placed += [run[~upper].mean(), run[upper].mean()]
    return np.sort(np.array(placed))
