"""Which layers can be factorized, and to which rank. A budget is spent where each parameter helps most.

The cost of a low rank can be measured: the loss on calibration batches with one layer at a time truncated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.low_rank.config import LowRankConfig
from shared_core.low_rank.layers import (
    LowRankLayer,
    Spectrum,
    as_matrix,
    decompose,
    from_matrix,
    is_transposed,
    schemes,
)
from shared_core.modules.like_stock import stock_kind, why_not_stock
from shared_core.modules.matching import StackedExperts, chosen_modules, frozen_helpers, own_class
from shared_core.modules.weight_views import TRANSPOSED, left_alone

Point = tuple[int, float]
"""(parameters, value)."""


def share_out(choices: Mapping[str, Sequence[Point]], budget: int) -> dict[str, int]:
    """Return the choice for each layer that maximizes the total value within a budget of parameters.

    Follows the upper concave hulls of the layers' points by decreasing value per parameter. This is optimal if the
    budget ends exactly at a step of a hull. Between two such budgets the result is less than one step below the
    optimum.
    """
    taken = dict.fromkeys(choices, 0)
    # Every layer gets its cheapest choice. The rest is distributed step by step.
    left = budget - sum(points[0][0] for points in choices.values())
    if left < 0:
        rule = f"budget must allow rank 1 in every layer, {budget - left} parameters, got {budget}"
        raise ConfigError("low_rank", rule, "raise it")
    # Steps along each layer's concave hull, by value per parameter: greedy order is optimal for hulls.
    steps = [
        ((points[end][1] - points[start][1]) / (points[end][0] - points[start][0]), name, start, end)
        for name, points in choices.items()
        for start, end in _hull(points)
    ]
    # The sort is stable: of equal steps, the earlier layer's comes first.
    for _, name, start, end in sorted(steps, key=lambda step: -step[0]):
        cost = choices[name][end][0] - choices[name][start][0]
        # A step must follow the previous step of its layer, and fit into the rest of the budget.
        if taken[name] == start and cost <= left:
            taken[name], left = end, left - cost
    return taken


def _hull(points: Sequence[Point]) -> list[tuple[int, int]]:
    """Return the steps of the upper concave hull, as pairs of indices, up to the point of the highest value."""
    corners = [0]
    for index in range(1, len(points)):
        # A point above the hull's slope replaces earlier corners: value per parameter must decrease along the hull.
        while len(corners) > 1 and _slope(points, corners[-1], index) >= _slope(points, corners[-2], corners[-1]):
            corners.pop()
        corners.append(index)
    return [(start, end) for start, end in itertools.pairwise(corners) if _slope(points, start, end) > 0]


def _slope(points: Sequence[Point], start: int, end: int) -> float:
    return (points[end][1] - points[start][1]) / (points[end][0] - points[start][0])


@dataclass(frozen=True)
class Candidate:
    """A layer in one scheme, with the spectrum of its matrix."""

    module: Any
    scheme: str
    spectrum: Spectrum

    @property
    def side(self) -> int:
        """Parameters per rank: rows + columns."""
        return sum(self.spectrum.weight.shape)

    @property
    def numel(self) -> int:
        """Parameters of the weight."""
        return int(self.module.weight.numel())

    @property
    def full(self) -> int:
        """Full rank: the largest possible rank of its matrix."""
        return len(self.spectrum.s)

    @property
    def largest(self) -> int:
        """The largest rank that saves parameters, or 0 if none does."""
        # At least one parameter must be saved, and ranks above full do not help.
        return min((self.numel - 1) // self.side, self.full)


_ONLY = "only linear layers and Conv2d are factorized"
_UNABLE: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "torch reads query, key and value projections as one weight; prune or quantize it instead",
    nn.RNNBase: "recurrent kernels take whole weights, so factors would save nothing; prune or quantize it instead",
    nn.RNNCellBase: "recurrent kernels take whole weights, so factors would save nothing; prune or quantize it instead",
    StackedExperts: "one parameter holds all experts; prune or quantize it instead",
    **dict.fromkeys((nn.Conv1d, nn.Conv3d, *TRANSPOSED), _ONLY),
}
"""Class → why its layers stay whole."""


def select(model: nn.Module, config: LowRankConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers that can be factorized, by name, and why other candidates are left unchanged."""
    kinds = {type(module) for module in model.modules() if is_transposed(module)}
    found = chosen_modules(config, model, (nn.Linear, nn.Conv2d, *kinds), where="low_rank")
    inside = _not_ours(model) | ({} if config.include else frozen_helpers(model))
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    chosen: dict[str, Any] = {}
    left_out = left_alone(model, _UNABLE)
    for each in found:
        layer: Any = each.module
        reason = inside.get(id(layer)) or _reason(layer, holders)
        if reason:
            left_out[each.name] = reason
        else:
            _check_weight(each.name, layer.weight)
            chosen[each.name] = layer
    _refuse_none(chosen, left_out, config)
    return chosen, left_out


