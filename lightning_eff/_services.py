"""Services of a Lightning Trainer for techniques, and a check of one validation batch before the first step."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_eff._adapters.distillation import load_teacher, loss_of_peer
from lightning_eff._checkpoints import latent_weights, read_checkpoint
from lightning_eff._fsdp2 import through_root
from lightning_eff._run_environment import no_logging
from shared_core.checkpoint_formats import RUN_KEY, DistributedWeights
from shared_core.checkpoint_formats.plain import LIGHTNING_META
from shared_core.distributed.collectives import is_main
from shared_core.engine.saving.state_file import rng_restored
from shared_core.engine.services import SavedCheckpoint, Services
from shared_core.errors import CheckpointError, CompatibilityError
from shared_core.front_ends.preflight import check_metrics, without_trace
from shared_core.front_ends.services import looking

if TYPE_CHECKING:
    from shared_core.front_ends.session import Session


class LightningServices(Services):
    """Evaluates, calibrates, and reads checkpoints through the Trainer of a running ``fit``."""

    def __init__(self, trainer: Any, run: str) -> None:
        self._trainer, self.run = trainer, run
        self.metric: str | None = None  # the validation metric that `checkpoints` reports
        self.step_arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # the current arguments of `training_step`

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher in a file or folder, or under a Hub name."""
        return load_teacher(name, student, self._trainer, trust_remote_code=trust_remote_code)

    def tokenizer(self) -> Any:
        """Return the ``tokenizer`` of the LightningModule or its data module, None if neither has one."""
        owners = (self._trainer.lightning_module, getattr(self._trainer, "datamodule", None))
        found = [getattr(owner, "tokenizer", None) for owner in owners]
        return next((tokenizer for tokenizer in found if tokenizer is not None), None)

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the files that this run's ModelCheckpoint callbacks saved and kept, oldest first."""
        callbacks = self._trainer.checkpoint_callbacks
        if not callbacks:
            raise CompatibilityError(
                "lightning",
                "Trainer must save checkpoints, got none",
                "add ModelCheckpoint(save_top_k=-1, monitor=...)",
            )
        paths: set[Path] = set()
        # Other processes get the list by broadcast.
        for callback in callbacks if is_main() else ():
            paths |= {Path(path) for path in getattr(callback, "best_k_models", {})}
            folder = Path(getattr(callback, "dirpath", None) or "/nowhere")
            paths |= set(folder.glob("*.ckpt"))
        found = [saved for path in sorted(paths) if (saved := self._saved_by_this_run(path)) is not None]
        # The main process deletes what ModelCheckpoint does not keep: the others must wait for that.
        return list(self._trainer.strategy.broadcast(sorted(found, key=lambda saved: saved.step)))

    def _saved_by_this_run(self, path: Path) -> SavedCheckpoint | None:
        file = path / LIGHTNING_META if path.is_dir() else path
        if not file.is_file():
            return None
        try:
            saved_run = read_checkpoint(file).get(RUN_KEY)
        except CheckpointError as error:  # from a run that was killed; this one should not end for it
            self.say(f"efftrain: checkpoint skipped: {error}")
            return None
        # Other runs' files in the same folder are not ingredients.
        if not isinstance(saved_run, dict) or saved_run.get("id") != self.run:
            return None
        try:
            return SavedCheckpoint(path, int(saved_run["step"]), saved_run["metrics"].get(self.metric))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.say(f"efftrain: checkpoint skipped: {path} has no step and metrics: {error!r}")
            return None

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Return the weights as trained, before baking."""
        return DistributedWeights(path) if path.is_dir() else latent_weights(read_checkpoint(path))

    @property
    def can_validate(self) -> bool:
        """True if the Trainer has a validation loop whose batches this run used."""
        return bool(self._trainer.enable_validation and any(self._trainer.num_val_batches))

    def check_validation(self) -> None:
        """Raise an error if the Trainer cannot evaluate."""
        if not self._trainer.enable_validation:
            raise CompatibilityError(
                "lightning",
                "Trainer must have a validation loop, got none",
                "define validation_step and pass val_dataloaders, with limit_val_batches above 0",
            )
        if self._trainer.val_dataloaders is not None and not any(self._trainer.num_val_batches):
            raise CompatibilityError(
                "lightning",
                "Trainer must have validation batches, got none from val_dataloaders",
                "give it evaluation data",
            )

    @rng_restored()
    def evaluate(self) -> dict[str, float]:
        """Return the validation loop's metrics. Other callbacks, loggers and random numbers are not affected."""
        trainer = self._trainer
        self.check_validation()
        stage = trainer.state.stage
        # Early stopping, checkpointing and logging must not mistake a candidate for the trained model.
        callbacks, loggers = trainer.callbacks, trainer.loggers
        trainer.callbacks, trainer.loggers = [], []
        trainer.validating = True
        try:
            trainer.fit_loop.epoch_loop.val_loop.run()
            return {name: float(value) for name, value in trainer.callback_metrics.items()}
        finally:
            trainer.state.stage = stage
            trainer.callbacks, trainer.loggers = callbacks, loggers

    def calibrate(self, num_batches: int) -> None:
        """Run ``training_step`` on the first training batches, in train mode without gradients or logging."""
        trainer, model = self._trainer, self._trainer.lightning_module
        if not model.automatic_optimization:
            raise CompatibilityError(
                "calibration", "training_step must not step the optimizer, but does with manual optimization"
            )
        # A second iterator, so that one in use keeps its position.
        fresh = copy.copy(trainer.fit_loop._combined_loader)
        # The class's method: the instance's is wrapped, and would add the techniques' terms.
        step = type(model).training_step.__get__(model)
        takes_index = len(inspect.signature(step).parameters) > 1
        if isinstance(model, FSDPModule):
            step = functools.partial(through_root, model, step)
        with looking(model), no_logging(model):
            for _, (batch, index, _loader) in zip(range(num_batches), fresh, strict=False):
                batch = trainer.precision_plugin.convert_input(batch)
                # As the Trainer prepares a batch: hooks of the module, device, precision.
                batch = model._on_before_batch_transfer(batch, dataloader_idx=0)
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                with trainer.precision_plugin.train_step_context():
                    step(batch, index) if takes_index else step(batch)

    def task_loss(self, model: Any, forward: Callable[[], Any]) -> Tensor:
        """Return the loss of that module's ``training_step`` on the current batch. Its logs are dropped."""
        args, kwargs = self.step_arguments
        # A copy of the module has no trainer, which training_step may need as `self.trainer`.
        model.trainer = self._trainer
        try:
            with no_logging(model):
                return loss_of_peer(model, args, kwargs)
        finally:
            model.trainer = None

    def wrapped_model(self) -> nn.Module | None:
        """Return the model that the strategy runs."""
        wrapped: nn.Module | None = self._trainer.strategy.model
        return wrapped


