"""Private training in a Lightning Trainer: which batches it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_eff._adapters.adapter import Adapter
from lightning_eff._run_environment import no_logging
from shared_core.distributed.collectives import world_size
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.privacy import PoissonBatches
from shared_core.privacy.technique import losses_of_halves


class DifferentialPrivacy(Adapter):
    """Trains on batches drawn for the technique, and shows it whether the loss is a mean over examples."""

    key = "dp"

    @classmethod
    def check_trials(cls, tuner: str) -> None:
        """Refuse them."""
        raise CompatibilityError(
            "dp",
            f"learning rate and batch size must be given, got {tuner}, whose trials see the data without noise",
            "tune on public data",
        )

    def set_up(self) -> list[Wrapped]:
        """Surround what makes the Trainer's loader."""
        trainer = self._trainer
        self.technique.sees_loss_in_forward = False
        if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
            raise CompatibilityError(
                "dp",
                "accumulate_grad_batches must stay the same, got a GradientAccumulationScheduler",
                "each step is one draw",
            )
        if trainer.overfit_batches:
            raise CompatibilityError(
                "dp", f"overfit_batches must be 0, got {trainer.overfit_batches}", "it takes the order of the data over"
            )
        trainer.fit_loop._combined_loader = None  # a Trainer that trains on would keep the last run's batches
        return [
            Wrapped(trainer.fit_loop._data_source, "dataloader", self._loader),
            Wrapped(trainer._data_connector, "_requires_distributed_sampler", self._shards),
        ]

    def _loader(self, original: Callable[[], Any]) -> Any:
        trainer = self._trainer
        accumulate, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        made = self.technique.loader(original(), accumulate)
        batches = min(limit, len(made)) if isinstance(limit, int) else int(limit * len(made))
        if batches % accumulate:
            raise ConfigError(
                "dp",
                f"limit_train_batches must leave a multiple of accumulate_grad_batches {accumulate}, got {batches} "
                "batches",
                "each step is one draw",
            )
        return made

    def _shards(self, original: Callable[[Any], bool], loader: Any) -> bool:
        shards = original(loader)
        if not isinstance(loader.batch_sampler, PoissonBatches):
            return shards
        if world_size() > 1 and not shards:
            raise CompatibilityError(
                "dp",
                "use_distributed_sampler must be True with several processes, got False",
                "each must hold all data, of which one draw gives it its part",
            )
        return False

    def arguments(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Have the technique compare the loss of the run's first batch of two rows or more with those of its halves."""
        (batch, *rest), module = args, self._module
        technique = self.technique
        if technique.checks_loss:
            with no_logging(module):
                found = losses_of_halves(module, lambda part: step(part, *rest, **kwargs), batch, technique.rows)
            if found:
                technique.check_loss(*found)
        return args

    def replay(self, loaders: list[Any], batches: int) -> None:
        """Have the next iteration begin at the epoch's first step: Lightning's epoch starts over and skips batches."""
        for loader in loaders:
            drawn = getattr(loader, "batch_sampler", None)
            if isinstance(drawn, PoissonBatches):
                drawn.replayed = batches
