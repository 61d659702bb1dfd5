"""Averages and merges of checkpoints: uniform, weighted, task vectors (TIES, DARE) and SLERP of two models.

Merges are computed tensor by tensor, as mergekit does.
"""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shared_core.checkpoint_formats import ADAPTER, IN_MEMORY, Ingredient
from shared_core.config.options import checked
from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup.adapters import candidate_for
from shared_core.soup.averaging import Candidate, accumulator_dtype, chunks, non_finite_tensor
from shared_core.soup.ingredients import Source, check_able, check_number_of, open_ingredients
from shared_core.soup.scoring import not_finite


@dataclass(frozen=True)
class Average:
    """The mean of ingredients, and which ones it includes."""

    state_dict: dict[str, Tensor]
    ingredients: list[str]
    """Names of the members."""
    weights: list[float]
    """The weight of each member."""
    left_out: dict[str, str]
    """Name of each other ingredient → why it is left out."""


def uniform_soup(
    ingredients: Sequence[Source],
    weights: Sequence[float] | None = None,
    *,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
    rank: int | None = None,
) -> dict[str, Tensor]:
    r"""Return the state dict of the mean of all ingredients, ``sum(w_i x_i) / sum(w_i)``, accumulated in float32.

    Integers, booleans and dtypes come from the first ingredient. An ingredient with NaN or infinity is left out with a
    warning.

    Args:
        ingredients: Paths (see `open_ingredient`) or state dicts.
        weights: One number >= 0 per ingredient, such as the example counts of federated averaging. All 1 by default.
        after_average: Called with the result, to change it in place.
        into: Tensors to write the result into. By default new ones.
        rank: Cut averages of adapters to this rank by SVD. A single adapter is not cut. See `AdapterWeights.errors`.

    Raises:
        CheckpointError: If an ingredient cannot be read or does not match the others, or none is finite.
        ConfigError: If the number of weights is wrong, one is negative or not finite, or all are 0.

    Source: Wortsman et al., 2022, arXiv:2203.05482; weights: McMahan et al., 2017, arXiv:1602.05629.

    Example:
        >>> import torch
        >>> clients = [{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}]
        >>> uniform_soup(clients)["w"], uniform_soup(clients, weights=[1, 3])["w"]
        (tensor([2.]), tensor([3.]))
    """
    found = average_of(ingredients, weights, after_average=after_average, into=into, rank=rank)
    for name, reason in found.left_out.items():
        warnings.warn(f"soup: {name} is {reason}", stacklevel=2)
    return found.state_dict


