"""Pairs of attention modules whose maps are brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.distillation.feature_losses import attention_kl_each
from shared_core.distillation.watched_pairs import Normalise, WatchedPairs, real_positions, summed_over_positions
from shared_core.errors import ConfigError

# Rows of probabilities in bfloat16 sum to 1 within this; with dropout of 10 % one survivor alone makes it 1.11.
_TOLERANCE = 0.05


class AttentionPairs(WatchedPairs):
    """Compares the maps of both modules of every pair: KL from the student's to the teacher's, averaged over heads.

    Fused attention never makes a map, so Transformers models compute theirs eagerly while this is active.

    Args:
        student: Whose modules come first in a pair.
        teacher: The one teacher.
        pairs: Names of submodules, or globs that match as many of both: the student's, the teacher's.

    Raises:
        MatchError: If a name matches nothing, or a pair matches more on one side.
        ConfigError: If attention cannot be switched to eager.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[tuple[str, str]]) -> None:
        super().__init__(student, teacher, pairs, "attention")
        self._switched: list[tuple[nn.Module, str]] = []
        self._switchable = [
            found
            for model, side in ((student, 0), (teacher, 1))
            for found in _owners(model, [p[side] for p in self.pairs])
        ]

    def activate(self, active: bool) -> None:
        """Keep maps from now on, computed eagerly, or no longer."""
        super().activate(active)
        if active and not self._switched:
            for owner in self._switchable:
                before = owner.config._attn_implementation
                _implement(owner, "eager")
                self._switched.append((owner, before))
        elif not active:
            self._switch_back()

    def _switch_back(self) -> None:
        for owner, before in self._switched:
            _implement(owner, before)
        self._switched = []

    def detach(self) -> None:
        """Leave both models as they were."""
        super().detach()
        self._switch_back()

    def loss(self, mask: Tensor | None, inputs: Mapping[str, Any], normalise: Normalise) -> Tensor:
        """Return the sum over pairs for the latest forward.

        Raises:
            ConfigError: If a module's maps are not probabilities, or not those of the same tokens.
            TrainingError: If a module did not run.
        """
        terms = []
        for (ours, theirs), found, target in self.outputs():
            student, teacher = _map(found, ours, "student"), _map(target, theirs, "teacher").detach()
            real = real_positions((len(student), student.shape[-2]), mask, inputs)
            student, teacher = _filled(student, real), _filled(teacher.to(student.device), real)
            _check_probabilities(student, ours, "student")
            _check_probabilities(teacher, theirs, "teacher")
            distances = attention_kl_each(student, teacher, average_heads=student.shape[1] != teacher.shape[1])
            terms.append(normalise(*summed_over_positions(distances, real, mask)))
        return torch.stack(terms).sum()


def _owners(model: nn.Module, names: Sequence[str]) -> list[Any]:
    """Return the outermost modules that these are part of and that can choose how attention is computed."""
    able = [name for name, module in model.named_modules() if hasattr(module, "set_attn_implementation")]
    found: dict[str, Any] = {}
    for name in names:
        for owner in able:
            if owner == "" or name.startswith(f"{owner}."):
                found[owner] = model.get_submodule(owner)
                break
    return list(found.values())


def _implement(owner: Any, kind: str) -> None:
    owner.set_attn_implementation(kind)
    if owner.config._attn_implementation != kind:
        raise ConfigError(
            f"distill: attention needs a model that can compute its maps, got {type(owner).__name__}, which stays "
            f"with {owner.config._attn_implementation}; load it with attn_implementation='eager'"
        )


def _map(output: Any, name: str, whose: str) -> Tensor:
    """Return the map ``(B, H, Q, K)`` in what a module returned: itself, or the last such tensor of a tuple."""
    items = output if isinstance(output, tuple | list) else [output]
    maps = [item for item in items if isinstance(item, Tensor) and item.ndim == 4]
    if not maps:
        raise ConfigError(
            f"distill: attention module {name} of the {whose} must return its map (batch, heads, queries, keys), "
            "got none; name the module that computes probabilities, such as layer.0.attention.self"
        )
    return maps[-1]


def _filled(maps: Tensor, real: Tensor | None) -> Tensor:
    """Return maps with a certain first key where the query does not count: what stands there may be NaN."""
    if real is None:
        return maps
    certain = torch.zeros(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    certain[0] = 1
    return torch.where(real.to(maps.device)[:, None, :, None], maps, certain)


def _check_probabilities(maps: Tensor, name: str, whose: str) -> None:
    sums = maps.detach().sum(-1)
    if not bool(((sums - 1).abs() <= _TOLERANCE).all()):
        worst = float(sums.flatten()[(sums - 1).abs().argmax()])
        raise ConfigError(
            f"distill: attention maps of {name} of the {whose} must hold probabilities, got a row whose sum is "
            f"{worst:.3g}; maps with dropout in them cannot be compared, so set the config's attention dropout "
            "(attention_probs_dropout_prob, attention_dropout) to 0"
        )
