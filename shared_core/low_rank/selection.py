"""Which layers can be factorised, how, and to which rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shared_core.errors import CompatibilityError, MatchError, TrainingError
from shared_core.low_rank.budget import Point, share_out
from shared_core.low_rank.config import LowRankConfig
from shared_core.low_rank.decomposition import Spectrum, decompose
from shared_core.low_rank.layers import LowRankLayer
from shared_core.low_rank.matrices import as_matrix, is_transposed, schemes
from shared_core.module_match import match_modules, own_class


@dataclass(frozen=True)
class Candidate:
    """A layer in one scheme.

    Args:
        module: The user's layer.
        scheme: How its weight becomes a matrix.
        spectrum: Of that matrix.
    """

    module: Any
    scheme: str
    spectrum: Spectrum

    @property
    def side(self) -> int:
        """Parameters of one rank: rows + columns."""
        return sum(self.spectrum.weight.shape)

    @property
    def numel(self) -> int:
        """Parameters of the weight."""
        return int(self.module.weight.numel())

    @property
    def full(self) -> int:
        """The rank of any matrix of its shape, at most."""
        return len(self.spectrum.s)

    @property
    def largest(self) -> int:
        """The largest rank that saves parameters, 0 if none does."""
        return min((self.numel - 1) // self.side, self.full)


def select(model: nn.Module, config: LowRankConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers that can be factorised, by name, and why others that could be thought of are left alone.

    Raises:
        MatchError: If none is left.
        CompatibilityError: If a weight is not there yet, or sharded.
        TrainingError: If a weight is not finite.
    """
    kinds = {type(module) for module in model.modules() if is_transposed(module)}
    found = match_modules(model, (nn.Linear, nn.Conv2d, *kinds), where="low_rank", include=config.include,
                          skip=config.skip, min_size=config.min_size)  # fmt: skip
    inside = _not_ours(model)
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    chosen, left_out = {}, {}
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
    """Return, by identity, why layers inside of others are not to be replaced."""
    reasons: dict[int, str] = {}
    for parent in model.modules():
        if hasattr(parent, "lora_A"):
            reasons |= {id(child): "it is part of a layer with adapters" for child in parent.modules()}
        if isinstance(parent, LowRankLayer):
            reasons |= {id(child): "it is a factor" for child in parent.modules()}
    return reasons


def _reason(module: Any, holders: Mapping[int, int]) -> str | None:
    kind = own_class(module)
    if kind not in (nn.Linear, nn.Conv2d) and not is_transposed(module):
        return f"it is a {kind.__name__}, not a plain layer"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from others"
    if holders[id(weight)] > 1:
        return "its weight is tied to another layer's"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return f"it has {module.groups} groups"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks of its own"
    return None


def _check_weight(name: str, weight: Tensor) -> None:
    if hasattr(weight, "device_mesh") or weight.is_meta:
        what = "a weight without values" if weight.is_meta else "a sharded weight"
        raise CompatibilityError(
            f"low_rank: {name} must be factorised while its weight is whole, got {what}; load the model in full first"
        )
    if not bool(weight.isfinite().all()):
        raise TrainingError(f"low_rank: {name} must be finite, got NaN or infinity in its weight")


def _refuse_none(chosen: Mapping[str, Any], left_out: Mapping[str, str], config: LowRankConfig) -> None:
    if not chosen:
        told = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:5])
        raise MatchError(
            f"low_rank: at least one layer must be factorised, got none with rank {config.rank!r} ({told}); choose "
            "other layers or a lower rank, or force it"
        )


def candidates(
    layers: Mapping[str, Any], config: LowRankConfig, moments: Mapping[tuple[str, str], Tensor] | None = None
) -> dict[str, Candidate]:
    """Return each layer in the scheme that its options ask for; ``auto`` is the one that loses less with half of it.

    Args:
        layers: By name.
        config: The options.
        moments: Second moments of the inputs by (name, scheme); without, the weights alone decide.
    """
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
    """Return the rank of each layer, and why others stay as they are.

    Args:
        found: The layers.
        config: The options; not a report.
        worth: For ``sensitivity``: what is gained by a rank of a layer, 0 at its full rank.

    Raises:
        MatchError: If no layer is left.
        ConfigError: If a budget cannot be met.
    """
    rule = config.rule
    if rule.kind in ("budget", "sensitivity"):
        wanted = _by_budget(found, config, worth)
    else:
        wanted = {name: _by_itself(each, rule.kind, rule.value) for name, each in found.items()}
    ranks, left_out = {}, {}
    for name, rank in wanted.items():
        each = found[name]
        rank = min(math.ceil(rank / config.multiple_of) * config.multiple_of, each.full)
        if rank <= each.largest or config.force:
            ranks[name] = rank
        else:
            left_out[name] = (
                "it is worth its parameters as it is"
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
    return min(int((kept < value - 1e-12).sum()) + 1, each.full)


def _by_budget(
    found: Mapping[str, Candidate], config: LowRankConfig, worth: Mapping[str, Mapping[int, float]] | None
) -> dict[str, int]:
    """Return ranks within a share of all parameters; the full one stands for the layer as it is."""
    points: dict[str, list[Point]] = {}
    ranks: dict[str, list[int]] = {}
    for name, each in found.items():
        if worth is None:
            energy = each.spectrum.energy().tolist()
            tried = range(config.multiple_of, each.largest + 1, config.multiple_of)
            gain = {rank: energy[rank - 1] for rank in tried} | {each.full: 1.0}
        else:
            gain = dict(worth[name])
        ranks[name] = sorted(gain)
        points[name] = [(rank * each.side if rank <= each.largest else each.numel, gain[rank]) for rank in ranks[name]]
    budget = math.floor(config.rule.value * sum(each.numel for each in found.values()))
    return {name: ranks[name][index] for name, index in share_out(points, budget).items()}
