"""Score structures (filters, channels, neurons, heads) from all tensor slices that belong to a unit.

Shapley values measure each unit's contribution to a value, averaged over random orders of the units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared_core.config.options import checked
from shared_core.distributed.sharded_tensors import whole
from shared_core.errors import CheckpointError, ConfigError, TrainingError, nearest
from shared_core.numerics.deferred_checks import checked_together, refuse
from shared_core.pruning.scorers.scorer import NAN_REMEDY, SAME_RUN, wide

_PIECE = 1 << 24


class UnitSlices(NamedTuple):
    """The positions of a group's units in one tensor."""

    name: str
    """Name of the tensor."""
    axis: int
    positions: np.ndarray
    """(units, k) integers: the k indices along the axis that belong to each unit."""


def gather_units(tensor: Tensor, axis: int, positions: np.ndarray) -> Tensor:
    """Return the elements of each unit of a group in one tensor: (units, k · rest), rest the size of the other axes.

    Args:
        tensor: A weight, bias, gradient or mask of any shape except ().
        axis: The axis of the units.
        positions: (units, k) indices along that axis.

    Example:
        >>> gather_units(torch.tensor([[1, 2, 3], [4, 5, 6]]), 1, np.array([[0], [2]]))
        tensor([[1, 4],
                [3, 6]])
    """
    index = torch.from_numpy(np.ascontiguousarray(positions, dtype=np.int64)).to(tensor.device, non_blocking=True)
    # (units * k, ...) in the order of units, then one row per unit, whatever the axis.
    picked = tensor.detach().movedim(axis, 0).index_select(0, index.reshape(-1))
    return picked.reshape(index.shape[0], index.shape[1] * (tensor.numel() // max(tensor.shape[axis], 1)))


def _l1_norm(weights: list[Tensor]) -> Tensor:
    return _added(weight.abs().sum(1) for weight in weights)


def _l2_norm(weights: list[Tensor]) -> Tensor:
    # The norm of the parts' norms is the norm over all tensors of a unit.
    norms = torch.stack([torch.linalg.vector_norm(weight, dim=1) for weight in weights])
    norm: Tensor = torch.linalg.vector_norm(norms, dim=0)
    return norm


def _mean_magnitude(weights: list[Tensor]) -> Tensor:
    return _l1_norm(weights) / max(sum(weight.shape[1] for weight in weights), 1)


def _geometric_median(weights: list[Tensor]) -> Tensor:
    points = torch.cat(weights, 1)
    # Compute (rows, units) distances at a time: all pairs of 10,000 units would take 400 MB.
    rows = max(1, _PIECE // max(len(points), 1))
    # Distances by differences: with matrix products, equal filters would differ by a rounding error.
    sums = [
        torch.cdist(piece, points, compute_mode="donot_use_mm_for_euclid_dist").sum(1, dtype=torch.float64)
        for piece in torch.split(points, rows)
    ]
    return torch.cat(sums).to(points.dtype)


def _added(parts: Iterable[Tensor]) -> Tensor:
    added: Tensor = torch.stack(list(parts)).sum(0)
    return added


_OF_WEIGHTS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "l1_norm": _l1_norm, "l2_norm": _l2_norm, "magnitude": _mean_magnitude, "geometric_median": _geometric_median,
    "bn_scale": _mean_magnitude,
}  # fmt: skip
_EXTRAS = {"taylor": "gradients", "fisher": "mean squared per-example gradients"}
GROUP_CRITERIA = (*_OF_WEIGHTS, *_EXTRAS, "random")
"""The criteria of `group_scores`."""


@torch.no_grad()
def group_scores(
    criterion: str,
    weights: Sequence[Tensor],
    *,
    extras: Sequence[Tensor] = (),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the score of each unit of a group. The lowest are pruned first.

    With w_u all weights of unit u, in all tensors of the group:

    - ``l1_norm`` ``Σ|w_u|``, ``l2_norm`` ``‖w_u‖₂``, ``magnitude`` the mean of ``|w_u|`` (Li et al. 2016,
      arXiv:1608.08710);
    - ``geometric_median`` ``Σ_v ‖w_u − w_v‖₂``: prunes units that others can replace (He et al. 2019,
      arXiv:1811.00250);
    - ``bn_scale`` the mean of |γ| (Liu et al. 2017, arXiv:1708.06519): pass only the γ;
    - ``taylor`` ``(Σ w_u·g_u)²`` of one complete step (Molchanov et al. 2019, arXiv:1906.10771, eq. 8), which
      `GroupTaylor` averages over steps;
    - ``fisher`` ``½ Σ w_u²·F_u``;
    - ``random`` a random number. For one that is fixed during a run, use `Random.scores` of a tensor with one element
      per unit.

    Args:
        criterion: One of `GROUP_CRITERIA`.
        weights: The (units, k) values of each tensor of the group, from `gather_units`.
        extras: The gradients (``taylor``) or F (``fisher``) of each tensor, in the same shape.
        generator: For ``random``, on the CPU.

    Returns:
        (units,), float32, or float64 if one of the weights is.

    Raises:
        ConfigError: If the criterion is unknown, or `weights` or `extras` do not fit.
        TrainingError: If a score is NaN.

    Example:
        >>> group_scores("l1_norm", [torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.tensor([[1.0], [1.0]])])
        tensor([4.0000, 1.5000])
    """
    shapes, got = ([tuple(tensor.shape) for tensor in tensors] for tensors in (weights, extras))
    rule = ""
    if criterion not in GROUP_CRITERIA:
        rule = f"criterion must be a known one, got {criterion!r}{nearest(criterion, GROUP_CRITERIA)}"
    elif not shapes or any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
        rule = f"weights must be (units, k) with the same number of units, got shapes {shapes}"
    elif criterion in _EXTRAS and got != shapes:
        rule = f"extras must be the {_EXTRAS[criterion]} in shapes {shapes}, got {got}"
    if rule:
        raise ConfigError("group_scores", rule)
    if criterion == "random":
        return torch.rand(len(weights[0]), generator=generator).to(weights[0].device)
    double = any(weight.dtype == torch.float64 for weight in weights)
    dtype = torch.float64 if double else torch.float32
    values, more = ([tensor.detach().to(dtype) for tensor in tensors] for tensors in (weights, extras))
    if criterion == "taylor":
        # Summed over all tensors of a unit before squaring: the weights of a unit are pruned together and may cancel.
        scores = _added((weight * extra).sum(1) for weight, extra in zip(values, more, strict=True)).square()
    elif criterion == "fisher":
        scores = _added((weight.square() * extra).sum(1) for weight, extra in zip(values, more, strict=True)) * 0.5
    else:
        scores = _OF_WEIGHTS[criterion](values)
    refuse(scores.isnan().any(), lambda: _not_numbers(criterion, scores))
    return scores


def _not_numbers(criterion: str, scores: Tensor) -> TrainingError:
    rule = f"{criterion} scores must not be NaN, got NaN for unit {int(scores.isnan().nonzero()[0])}"
    return TrainingError("group_scores", rule, NAN_REMEDY)


@torch.no_grad()
def relative_scores(scores: Tensor, live: Tensor) -> Tensor:
    """Return scores divided by the mean of the live units, so that groups can be compared.

    The size of a layer's weights depends on fan-in, norm and position, whatever their importance. If the mean is 0, the
    scores are returned unchanged.

    Args:
        scores: (units,), at least 0.
        live: bool, True = not pruned.

    Example:
        >>> relative_scores(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([True, True, False]))
        tensor([0.5000, 1.5000, 4.0000])
    """
    # A mean of 0 means that all units of the group are zeros.
    mean = scores[live].double().mean()
    return (scores.double() / mean).to(scores.dtype) if mean > 0 else scores


class GroupTaylor:
    """``mean over steps of (Σ w·g)²`` for each unit, summed over all weights of the unit.

    Example:
        >>> taylor = GroupTaylor({"g": [UnitSlices("w", 0, np.array([[0], [1]]))]})
        >>> taylor.observe_step({"w": torch.tensor([[1.0, 2.0], [3.0, 0.0]])}, {"w": torch.ones(2, 2)})
        >>> taylor.scores("g")
        tensor([9., 9.])
    """

    def __init__(self, groups: Mapping[str, Sequence[UnitSlices]]) -> None:
        self.groups = {name: list(members) for name, members in groups.items()}
        self.num_observed = 0
        self._sums: dict[str, Tensor] = {}
        self._ever: set[str] = set()

    def has_seen(self, group: str) -> bool:
        """Return True if any step had a gradient for this group."""
        return group in self._ever

    def observe_step(self, tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Take in one complete step before it is applied: finite, accumulated, reduced, unscaled gradients.

        A tensor without a gradient adds nothing. Sharded tensors are gathered group by group.
        """
        with checked_together():
            for group, members in self.groups.items():
                self._observe_group(group, members, tensors, gradients)
        self.num_observed += 1

    def _observe_group(
        self, group: str, members: list[UnitSlices], tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        present = [member for member in members if member.name in gradients]
        if not present:
            return
        pairs = [
            [wide(gather_units(whole(source[name].detach()), axis, positions)) for name, axis, positions in present]
            for source in (tensors, gradients)
        ]
        step = group_scores("taylor", pairs[0], extras=pairs[1])
        total = self._sums.get(group)
        self._sums[group] = step if total is None else total.to(step.device) + step
        self._ever.add(group)

    def scores(self, group: str) -> Tensor:
        """Return (units,) scores, 0 for a group without gradients."""
        if not self.num_observed:
            rule = "a step must have been observed before units are scored, got none since the last update"
            raise TrainingError("group taylor", rule)
        if group not in self._sums:
            return torch.zeros(len(self.groups[group][0].positions))
        return self._sums[group] / self.num_observed

    def reset(self) -> None:
        """Restart the means."""
        self.num_observed, self._sums = 0, {}

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values. `load_state_dict` continues bit for bit."""
        sums = {name: total.clone() for name, total in self._sums.items()}
        return {"num_observed": self.num_observed, "sums": sums, "ever": sorted(self._ever)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        sums = dict(state["sums"])
        for name, total in sums.items():
            units = len(self.groups[name][0].positions) if name in self.groups else 0
            if total.shape != (units,):
                rule = f"saved sum of {name} must have {units} units, got {tuple(total.shape)}"
                raise CheckpointError("group taylor", rule, SAME_RUN)
        self._sums, self.num_observed = (
            {name: total.clone() for name, total in sums.items()},
            int(state["num_observed"]),
        )
        self._ever = set(state.get("ever", self.groups))  # older runs did not save it


def shapley_values(
    value: Callable[[Tensor], float],
    num_units: int,
    *,
    permutations: int,
    generator: torch.Generator | None = None,
    antithetic: bool = False,
    truncate: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Estimate each unit's Shapley value from random orders, and return it with its standard error.

    ``φ_i = mean over orders of v(units before i, and i) − v(units before i)`` (Castro et al. 2009; for pruning Ancona
    et al. 2020, arXiv:2007.05434; truncation: Ghorbani and Zou 2020, arXiv:2002.09815). Without truncation the values
    add up to v(all) − v(none), except for rounding. At most ``permutations · (num_units − 1) + 2`` calls are made.

    Args:
        value: ``value(kept)`` of a bool tensor (num_units,) on the CPU, True = kept, such as an accuracy or minus a
            loss. It must depend only on `kept`.
        num_units: At least 1.
        permutations: Number of orders, at least 2. With `antithetic` even and at least 4.
        generator: On the CPU. The same seed gives the same values.
        antithetic: Follow each order by its reverse (Mitchell et al. 2022, arXiv:2104.12199): less variance if units
            can replace each other. The error is then computed from pairs.
        truncate: Stop an order once ``|v(all) − v(so far)|`` is at most this share of ``|v(all) − v(none)|``. The
            remaining units get 0 from it. 0: never.

    Returns:
        Two float64 tensors (num_units,).

    Raises:
        ConfigError: If an argument is invalid.
        TrainingError: If a value is not finite.

    Example:
        >>> values, error = shapley_values(lambda kept: 2.0 * kept[0] + kept[1], 2, permutations=4)
        >>> values.tolist(), error.tolist()
        ([2.0, 1.0], [0.0, 0.0])
    """
    where = "shapley_values"
    checked(num_units, int, where, "num_units", low=1)
    checked(truncate, float, where, "truncate", low=0, below=1)
    checked(permutations, int, where, "permutations", low=4 if antithetic else 2)
    if antithetic and permutations % 2:
        raise ConfigError(where, f"permutations must be even with antithetic, got {permutations!r}")

    def worth(kept: Tensor) -> float:
        result = float(value(kept.clone()))
        if not math.isfinite(result):
            rule = f"value must be finite, got {result} with {int(kept.sum())} of {num_units} units kept"
            raise TrainingError(where, rule)
        return result

    # Every order begins with the empty and ends with the full coalition, so both are computed once.
    empty, full = (worth(torch.full((num_units,), kept)) for kept in (False, True))
    near = truncate * abs(full - empty)
    orders = torch.zeros(permutations, num_units, dtype=torch.float64)
    order = torch.empty(0, dtype=torch.int64)
    for row, marginal in enumerate(orders):
        # Antithetic: every second order is the reverse of the previous one, so errors partly cancel.
        order = order.flip(0) if antithetic and row % 2 else torch.randperm(num_units, generator=generator)
        kept = torch.zeros(num_units, dtype=torch.bool)
        before = empty
        for place, unit in enumerate(order.tolist()):
            # The rest of this order could add little. Its units count as 0, which biases the values.
            if truncate and abs(full - before) <= near:
                break
            kept[unit] = True
            after = full if place == num_units - 1 else worth(kept)
            marginal[unit] = after - before
            before = after
    # A pair is one sample, because its two orders are not independent.
    samples = orders.view(-1, 2, num_units).mean(1) if antithetic else orders
    return orders.mean(0), samples.std(0) / math.sqrt(len(samples))
