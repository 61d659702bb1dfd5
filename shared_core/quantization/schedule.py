"""When fake quantisation starts in a run, and when its ranges and batch norms stop moving."""

from __future__ import annotations

import sys

from shared_core.config.training_time import parse_position
from shared_core.engine.plan import Event
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError
from shared_core.quantization.config import QatConfig


def resolve_moments(config: QatConfig, context: Context) -> tuple[int, int, int]:
    """Return the steps of begin, freeze_observers and freeze_bn; `sys.maxsize` stands for never."""
    begin, freeze, freeze_bn = (_resolve(config, name, context) for name in ("begin", "freeze_observers", "freeze_bn"))
    if context.total_steps is not None and begin > context.total_steps:
        raise ConfigError(
            "qat", f"begin must lie within the {context.total_steps} steps of this run, got {config.begin!r}"
        )
    if freeze < 1:
        raise ConfigError(
            "qat",
            f"freeze_observers must be step 1 or later, got {config.freeze_observers!r}",
            "the first step finds the first ranges",
        )
    return begin, freeze, freeze_bn


def moments_told(config: QatConfig, moments: tuple[int, int, int], total_steps: int | None) -> list[Event]:
    """Return what happens at the steps that `resolve_moments` returned; what comes with the end is left out."""
    begin, freeze, freeze_bn = moments
    told: list[tuple[int, str]] = [(0, "ranges are observed; layers compute in float")] if begin else []
    told += [(begin, f"fake quantisation on, scheme {config.scheme}"), (freeze, "ranges freeze")]
    told += [(freeze_bn, "folded batch norms go over to running statistics")] if config.fold_batch_norm else []
    return [event for event in told if event[0] < (sys.maxsize if total_steps is None else total_steps)]


def _resolve(config: QatConfig, name: str, context: Context) -> int:
    value = getattr(config, name)
    position = parse_position(value)
    if position.unit == "fraction" and position.value == 1.0 and (name != "begin" or context.total_steps is None):
        return sys.maxsize  # the end of the run, though more steps than planned may come
    return context.resolve(value, f"qat.{name}")
