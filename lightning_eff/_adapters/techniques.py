"""Adapters of single techniques in Lightning: our precision plugin, drawn batches, checkpoints to average."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_eff._adapters import Adapter
from lightning_eff._run_environment import namespace_of, no_logging
from lightning_eff.precision import precision_class
from shared_core.distributed.collectives import world_size
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.privacy import PoissonBatches
from shared_core.privacy.technique import losses_of_halves


class LossScaling(Adapter):
    """Adds the technique's scaler to the plugin, and the plugin to the Trainer."""

    key = "loss_scale"
    _stock: Any = None

    def set_up(self) -> list[Wrapped]:
        """Replace Lightning's plugin with ours, unless the Trainer has ours already."""
        trainer, plugin = self._trainer, self._trainer.precision_plugin
        if any(kind.__qualname__ == "LossScalingPrecision" for kind in type(plugin).__mro__):
            return []
        if type(plugin).__name__ not in ("Precision", "MixedPrecision", "Fp8Precision", "HalfPrecision"):
            raise CompatibilityError(
                "loss_scale",
                "precision plugin must be Lightning's 32-true, 16-mixed, bf16-mixed or 16-true, got "
                f"{type(plugin).__name__}",
                "pass plugins=LossScalingPrecision(...) instead of precision=",
            )
        options = self.session.recipe["loss_scale"].to_dict()
        trainer.strategy.precision_plugin = precision_class(namespace_of(trainer))(
            precision=plugin.precision, **options
        )
        self._stock = plugin
        return []

    def start_fit(self) -> None:
        """Give the plugin its scaler before its state is restored."""
        device = self._trainer.strategy.root_device.type
        self._trainer.precision_plugin.scaler = self.technique.make_scaler(device)

    def undo(self) -> None:
        """Restore Lightning's own plugin."""
        if self._stock is not None:
            self._trainer.strategy.precision_plugin = self._stock


class DifferentialPrivacy(Adapter):
    """Trains on batches drawn for the technique, and checks that the loss is a mean over examples."""

    key = "dp"

    @classmethod
    def check_trials(cls, tuner: str) -> None:
        """Refuse them."""
        raise CompatibilityError(
            "dp",
            f"{tuner} is not supported, because its trials train on the data without noise",
            "set learning rate and batch size yourself, or tune on public data",
        )

    def set_up(self) -> list[Wrapped]:
        """Wrap the method that makes the Trainer's loader."""
        trainer = self._trainer
        self.technique.sees_loss_in_forward = False
        if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
            raise CompatibilityError(
                "dp",
                "GradientAccumulationScheduler is not supported, because every step draws the same number of examples",
                "set accumulate_grad_batches to one number",
            )
        if trainer.overfit_batches:
            raise CompatibilityError(
                "dp", f"overfit_batches must be 0, got {trainer.overfit_batches}, which changes the order of the data"
            )
        trainer.fit_loop._combined_loader = None  # otherwise a second `fit` would keep the last run's batches
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
                "each step needs all micro-batches of one draw",
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
                "each process needs access to all data, and each draw gives it its part",
            )
        return False

    def arguments(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Compare the loss of the run's first batch of two or more rows with those of its halves."""
        (batch, *rest), module = args, self._module
        technique = self.technique
        if technique.checks_loss:
            with no_logging(module):
                found = losses_of_halves(module, lambda part: step(part, *rest, **kwargs), batch, technique.rows)
            if found:
                technique.check_loss(*found)
        return args

    def replay(self, loaders: list[Any], batches: int) -> None:
        """Make the next iteration start at the epoch's first step: Lightning restarts the epoch and skips batches."""
        for loader in loaders:
            drawn = getattr(loader, "batch_sampler", None)
            if isinstance(drawn, PoissonBatches):
                drawn.replayed = batches


class Soup(Adapter):
    """Fails at the start, or after the first checkpoint, if there would be nothing to average."""

    key = "soup"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._options = self.session.recipe["soup"].to_dict()
        self._services.metric = self._options["metric"]
        self._has_checked = False

    @classmethod
    def left_out(cls, trainer: Any) -> str:
        """Leave it out in a fast_dev_run, which only tries the user's code."""
        return "fast_dev_run saves no checkpoints" if trainer.fast_dev_run else ""

    def start_training(self) -> None:
        """Raise an error if the Trainer cannot evaluate. Otherwise a greedy soup would fail only after training."""
        if self._options["kind"] == "greedy":
            self._services.check_validation()

    def saved(self, path: str) -> None:
        """Raise an error for unreadable checkpoints when the first is saved, not at the end of training."""
        if self._has_checked or not Path(path).is_file():
            return
        self._has_checked = True
        try:
            self._services.load_weights(Path(path))
        except CheckpointError as error:
            raise CompatibilityError(
                "soup",
                f"checkpoints must be ones that can be averaged, but {error}",
                "leave out what cannot be read, for instance with save_hyperparameters(ignore=[...])",
            ) from error
