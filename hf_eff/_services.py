"""Services of the Hugging Face Trainer for techniques: evaluate, list checkpoints, run other models.

Before the first step, one batch runs through the user's `evaluate` as a check and leaves no trace.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset
from tqdm.auto import tqdm
from transformers import IntervalStrategy, Trainer

from hf_eff._adapters.distillation import load_teacher
from hf_eff._checkpoints import checkpoint_folder, weights_of
from shared_core.distributed.collectives import is_main
from shared_core.engine.saving.state_file import rng_restored
from shared_core.engine.services import SavedCheckpoint, Services
from shared_core.errors import ConfigError, TrainingError
from shared_core.front_ends.preflight import check_metrics, without_trace
from shared_core.front_ends.services import looking
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.printing import printable

if TYPE_CHECKING:
    from shared_core.front_ends.session import Session


class HubServices(Services):
    """Loads teachers from folders and the Hub, and prints above progress bars."""

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher in a folder or on the Hub."""
        return load_teacher(name, student, trust_remote_code=trust_remote_code)

    def say(self, text: str) -> None:
        """Print a line above the progress bar, on the main process."""
        if is_main():
            tqdm.write(printable(text))


class TrainerServices(HubServices):
    """The services of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.saved_steps: list[int] = []
        """Steps at which this run saved. Resumed runs continue the list."""
        self.metric: str | None = None  # the validation metric that `checkpoints` reports
        self.note = self.say  # reports a message; with a session, also adds it to the receipt
        self.trial: Any = None  # the trial of a hyperparameter search
        self.compute_loss: Callable[[nn.Module], Any] | None = None
        """The trainer's `compute_loss` on the current micro-batch, for any model."""

    def tokenizer(self) -> Any:
        """Return the trainer's tokenizer, or the processor that holds it."""
        return self._trainer.processing_class

    @property
    def run_folder(self) -> str:
        """The folder of the run's checkpoints; each trial of a search has its own."""
        folder: str = self._trainer._get_output_dir(self.trial)
        return folder

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return this run's checkpoints that still exist, oldest first."""
        history = self._trainer.state.log_history
        found = []
        # Only what this run saved: the folder may hold checkpoints of earlier runs.
        for step in self.saved_steps:
            folder = checkpoint_folder(self.run_folder, step)
            logged = [entry[self.metric] for entry in history if entry.get("step") == step and self.metric in entry]
            if folder.is_dir():
                found.append(SavedCheckpoint(folder, step, float(logged[-1]) if logged else None))
        return found

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Return a checkpoint's weights under the model's names."""
        return weights_of(path, self._model())

    @rng_restored()
    def evaluate(self) -> dict[str, float]:
        """Return the trainer's metrics on its eval_dataset. Logs, callbacks and random numbers are not affected."""
        trainer = self._trainer
        callbacks, history = trainer.callback_handler.callbacks, list(trainer.state.log_history)
        # Without callbacks: early stopping, the best checkpoint and logs must not mistake a candidate for the trained
        # model.
        trainer.callback_handler.callbacks = []
        try:
            return dict(self.checked_metrics(trainer.evaluate()))
        finally:
            trainer.callback_handler.callbacks = callbacks
            trainer.state.log_history = history

    def checked_metrics(self, returned: Any) -> Mapping[str, float]:
        """Return the metrics that `evaluate` returned. Raise an error if they are not metrics."""
        if not isinstance(returned, Mapping):
            raise ConfigError(
                "hf",
                f"evaluate of {type(self._trainer).__name__} must return its metrics, got {returned!r:.80}",
                "return the result of super().evaluate() with your own figures added",
            )
        return returned

    def calibrate(self, num_batches: int) -> None:
        """Run training batches without gradients. Random numbers and the order of training data are not affected."""
        trainer, model = self._trainer, self._model()
        accelerator, state = trainer.accelerator, trainer.state
        if state.global_step < state.max_steps and is_used_up(trainer.train_dataset):
            self.note(
                f"calibration uses up to {num_batches} batches of a data set that holds an iterator: if it can be "
                "iterated only once, training continues after them; return a new iterator each time"
            )
        loaders = list(accelerator._dataloaders)
        references = list(accelerator.gradient_state.dataloader_references)
        try:
            with looking(model):
                for batch in _first(trainer.get_train_dataloader(), num_batches):
                    self._run(model, trainer._prepare_inputs(batch))
        finally:
            # a loader left early stays registered, and accelerate would mistake it for the training loader
            accelerator._dataloaders[:] = loaders
            accelerator.gradient_state.dataloader_references = references

    def _run(self, model: nn.Module, inputs: Any) -> None:
        trainer = self._trainer
        trainer._set_signature_columns_if_needed()
        # Without labels no loss is needed: a forward is enough if the stock trainer makes the batches.
        if type(trainer).compute_loss is Trainer.compute_loss or {*inputs} <= {*(trainer._signature_columns or ())}:
            model(**inputs)
            return
        # only the subclass knows its batches, and its loss may need this number (TRL's GRPO)
        vars(trainer).setdefault("current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
        loss = trainer.compute_loss
        # Bypass our wrapper, which would add the techniques' terms.
        (loss.method if isinstance(loss, Wrapped) else loss)(model, inputs)

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return the trainer's `compute_loss` of this model on the current micro-batch."""
        if self.compute_loss is None:
            raise TrainingError("hf", "compute_loss must have run before another model's loss is asked for")
        loss = self.compute_loss(model)
        found: Tensor = loss[0] if isinstance(loss, tuple) else loss
        return found

    def wrapped_model(self) -> nn.Module | None:
        """Return the model that accelerate prepared for training."""
        wrapped: nn.Module | None = self._trainer.model_wrapped
        return wrapped

    def _model(self) -> nn.Module:
        model = self._trainer.model
        if model is None:
            raise TrainingError("hf", "trainer must have a model")
        unwrapped: nn.Module = self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        return unwrapped


def is_used_up(data: Any) -> bool:
    """Return True if a stream may only be iterable once: it is an iterator or holds one."""
    held = [data, *getattr(data, "__dict__", {}).values()]
    return isinstance(data, IterableDataset) and any(isinstance(source, Iterator) for source in held)


def _first(batches: Iterable[Any], count: int) -> Iterator[Any]:
    try:
        yield from itertools.islice(batches, count)
    except ValueError as error:
        if "does not contain any data" not in str(error):  # accelerate (1.15) raises this when a stream has ended
            raise


_WITHOUT_WORKERS = {
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "dataloader_multiprocessing_context": None,
}


class NotTriedError(Exception):
    """One batch cannot be evaluated separately."""


def preflight(trainer: Trainer, session: Session, services: TrainerServices) -> None:
    """Check that evaluation reports the metrics that techniques and the choice of the best checkpoint need."""
    args, best = trainer.args, trainer.args.metric_for_best_model
    also = {}
    if session.recipe and best is not None and args.eval_strategy != IntervalStrategy.NO:
        also["hf: metric_for_best_model"] = best if best.startswith("eval_") else f"eval_{best}"
    if trainer.state.global_step == 0:
        check_metrics(session, lambda: _names_reported(trainer, services), also)


def _names_reported(trainer: Trainer, services: TrainerServices) -> list[str]:
    model: Any = trainer.model
    if getattr(trainer, "evaluator", None) is not None:
        raise NotTriedError("its evaluator reads all of its own data")
    accelerator, count = trainer.accelerator, trainer.args.eval_batch_size * trainer.args.world_size
    loaders = list(accelerator._dataloaders)
    references = list(accelerator.gradient_state.dataloader_references)
    data = [trainer.eval_dataset, trainer.data_collator, trainer.compute_metrics]
    owners = [trainer, trainer.args, trainer.callback_handler]
    with tempfile.TemporaryDirectory() as folder, without_trace(model, *owners, data=data):
        # run state and files written by post-processing would come from this batch
        trainer.state, trainer.control = copy.deepcopy(trainer.state), copy.copy(trainer.control)
        trainer.eval_dataset = _first_examples(trainer.eval_dataset, count)
        # A temporary folder, and no workers, which would outlive the batch.
        vars(trainer.args).update(output_dir=folder, **_WITHOUT_WORKERS)
        Wrapped(trainer, "get_eval_dataloader", _only_one_batch)
        try:
            return list(services.evaluate())
        finally:
            # accelerate registers each loader, and takes the latest one for the training loader.
            accelerator._dataloaders[:] = loaders
            accelerator.gradient_state.dataloader_references = references


def _only_one_batch(method: Any, *args: Any, **kwargs: Any) -> Any:
    loader = method(*args, **kwargs)
    length = len(loader) if hasattr(getattr(loader, "dataset", None), "__len__") else 1
    # The user's own loader method might read everything.
    if length > 1:
        raise NotTriedError("get_eval_dataloader ignores eval_dataset")
    return loader


def _first_examples(data: Any, count: int) -> Any:
    """Return the first examples of a data set, or of each in a dict of them."""
    if isinstance(data, dict):
        return {name: _first_examples(part, count) for name, part in data.items()}
    # `select` of datasets keeps columns and formats.
    if hasattr(data, "select") and hasattr(data, "__len__"):
        return data.select(range(min(count, len(data))))
    if is_used_up(data):
        raise NotTriedError("the evaluation data are an iterator, so the batch would be missing later")
    if hasattr(data, "take"):
        return data.take(count)
    if isinstance(data, IterableDataset):
        return _Head(data, count)
    return Subset(data, range(min(count, len(data))))


class _Head(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._data), self._count)
