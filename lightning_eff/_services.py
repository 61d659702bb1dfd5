"""What only a Lightning Trainer can do for a technique."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_eff._checkpoints import latent_weights
from lightning_eff._fsdp2 import through_root
from shared_core.checkpoint_formats import RUN_KEY, DistributedWeights, load_checkpoint
from shared_core.checkpoint_formats.plain import LIGHTNING_META
from shared_core.checkpoint_formats.teacher_weights import is_bare_weights, same_class_teacher, teacher_from_weights
from shared_core.distributed.collectives import is_main
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.state_file import rng_state, set_rng_state
from shared_core.engine.technique import BareServices, SavedCheckpoint
from shared_core.errors import CheckpointError, CompatibilityError, MissingExtraError, TrainingError

_INSTANTIATORS = ("pytorch_lightning.cli.instantiate_module", "lightning.pytorch.cli.instantiate_module")


class LightningServices:
    """Evaluates, calibrates, and reads checkpoints through the Trainer of a running ``fit``.

    Args:
        trainer: The Trainer.
        run: Identifies this run in its checkpoints, across resumes.
        metric: Validation metric to report for checkpoints, if any.
    """

    def __init__(self, trainer: Any, run: str, metric: str | None = None) -> None:
        self._trainer, self.run, self._metric = trainer, run, metric
        self._has_checked = False
        self.step_arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        """What `training_step` is called with at present."""

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher in a ``.ckpt`` of this LightningModule, or under a Transformers folder or Hub name.

        A ``.safetensors`` file, and a ``.ckpt`` whose class cannot be built from what it says, hold an earlier state of
        the student.
        """
        random = rng_state()
        try:
            # Building a model draws its initial weights, and the run must not depend on how the teacher came.
            if name.endswith(".ckpt"):
                return self._teacher_from_checkpoint(Path(name), student)
            if is_bare_weights(Path(name)):
                return teacher_from_weights(Path(name), student)
            return _hub_teacher(name, student, trust_remote_code)
        finally:
            set_rng_state(random)

    def tokenizer(self) -> Any:
        """Return the ``tokenizer`` of the LightningModule or of its data module, None where neither has one."""
        owners = (self._trainer.lightning_module, getattr(self._trainer, "datamodule", None))
        found = [getattr(owner, "tokenizer", None) for owner in owners]
        return next((tokenizer for tokenizer in found if tokenizer is not None), None)

    def _teacher_from_checkpoint(self, path: Path, student: nn.Module) -> nn.Module:
        model = self._trainer.lightning_module
        student_name = next(name for name, module in model.named_modules() if module is student)
        if not path.is_file():
            raise CheckpointError(f"distill: teacher must be an existing file, got {path}")
        weights = _read(path)
        hyperparameters = weights.get("hyper_parameters")
        instantiator = hyperparameters.get("_instantiator") if isinstance(hyperparameters, Mapping) else None
        # Lightning imports what it names, and calls it
        if instantiator is not None and not (isinstance(instantiator, str) and instantiator in _INSTANTIATORS):
            raise CheckpointError(f"distill: teacher {path} must be built by Lightning, got {instantiator!r}; not run")
        try:
            teacher = type(model).load_from_checkpoint(path, map_location="cpu", weights_only=True)
        except Exception as error:
            prefix = f"{student_name}." if student_name else ""
            found = weights.get("state_dict", {})
            own = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
            try:
                return same_class_teacher(own, student, str(path))
            except CheckpointError as other:
                raise CheckpointError(
                    f"{other}; {type(model).__name__} was not built from saved hyperparameters (save_hyperparameters), "
                    f"got {type(error).__name__}: {error}"
                ) from error
        return _as_module(teacher.get_submodule(student_name))

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the files that this run's ModelCheckpoint callbacks saved and kept, oldest first."""
        callbacks = self._trainer.checkpoint_callbacks
        if not callbacks:
            raise CompatibilityError(
                "soup: Trainer must save checkpoints, got none; add ModelCheckpoint(save_top_k=-1, monitor=...)"
            )
        paths: set[Path] = set()
        for callback in callbacks if is_main() else ():
            paths |= {Path(path) for path in getattr(callback, "best_k_models", {})}
            folder = Path(getattr(callback, "dirpath", None) or "/nowhere")
            paths |= set(folder.glob("*.ckpt"))
        found = [saved for path in sorted(paths) if (saved := self._saved_by_this_run(path)) is not None]
        # The main process deletes what ModelCheckpoint does not keep: the others must not look before it has.
        return list(self._trainer.strategy.broadcast(sorted(found, key=lambda saved: saved.step)))

    def _saved_by_this_run(self, path: Path) -> SavedCheckpoint | None:
        file = path / LIGHTNING_META if path.is_dir() else path
        if not file.is_file():
            return None
        try:
            told = _read(file).get(RUN_KEY)
        except CheckpointError as error:  # of a run that was killed; this one should not end for it
            self.say(f"efftrain: left out of the soup: {error}")
            return None
        if not isinstance(told, dict) or told.get("id") != self.run:
            return None
        try:
            return SavedCheckpoint(path, int(told["step"]), told["metrics"].get(self._metric))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.say(f"efftrain: left out of the soup: {path} must say its step and metrics, got {error!r}")
            return None

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Return the weights as they were trained, before anything was baked into them."""
        return DistributedWeights(path) if path.is_dir() else latent_weights(_read(path))

    def check_saved(self, filepath: str | Path, *_: Any, **_options: Any) -> None:
        """Refuse a checkpoint that no soup would read when the first is saved, not after all training."""
        if self._has_checked or not Path(filepath).is_file():
            return
        self._has_checked = True
        try:
            self.load_weights(Path(filepath))
        except CheckpointError as error:
            raise CompatibilityError(
                f"soup: checkpoints must be ones that can be averaged, but {error}; leave out of them what cannot be "
                "read, for instance by save_hyperparameters(ignore=[...])"
            ) from error

    @property
    def can_validate(self) -> bool:
        """Whether the Trainer has a validation loop with batches that this run went through."""
        return bool(self._trainer.enable_validation and any(self._trainer.num_val_batches))

    def check_validation(self) -> None:
        """Refuse a Trainer that cannot evaluate: a soup would learn of it only after training."""
        if not self._trainer.enable_validation:
            raise CompatibilityError(
                "soup: Trainer must have a validation loop, got none; define validation_step and pass "
                "val_dataloaders, with limit_val_batches above 0"
            )
        if self._trainer.val_dataloaders is not None and not any(self._trainer.num_val_batches):
            raise CompatibilityError(
                "soup: Trainer must have validation batches, got none from val_dataloaders; give it data to evaluate on"
            )

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the validation loop, run without other callbacks, loggers or random numbers used up."""
        trainer = self._trainer
        self.check_validation()
        stage, random = trainer.state.stage, rng_state()
        # Early stopping, checkpointing and logging must not take a candidate for the model in training.
        callbacks, loggers = trainer.callbacks, trainer.loggers
        trainer.callbacks, trainer.loggers = [], []
        trainer.validating = True
        try:
            trainer.fit_loop.epoch_loop.val_loop.run()
            return {name: float(value) for name, value in trainer.callback_metrics.items()}
        finally:
            trainer.state.stage = stage
            trainer.callbacks, trainer.loggers = callbacks, loggers
            set_rng_state(random)

    def calibrate(self, num_batches: int) -> None:
        """Run ``training_step`` on the first training batches, in train mode without gradients or logging."""
        trainer, model = self._trainer, self._trainer.lightning_module
        if not model.automatic_optimization:
            raise CompatibilityError(
                "calibration: training_step must not step the optimizer, but does with manual optimisation"
            )
        loader = trainer.fit_loop._combined_loader
        # A second iterator, so that one in use stays where it is.
        fresh = type(loader)(loader.iterables, loader._mode)
        training, random = model.training, rng_state()
        step = type(model).training_step.__get__(model)
        takes_index = len(inspect.signature(step).parameters) > 1
        if isinstance(model, FSDPModule):
            step = functools.partial(through_root, model, step)
        try:
            model.train()
            with no_logging(model), torch.no_grad():
                for _, (batch, index, _loader) in zip(range(num_batches), fresh, strict=False):
                    batch = trainer.precision_plugin.convert_input(batch)
                    batch = model._on_before_batch_transfer(batch, dataloader_idx=0)
                    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                    with trainer.precision_plugin.train_step_context():
                        step(batch, index) if takes_index else step(batch)
        finally:
            reshard_(model)
            model.train(training)
            set_rng_state(random)

    def task_loss(self, model: Any, forward: Callable[[], Any]) -> Tensor:
        """Return the loss of that module's ``training_step`` on the present batch; what it logs is dropped."""
        kind, (args, kwargs) = type(model), self.step_arguments
        if not hasattr(kind, "training_step"):
            raise TrainingError(
                f"distill: peers must be LightningModules with a training_step, got {kind.__name__}; or set "
                "distill.student to the submodule that a peer takes the place of"
            )
        model.trainer = self._trainer
        try:
            with no_logging(model):
                # the copied instance's attribute would be the original's wrapper
                output = kind.training_step.__get__(model)(*args, **kwargs)
        finally:
            model.trainer = None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise TrainingError(
                f"distill: a peer's training_step must return a loss wherever the student's does, got {loss!r}"
            )
        return loss

    def wrapped_model(self) -> nn.Module | None:
        """Return what the strategy runs."""
        wrapped: nn.Module | None = self._trainer.strategy.model
        return wrapped

    def say(self, text: str) -> None:
        """Print one line on the main process."""
        say(text)


def say(text: str) -> None:
    """Print one line on the main process."""
    if is_main():
        BareServices().say(text)


@contextlib.contextmanager
def no_logging(model: Any) -> Iterator[None]:
    """Drop what a module logs in between."""
    names = ("log", "log_dict")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    for name in names:
        setattr(model, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)
        vars(model).update(before)


def _read(path: Path) -> dict[str, Any]:
    content = load_checkpoint(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint: {path} must hold a dict, got {type(content).__name__}; it is another's")
    return content


def _as_module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"distill: teacher must be a module, got {type(model).__name__}")
    return model


def _hub_teacher(name: str, student: nn.Module, trust_remote_code: bool) -> nn.Module:
    from shared_core.front_ends.finding import front_ends

    for front_end in front_ends():
        if (load := getattr(front_end, "load_teacher", None)) is not None:
            return _as_module(load(name, student, trust_remote_code=trust_remote_code))
    raise MissingExtraError(f"distill: teacher {name!r}", "transformers", "hf")