def _not_ours(model: nn.Module) -> dict[int, str]:
    """Return, by id, why layers inside others cannot be replaced."""
    reasons: dict[int, str] = {}
    for parent in model.modules():
        if hasattr(parent, "lora_A"):
            reasons |= {id(child): "it is part of a layer with adapters" for child in parent.modules()}
        if isinstance(parent, LowRankLayer):
            reasons |= {id(child): "it is a factor" for child in parent.modules()}
    return reasons


def _reason(module: Any, holders: Mapping[int, int]) -> str | None:
    if stock_kind(own_class(module)) not in (nn.Linear, nn.Conv2d) and not is_transposed(module):
        return why_not_stock(module)
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from others"
    # A tied weight would have to be factorized in all its uses at once.
    if holders[id(weight)] > 1:
        return "its weight is tied to another layer's"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return f"it has {module.groups} groups"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has its own hooks"
    return None


def _check_weight(name: str, weight: Tensor) -> None:
    if hasattr(weight, "device_mesh") or weight.is_meta:
        what = "a weight without values" if weight.is_meta else "a sharded weight"
        rule = f"{name} cannot be factorized, because it has {what}"
        raise CompatibilityError("low_rank", rule, "load the model in full first")
    if not bool(weight.isfinite().all()):
        raise TrainingError("low_rank", f"{name} must be finite, got NaN or infinity in its weight")


def _refuse_none(chosen: Mapping[str, Any], left_out: Mapping[str, str], config: LowRankConfig) -> None:
    if not chosen:
        text = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:5])
        rule = f"no layer can be factorized with rank {config.rank!r} ({text})"
        raise MatchError("low_rank", rule, "choose other layers or a lower rank, or use force")


def candidates(
    layers: Mapping[str, Any], config: LowRankConfig, moments: Mapping[tuple[str, str], Tensor] | None = None
) -> dict[str, Candidate]:
    """Return each layer in the scheme of its options. ``auto`` is the one that loses less with half the parameters."""
    chosen = {}
    for name, module in layers.items():
        able = [scheme for scheme in schemes(module) if config.conv in (scheme, "auto")] or schemes(module)[:1]
        found = []
        for scheme in able:
            matrix = as_matrix(module.weight.detach(), scheme, is_transposed(module))
            found.append(Candidate(module, scheme, decompose(matrix, (moments or {}).get((name, scheme)))))
        chosen[name] = max(found, key=_kept_by_half)
    return chosen


