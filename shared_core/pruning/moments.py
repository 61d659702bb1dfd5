"""When masks change in a run."""

from __future__ import annotations

from shared_core.preview import Event, every
from shared_core.pruning.config import PruneConfig
from shared_core.technique import Context


def resolve_moments(config: PruneConfig, context: Context) -> tuple[int, int]:
    """Return the steps of the first and the last update; checkpoints from before the latter are marked.

    Raises:
        ConfigError: If they do not fit the run.
    """
    end = config.end if config.updates_until_end else config.begin
    first, last = context.resolve_range(config.begin, end, "prune")
    if config.needs_a_step:
        first, last = max(1, first), max(1, last)
    # a checkpoint from before the end is less sparse than what the run promises: no ingredient for a soup
    context.first_usable_step = max(context.first_usable_step, last)
    return first, last


def moments_told(config: PruneConfig, first: int, last: int) -> list[Event]:
    """Return what happens at the steps that `resolve_moments` returned."""
    if not config.updates_until_end:
        return [(first, f"masks are made once, sparsity {config.sparsity:g}; they stay to the end")]
    growth = f"{config.schedule} from {config.initial_sparsity:g}" if config.schedule != "one_shot" else "at once"
    moving = f"; {config.dynamic} moves them" if config.dynamic != "none" else ""
    return [
        (first, f"first masks, sparsity grows ({growth}), new masks {every(config.every)}{moving}"),
        (last, f"last masks, sparsity {config.sparsity:g}; they stay to the end"),
    ]
