"""The scorers by the name of their criterion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shared_core.errors import ConfigError, nearest
from shared_core.pruning.scorers.gradient_scorers import Fisher, Movement, NeuronTaylor, Taylor
from shared_core.pruning.scorers.scorer import Scorer
from shared_core.pruning.scorers.wanda import Wanda
from shared_core.pruning.scorers.weight_scorers import Magnitude, Random

SCORERS: dict[str, type[Scorer]] = {
    scorer.criterion: scorer for scorer in (Magnitude, Random, Taylor, Movement, Fisher, Wanda, NeuronTaylor)
}
"""By criterion."""


def make_scorer(
    criterion: str,
    modules: Mapping[str, nn.Module],
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Scorer:
    """Return a new scorer, not attached yet.

    Args:
        criterion: A key of `SCORERS`.
        modules: Weight name to a module that holds it.
        generator: For criteria that draw; the same on every rank.
        **options: Those of the scorer, such as `costs`.

    Raises:
        ConfigError: If there is no such criterion or an option breaks its rule.

    Example:
        >>> make_scorer("magnitude", {}).scores("w", torch.tensor([-2.0, 0.5]))
        tensor([2.0000, 0.5000])
    """
    if criterion not in SCORERS:
        raise ConfigError(f"prune: criterion must be one that exists, got {criterion!r}{nearest(criterion, SCORERS)}")
    return SCORERS[criterion](modules, generator=generator, **options)