def _kept_by_half(candidate: Candidate) -> float:
    rank = max(min(candidate.numel // (2 * candidate.side), candidate.full), 1)
    return float(candidate.spectrum.energy()[rank - 1])


def choose_ranks(
    found: Mapping[str, Candidate], config: LowRankConfig, worth: Mapping[str, Mapping[int, float]] | None = None
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the rank of each layer, and why others are left unchanged."""
    rule = config.rule
    if rule.kind in ("budget", "sensitivity"):
        wanted = _by_budget(found, config, worth)
    else:
        wanted = {name: _by_itself(each, rule.kind, rule.value) for name, each in found.items()}
    ranks, left_out = {}, {}
    for name, rank in wanted.items():
        each = found[name]
        # Rounded up to multiples (tensor cores), but not above full rank.
        rank = min(math.ceil(min(rank, each.full) / config.multiple_of) * config.multiple_of, each.full)
        if rank <= each.largest or config.force:
            ranks[name] = rank
        else:
            left_out[name] = (
                "the budget is best spent on keeping it whole"
                if rule.kind in ("budget", "sensitivity")
                else f"rank {rank} saves nothing: {rank * each.side} parameters instead of {each.numel}"
            )
    _refuse_none(ranks, left_out, config)
    return ranks, left_out


def _by_itself(each: Candidate, kind: str, value: float) -> int:
    if kind == "number":
        return int(value)
    if kind == "share":
        return max(round(value * each.full), 1)
    kept = each.spectrum.energy()
    # The lowest rank that keeps at least this share. The tolerance covers float64 rounding of the sums.
    return min(int((kept < value - 1e-12).sum()) + 1, each.full)


def _by_budget(
    found: Mapping[str, Candidate], config: LowRankConfig, worth: Mapping[str, Mapping[int, float]] | None
) -> dict[str, int]:
    """Return ranks within a share of all parameters. Full rank means that the layer is left unchanged."""
    # Without measurements, the value of a rank is the logarithm of the share of energy it keeps. Layers follow one
    # another, so this maximizes the product of their shares. A sum would starve large layers at small budgets.
    points: dict[str, list[Point]] = {}
    ranks: dict[str, list[int]] = {}
    for name, each in found.items():
        if worth is None:
            energy = each.spectrum.energy().clamp(min=torch.finfo(torch.float64).tiny).log().tolist()
            tried = range(config.multiple_of, each.largest + 1, config.multiple_of)
            gain = {rank: energy[rank - 1] for rank in tried} | {each.full: 0.0}
        else:
            gain = dict(worth[name])
        ranks[name] = sorted(gain)
        # At full rank the layer stays unchanged, with its own parameters.
        points[name] = [(rank * each.side if rank <= each.largest else each.numel, gain[rank]) for rank in ranks[name]]
    budget = math.floor(config.rule.value * sum(each.numel for each in found.values()))
    return {name: ranks[name][index] for name, index in share_out(points, budget).items()}


_SHARES = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)
"""The ranks to try, as shares of the largest rank that saves parameters."""


def measure_worth(
    found: Mapping[str, Candidate],
    loss: Callable[[], float],
    multiple_of: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[int, float]]:
    """Return by layer and rank the decrease of the loss: negative if it rises, 0 at full rank."""
    before = loss()
    if not before < float("inf"):
        rule = f"loss on calibration batches must be finite, got {before}"
        raise TrainingError("low_rank", rule, "check the batches")
    tried = {
        name: sorted({max(round(share * (each.largest // multiple_of)), 1) * multiple_of for share in _SHARES})
        if each.largest >= multiple_of
        else []
        for name, each in found.items()
    }
    done, total = 0, sum(map(len, tried.values()))
    worth: dict[str, dict[int, float]] = {}
    for name, each in found.items():
        worth[name] = {}
        for rank in tried[name]:
            with truncated(each, rank):
                after = loss()
            worth[name][rank] = before - after if after < float("inf") else -1e30
            done += 1
            if progress:
                progress(done, total)
        worth[name][each.full] = 0.0
    return worth


@contextmanager
def truncated(each: Candidate, rank: int) -> Iterator[None]:
    """Give a layer its best weight of a rank during the block."""
    weight: nn.Parameter = each.module.weight
    kept = weight.detach().clone()
    a, b = each.spectrum.factors(rank)
    with torch.no_grad():
        weight.copy_(from_matrix(b @ a, each.scheme, is_transposed(each.module), tuple(weight.shape)))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)
