"""Services that only the Hugging Face Trainer has for a technique: evaluate, list checkpoints, run other models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import Trainer

from hf_eff._adapters.distillation import load_teacher
from hf_eff._checkpoints import checkpoint_folder, weights_of
from shared_core.engine.services import SavedCheckpoint
from shared_core.engine.state_file import rng_state, set_rng_state
from shared_core.errors import ConfigError, TrainingError
from shared_core.front_ends.looking import looking
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.printing import printable


class TrainerServices:
    """The services of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.saved_steps: list[int] = []
        """Steps at which this run saved; resumed runs go on with the list of the run that they resume."""
        self.metric: str | None = None
        """The validation metric that `checkpoints` reports."""
        self.note = self.say
        """Tells the user a line, and keeps it for the receipt where a session listens."""
        self.trial: Any = None
        """That of a hyperparameter search."""
        self.compute_loss: Callable[[nn.Module], Any] | None = None
        """The trainer's `compute_loss` on the present micro-batch, of any model."""

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher in a folder or on the Hub."""
        return load_teacher(name, student, trust_remote_code=trust_remote_code)

    def tokenizer(self) -> Any:
        """Return the trainer's tokenizer, or the processor that holds it."""
        return self._trainer.processing_class

    @property
    def run_folder(self) -> str:
        """The folder of the run's checkpoints; a trial of a search has its own."""
        folder: str = self._trainer._get_output_dir(self.trial)
        return folder

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints of this run that still exist, oldest first; older runs' in the folder are left out."""
        history = self._trainer.state.log_history
        found = []
        # Only what this run saved: a folder may hold checkpoints of earlier runs.
        for step in self.saved_steps:
            folder = checkpoint_folder(self.run_folder, step)
            logged = [entry[self.metric] for entry in history if entry.get("step") == step and self.metric in entry]
            if folder.is_dir():
                found.append(SavedCheckpoint(folder, step, float(logged[-1]) if logged else None))
        return found

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Return a checkpoint's weights under the model's names."""
        return weights_of(path, self._model())

    def evaluate(self) -> dict[str, float]:
        """Return the trainer's metrics on its eval_dataset; log, callbacks and random numbers stay as they were."""
        trainer, random = self._trainer, rng_state()
        callbacks, history = trainer.callback_handler.callbacks, list(trainer.state.log_history)
        # Without callbacks: early stopping, the best checkpoint and logs must not take a candidate for the model in
        # training.
        trainer.callback_handler.callbacks = []
        try:
            return dict(self.checked_metrics(trainer.evaluate()))
        finally:
            trainer.callback_handler.callbacks = callbacks
            trainer.state.log_history = history
            set_rng_state(random)

    def checked_metrics(self, returned: Any) -> Mapping[str, float]:
        """Return what `evaluate` returned, where that is metrics."""
        if not isinstance(returned, Mapping):
            raise ConfigError(
                "hf",
                f"evaluate of {type(self._trainer).__name__} must return its metrics, got {returned!r:.80}",
                "let it return what super().evaluate() does, with its own figures added",
            )
        return returned

    def calibrate(self, num_batches: int) -> None:
        """Run training batches without gradients; random numbers and the order of training data stay as they were."""
        trainer, model = self._trainer, self._model()
        accelerator, state = trainer.accelerator, trainer.state
        if state.global_step < state.max_steps and is_used_up(trainer.train_dataset):
            self.note(
                f"calibration takes up to {num_batches} batches from a data set that holds an iterator: if that starts "
                "once alone, training goes on behind them; let it start anew each time that it is iterated"
            )
        loaders = list(accelerator._dataloaders)
        references = list(accelerator.gradient_state.dataloader_references)
        try:
            with looking(model):
                for batch in _first(trainer.get_train_dataloader(), num_batches):
                    self._run(model, trainer._prepare_inputs(batch))
        finally:
            # a loader left before its end stays registered, and accelerate would take it for the training one
            accelerator._dataloaders[:] = loaders
            accelerator.gradient_state.dataloader_references = references

    def _run(self, model: nn.Module, inputs: Any) -> None:
        trainer = self._trainer
        trainer._set_signature_columns_if_needed()
        # Without labels no loss is needed: a forward is enough, if the stock trainer makes the batches.
        if type(trainer).compute_loss is Trainer.compute_loss or {*inputs} <= {*(trainer._signature_columns or ())}:
            model(**inputs)
            return
        # what is in these batches is known to the subclass alone, whose loss may ask for this number (TRL's GRPO)
        vars(trainer).setdefault("current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
        loss = trainer.compute_loss
        # Past our wrapper: it would add the techniques' terms.
        (loss.method if isinstance(loss, Wrapped) else loss)(model, inputs)

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return what the trainer's `compute_loss` makes of this model and the present micro-batch."""
        if self.compute_loss is None:
            raise TrainingError("hf", "compute_loss must have run before another model's loss is asked for")
        loss = self.compute_loss(model)
        found: Tensor = loss[0] if isinstance(loss, tuple) else loss
        return found

    def wrapped_model(self) -> nn.Module | None:
        """Return what accelerate prepared for training."""
        wrapped: nn.Module | None = self._trainer.model_wrapped
        return wrapped

    def say(self, text: str) -> None:
        """Show a line above the progress bar, on the main process."""
        if self._trainer.is_world_process_zero():
            tqdm.write(printable(text))

    def _model(self) -> nn.Module:
        model = self._trainer.model
        if model is None:
            raise TrainingError("hf", "trainer must have a model")
        unwrapped: nn.Module = self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        return unwrapped


def is_used_up(data: Any) -> bool:
    """Return whether a stream may be one that can be iterated once: it is an iterator, or keeps one."""
    held = [data, *getattr(data, "__dict__", {}).values()]
    return isinstance(data, IterableDataset) and any(isinstance(source, Iterator) for source in held)


def _first(batches: Iterable[Any], count: int) -> Iterator[Any]:
    try:
        yield from itertools.islice(batches, count)
    except ValueError as error:
        if "does not contain any data" not in str(error):  # accelerate (1.15) says so of a stream that has ended
            raise
