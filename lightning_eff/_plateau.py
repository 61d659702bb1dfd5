"""Schedulers that go by a metric (`ReduceLROnPlateau`), in a run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def state(trainer: Any, skipped: bool) -> dict[str, Any]:
    """Return what schedulers on a plateau go by, and which of them have yet to take their step of this batch.

    Lightning (2.6) steps them behind the hooks that save, and after a restart only if a validation saved; it
    restores no metric.
    """
    loop = trainer.fit_loop.epoch_loop
    configs = {i: config for i, config in enumerate(trainer.lr_scheduler_configs) if config.reduce_on_plateau}
    if not configs or not trainer.lightning_module.automatic_optimization:
        return {}
    batch, metrics = loop.batch_progress.current, trainer.callback_metrics
    is_due = batch.processed > batch.completed and not (skipped or trainer.fit_loop._should_accumulate())
    return {
        "due": [
            i for i, config in configs.items()
            if is_due and config.interval == "step" and batch.ready % config.frequency == 0
        ],
        "metrics": {
            config.monitor: metrics[config.monitor].clone()
            for config in configs.values() if config.monitor in metrics
        },
    }  # fmt: skip


def step(trainer: Any, plateau: Mapping[str, Any]) -> None:
    """Take the steps that were due, by the metrics that there are now."""
    loop = trainer.fit_loop.epoch_loop
    for i in plateau.get("due", ()):
        config = trainer.lr_scheduler_configs[i]
        if (value := trainer.callback_metrics.get(config.monitor)) is not None:
            loop.scheduler_progress.increment_ready()
            module = trainer.lightning_module  # its class's own: wrapped, it asks whether this process has stepped
            type(module).lr_scheduler_step(module, config.scheduler, value)
            loop.scheduler_progress.increment_completed()
