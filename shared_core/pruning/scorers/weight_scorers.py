"""Criteria that look at no gradient and no input: an absolute threshold, and chance."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shared_core.errors import ConfigError
from shared_core.pruning.scorers.scorer import Scorer, magnitude


@torch.no_grad()
def below_threshold_mask(weight: Tensor, eps: float) -> Tensor:
    """Return which weights to keep: those with ``|w| < eps`` go, however many they are.

    Magnitudes are compared in float32 (float64 for float64). A NaN is kept: it has no magnitude.

    Args:
        weight: Floating point, any shape and device.
        eps: At least 0; 0 prunes nothing.

    Returns:
        bool tensor of the same shape and device, True = keep.

    Raises:
        ConfigError: If `eps` is negative or NaN.

    Example:
        >>> below_threshold_mask(torch.tensor([-0.5, 0.1, 0.2]), 0.2)
        tensor([ True, False,  True])
    """
    if not eps >= 0:
        raise ConfigError("below_threshold_mask", f"eps must be at least 0, got {eps!r}")
    scores = magnitude(weight)
    # in the type of the scores: a weight of float32 0.1 is not below 0.1
    return scores.lt(scores.new_tensor(eps)).logical_not_()


_PIECE = 1 << 17  # stays in cache


class Random(Scorer):
    """Chance: one draw in [0, 1) a weight for the whole run, so that what is pruned stays the lowest.

    A draw is a function of a seed (taken once from the generator), the weight's place in `modules` (without one, its
    name) and its flat index, in whole numbers: the same on every rank and device, and a slice costs its length alone.

    Raises:
        ConfigError: If there is no generator.

    Example:
        >>> scorer = Random({}, generator=torch.Generator().manual_seed(0))
        >>> draws = scorer.scores("w", torch.zeros(2, 3))
        >>> torch.equal(draws.view(-1)[1:4], scorer.part("w", torch.zeros(2, 3), slice(1, 4)))
        True
    """

    criterion: ClassVar[str] = "random"
    zero_is_lowest: ClassVar[bool] = False
    keeps_going: ClassVar[bool] = True

    def _set_up(self, generator: torch.Generator | None) -> None:
        super()._set_up(generator)
        if generator is None:
            raise ConfigError("prune random", "generator must be given, got None", "seed one alike on every rank")
        self.seed = int(torch.randint(2**62, (), generator=generator))
        # by place: a trainer may put a prefix before every name, and draws must not depend on it
        self._places = {name: place for place, name in enumerate(self.modules)}

    @property
    def ready(self) -> bool:
        """Always."""
        return True

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        scores = torch.empty(weight.numel(), dtype=_score_dtype(weight), device=weight.device)
        for start in range(0, weight.numel(), _PIECE):
            stop = min(start + _PIECE, weight.numel())
            scores[start:stop] = self._draw(name, torch.arange(start, stop, device=weight.device))
        return scores.view(weight.shape)

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        # Each draw depends on the seed, the tensor and its own index alone: slices agree with the whole.
        index = torch.arange(*where.indices(weight.numel()), device=weight.device)
        return self._draw(name, index).to(_score_dtype(weight))

    def _draw(self, name: str, index: Tensor) -> Tensor:
        key = hashlib.blake2b(f"{self.seed}:{self._places.get(name, name)}".encode(), digest_size=8).digest()
        # SplitMix64 (Steele, Lea and Flood 2014) of a counter; int64 products wrap as its unsigned ones do
        bits = index * _signed(0x9E3779B97F4A7C15) + _signed(int.from_bytes(key, "little"))
        bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
        bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
        bits = bits ^ _shifted(bits, 31)
        # The top 24 bits, which float32 holds exactly: uniform in [0, 1).
        return _shifted(bits, 40).float() * 2.0**-24

    def state_dict(self) -> dict[str, Any]:
        """Return the seed beside what every scorer saves."""
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the seed, and with it every draw."""
        super().load_state_dict(state)
        self.seed = int(state["seed"])


def _score_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return the bits shifted down with zeros from above: torch's shift repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
