"""Private training in a Lightning Trainer: which batches it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_eff._wrapped import Wrapped
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.privacy import PoissonBatches
from shared_core.ranks import world_size


def wrap_loaders(trainer: Any, technique: Any) -> list[Wrapped]:
    """Return what makes the Trainer train on batches drawn for the technique, until it is undone.

    Raises:
        CompatibilityError: If accumulation changes while training, or batches are repeated.
    """
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
        raise CompatibilityError(
            "dp: accumulate_grad_batches must stay the same, got a GradientAccumulationScheduler; each step is one draw"
        )
    if trainer.overfit_batches:
        raise CompatibilityError(
            f"dp: overfit_batches must be 0, got {trainer.overfit_batches}; it takes the order of the data over"
        )

    def train_loader(original: Callable[[], Any]) -> Any:
        if world_size() > 1 and not trainer._accelerator_connector.use_distributed_sampler:
            raise CompatibilityError(
                "dp: use_distributed_sampler must be True with several processes, got False; each must hold all data, of "
                "which one draw gives it its part"
            )
        accumulate, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        made = technique.loader(original(), accumulate)
        batches = min(limit, len(made)) if isinstance(limit, int) else int(limit * len(made))
        if batches % accumulate:
            raise ConfigError(
                f"dp: limit_train_batches must leave a multiple of accumulate_grad_batches {accumulate}, got {batches} "
                "batches; each step is one draw"
            )
        return made

    def shards(original: Callable[[Any], bool], loader: Any) -> bool:
        return not isinstance(loader.batch_sampler, PoissonBatches) and original(loader)

    trainer.fit_loop._combined_loader = None  # a Trainer that trains on would keep the last run's batches
    return [
        Wrapped(trainer.fit_loop._data_source, "dataloader", train_loader),
        Wrapped(trainer._data_connector, "_requires_distributed_sampler", shards),
    ]


def replay(loaders: list[Any], batches: int) -> None:
    """Have the next iteration begin as many micro-batches earlier: Lightning's epoch starts over and skips them."""
    for loader in loaders:
        drawn = getattr(loader, "batch_sampler", None)
        if isinstance(drawn, PoissonBatches):
            drawn.replayed = batches // drawn.accumulate