def average_of(
    ingredients: Sequence[Source],
    weights: Sequence[float] | None = None,
    *,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
    rank: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Average:
    """Return the result of `uniform_soup`, with the names of the members and of those left out.

    `progress` is called with (files read, files to read). Each is read twice, first to look for non-finite values.
    """
    opened = open_ingredients(ingredients)
    check_weights(weights, len(opened))
    candidate = candidate_for(opened, into, after_average, rank)
    shares = [1.0] * len(opened) if weights is None else [float(weight) for weight in weights]
    members, left_out = [], {}
    for number, (item, share) in enumerate(zip(opened, shares, strict=True), start=1):
        progress(number, 2 * len(opened))
        # Checked before the mean starts, because a NaN could not be removed again.
        bad = non_finite_tensor(item)
        if bad is not None:
            left_out[item.name] = not_finite(bad)
        elif share > 0:
            members.append((item, share))
    check_able(members, 1, "a weight above 0", left_out)
    candidate.begin_mean(*members[0])
    for number, (item, share) in enumerate(members, start=1):
        if number > 1:
            candidate.accept(item, share)
        progress(len(opened) + number, len(opened) + len(members))
    candidate.write_mean()
    names, of_members = [item.name for item, _ in members], [share for _, share in members]
    return Average(candidate.state_dict, names, of_members, left_out)


def check_weights(weights: Sequence[float] | None, count: int) -> None:
    """Raise `ConfigError` unless there is one weight >= 0 for each of `count` ingredients, and one above 0."""
    check_number_of("weights", weights, count)
    for weight in weights or ():
        if isinstance(weight, bool) or not (math.isfinite(weight) and weight >= 0) or not any(weights or ()):
            rule = f"weights must be finite numbers >= 0, and not all be 0, got {weight!r}"
            raise ConfigError("soup", rule)


Kind = Literal["ties", "dare_linear", "dare_ties"]

# torch splits sums of at least 32768 numbers over its threads, so their last bits depend on the number of threads.
_SERIAL = 1 << 14
_OPEN_BYTES = 1 << 28
# mergekit's limits: above this cosine vectors are mixed linearly, and norms up to this one count as 0.
_PARALLEL, _NO_LENGTH = 0.9995, 1e-8
_NO_SUM = 1e-7


def task_vector_soup(
    ingredients: Sequence[Source],
    base: Source,
    kind: Kind,
    *,
    density: float,
    weights: Sequence[float] | None = None,
    lambda_: float = 1.0,
    seed: int = 0,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""Return ``base + lambda * merged``, where sparse task vectors ``x_i - base`` are merged, in float32.

    For each tensor and ingredient

    - ``ties`` keeps the ``int(density * numel)`` largest magnitudes, at least one. Of equal ones the first wins.
    - ``dare_linear`` and ``dare_ties`` keep each number with probability `density`, and scale the rest to the original
      L1 norm (by ``1 / density`` in expectation, which is the paper's factor).

    ``dare_linear`` then adds ``w_i * vector_i``. The other two take the sign of that sum for each number (+ for 0) and
    add only numbers with this sign. ``ties`` divides by the sum of their weights. So with weights of 1, DARE adds up
    the vectors.

    Integers, booleans and dtypes come from the first ingredient.

    Args:
        ingredients: Models fine-tuned from `base`: paths (see `open_ingredient`) or state dicts.
        base: The model that they started from.
        kind: Which merge.
        density: The share of each task vector to keep, in (0, 1].
        weights: One number >= 0 per ingredient. All 1 by default.
        lambda_: Factor of the merged vector.
        seed: Seed of DARE. What is dropped depends only on it, the ingredient's position and the tensor's name.
        after_average: Called with the result, to change it in place.
        into: Tensors to write the result into. By default new ones.

    Raises:
        CheckpointError: If an ingredient cannot be read, does not match the others, is an adapter or is not finite.
        ConfigError: If another argument is invalid.

    Source: Yadav et al., 2023, arXiv:2306.01708; Yu et al., 2023, arXiv:2311.03099; conventions: mergekit.

    Example:
        >>> import torch
        >>> tuned = [{"w": torch.tensor([4.0, 1.0])}, {"w": torch.tensor([2.0, -3.0])}]
        >>> task_vector_soup(tuned, {"w": torch.zeros(2)}, "ties", density=1.0)["w"]
        tensor([ 3., -3.])
    """
    checked(kind, Kind, "soup", "kind")
    checked(density, float, "soup", "density", above=0, high=1)
    checked(lambda_, float, "soup", "lambda")
    if isinstance(base, Mapping):
        base = Ingredient("base", IN_MEMORY, None, functools.partial(dict, base))
    *opened, start = open_ingredients([*open_ingredients(ingredients), base])
    check_weights(weights, len(opened))
    _check_mergeable([*opened, start])
    shares = [1.0] * len(opened) if weights is None else [float(weight) for weight in weights]
    members = [_Member(*each) for each in zip(range(len(opened)), opened, shares, strict=True) if each[2] > 0]
    merge = _TaskVectors(members, start, kind, density, lambda_, seed)
    return _written([*opened, start], merge.merged, into, after_average)


def slerp_soup(
    ingredients: Sequence[Source],
    t: float = 0.5,
    *,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    r"""Return the point `t` of the way along the arc between two models, for each tensor separately, in float32.

    Where ``|cosine| > 0.9995`` the straight line is used. Integers, booleans and dtypes come from the first model.

    Args:
        ingredients: Two paths (see `open_ingredient`) or state dicts.
        t: In [0, 1]; 0 is the first model, 1 the second.
        after_average: Called with the result, to change it in place.
        into: Tensors to write the result into. By default new ones.

    Raises:
        CheckpointError: If one cannot be read, does not match the other, is an adapter or is not finite.
        ConfigError: If there are not two ingredients, or t is out of range.

    Source: Shoemake, 1985, doi:10.1145/325165.325242; conventions: mergekit.

    Example:
        >>> import torch
        >>> slerp_soup([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}])["w"]
        tensor([0.7071, 0.7071])
    """
    checked(t, float, "soup", "t", low=0, high=1)
    opened = open_ingredients(ingredients)
    if len(opened) != 2:
        raise ConfigError("soup", f"slerp must have two ingredients, got {len(opened)}", "merge two at a time")
    _check_mergeable(opened)
    return _written(opened, functools.partial(_on_arc, opened[0], opened[1], t), into, after_average)


def _check_mergeable(opened: Sequence[Ingredient]) -> None:
    """Refuse adapters and non-finite ingredients: a merge without them is not what was asked for."""
    if adapter := next((item for item in opened if item.kind == ADAPTER), None):
        rule = f"ingredients of a merge must be whole models, got {adapter.name} ({ADAPTER})"
        raise CheckpointError("soup", rule, "merge the adapter into its model (merge_and_unload) and save that")
    for item in opened:
        if (bad := non_finite_tensor(item)) is not None:
            rule = f"{bad!r} must be finite to be merged, got NaN or infinity"
            raise CheckpointError(item.name, rule, "leave it out")


def _written(
    opened: Sequence[Ingredient],
    merged: Callable[[str], Tensor],
    into: dict[str, Tensor] | None,
    after_average: Callable[[dict[str, Tensor]], None] | None,
) -> dict[str, Tensor]:
    read = 0

    def value(key: str) -> Tensor:
        nonlocal read
        tensor = merged(key)
        read += tensor.nbytes
        if read > _OPEN_BYTES:
            # Reopened at the next read: memory maps of all models at once would count as host memory.
            for item in opened:
                item.close()
            read = 0
        return tensor

    candidate = Candidate(opened[0], into, after_average)
    candidate.write_values(opened[0], value)
    for item in opened:
        item.close()
    return candidate.state_dict


@dataclass(frozen=True)
class _Member:
    place: int
    item: Ingredient
    weight: float


@dataclass(frozen=True)
class _TaskVectors:
    members: Sequence[_Member]
    base: Ingredient
    kind: str
    density: float
    lambda_: float
    seed: int

    def merged(self, key: str) -> Tensor:
        """Return one tensor of the merge. Memory for the members' vectors is one byte per number, for masks."""
        base = self.base.tensor(key)
        dtype = accumulator_dtype(self.members[0].item.spec(key).dtype)
        out = base.to("cpu", dtype, copy=True).contiguous()
        tensors = [member.item.tensor(key) for member in self.members]
        sparse = [
            self._sparse(tensor.to(out) - out, member.place, key)
            for tensor, member in zip(tensors, self.members, strict=True)
        ]
        for start, *parts in chunks(out, *tensors, *(kept for kept, _ in sparse)):
            deltas = [
                (part.to(start) - start) * kept * scale * member.weight
                for part, kept, (_, scale), member in zip(
                    parts[: len(tensors)], parts[len(tensors) :], sparse, self.members, strict=True
                )
            ]
            start += self._mixed(deltas) * self.lambda_
        return out

    def _sparse(self, delta: Tensor, place: int, key: str) -> tuple[Tensor, float]:
        """Return the mask of a sparse task vector, and its factor."""
        if self.density == 1 or not delta.numel():
            return torch.ones(delta.shape, dtype=torch.bool), 1.0
        size = delta.abs().reshape(-1)
        if self.kind == "ties":
            return _largest(size, max(1, int(self.density * size.numel()))), 1.0
        # A separate seed per tensor, independent of the order of tensors in a file and of skipped ingredients.
        digest = hashlib.sha256(f"{self.seed}:{place}:{key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        kept = torch.rand(size.shape, generator=generator) < self.density
        before, after = _dot(size, torch.ones_like(kept)), _dot(size, kept)
        return kept, before / after if min(before, after) >= _NO_SUM else 1.0

    def _mixed(self, deltas: list[Tensor]) -> Tensor:
        total = _sum(deltas)
        if self.kind == "dare_linear":
            return total
        upward = total >= 0
        agree = [((delta > 0) == upward) & (delta != 0) for delta in deltas]
        mixed = _sum([delta * agrees for delta, agrees in zip(deltas, agree, strict=True)])
        if self.kind == "dare_ties":
            return mixed
        shares = _sum([agrees.to(mixed) * member.weight for agrees, member in zip(agree, self.members, strict=True)])
        return mixed / shares.masked_fill_(shares == 0, 1)


def _sum(tensors: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def _largest(size: Tensor, count: int) -> Tensor:
    """Return where the `count` largest are. Of equal ones the first wins."""
    least = _nth_largest(size, count) if size.dtype == torch.float32 else size.topk(count).values[-1]
    kept = size > least
    kept[(size == least).nonzero()[: count - int(kept.sum()), 0]] = True
    return kept


def _nth_largest(size: Tensor, place: int) -> Tensor:
    # Nonnegative floats are ordered like their bits, so two 16-bit histograms find the value, ten times faster.
    found, left = 0, size.view(torch.int32)
    for shift in (16, 0):
        digits = left >> shift & 0xFFFF
        at_least = torch.bincount(digits).flip(0).cumsum(0)
        larger = int((at_least < place).sum())
        digit = len(at_least) - 1 - larger
        place -= int(at_least[larger - 1]) if larger else 0
        found, left = found | digit << shift, left[digits == digit]
    return torch.tensor(found, dtype=torch.int32).view(torch.float32)


def _on_arc(first: Ingredient, second: Ingredient, t: float, key: str) -> Tensor:
    one, two = first.tensor(key), second.tensor(key)
    out = one.to("cpu", accumulator_dtype(one.dtype), copy=True).contiguous()
    lengths = [math.sqrt(_dot(each, each)) for each in (one, two)]
    cosine = _dot(one, two) / math.prod(length if length > _NO_LENGTH else 1.0 for length in lengths)
    if abs(cosine) > _PARALLEL:
        shares = (1 - t, t)
    else:
        angle = math.acos(cosine)
        shares = (math.sin(angle - angle * t) / math.sin(angle), math.sin(angle * t) / math.sin(angle))
    for start, other in chunks(out, two):
        start.mul_(shares[0]).add_(other.to(start) * shares[1])
    return out


def _dot(one: Tensor, two: Tensor) -> float:
    """Return the inner product in float64, independent of the number of threads."""
    pairs = zip(*(torch.split(tensor.reshape(-1), _SERIAL) for tensor in (one, two)), strict=True)
    return math.fsum(float((a.double() * b.double()).sum()) for a, b in pairs)