def preflight(trainer: Any, session: Session, services: LightningServices, seen: Collection[str]) -> None:
    """Check that validation logs the metrics that techniques need."""
    if trainer.global_step == 0 and not {*session.recipe.needed_metrics().values()} <= set(seen):
        check_metrics(session, lambda: _names_logged(trainer, services))


def _names_logged(trainer: Any, services: LightningServices) -> list[str]:
    loop, connector, module = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector, trainer.lightning_module
    # Loops, connector and trainer: a validation writes into all of them.
    with without_trace(module, trainer, loop, loop.batch_progress, connector, module):
        if loop._combined_loader is None:  # check_val_every_n_epoch is above 1
            stage, trainer.validating = trainer.state.stage, True
            loop.setup_data()
            trainer.state.stage = stage
        loaders = loop._combined_loader
        if loaders is None:
            services.check_validation()
        # An iterator with persistent workers stays for the run.
        iterators = [(one, one._iterator) for one in loaders.flattened if hasattr(one, "_iterator")]
        with without_trace(module, loaders, data=[loaders.flattened]):
            loop.batch_progress = copy.deepcopy(loop.batch_progress)
            # Separate results: only the logged names matter.
            loop._results = type(loop._results)(training=False)
            loop._max_batches = [min(1, batches) for batches in loop._max_batches]
            connector.reset_metrics()
            try:
                return list(services.evaluate())
            finally:
                for loader, iterator in iterators:
                    loader._iterator = iterator
