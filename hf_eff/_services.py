"""A teacher from a folder or the Hub: the class its config names, every weight found in its files.

What only the Hugging Face Trainer can do for a technique: evaluate, list checkpoints, load a teacher.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import AutoConfig, Trainer
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_eff._checkpoints import checkpoint_folder, weights_of
from hf_eff._wrapped import Wrapped
from shared_core.checkpoint_formats.plain import check_values
from shared_core.checkpoint_formats.teacher_weights import is_bare_weights, teacher_from_weights
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.state_file import rng_state, set_rng_state
from shared_core.engine.technique import SavedCheckpoint
from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.files.json_yaml import parse_json


def load_teacher(name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model saved under `name`, on the student's device; random numbers are left as they were.

    Args:
        name: A folder that a trainer or ``save_pretrained`` wrote, or a name on the Hub; a folder without config.json
            or a ``.safetensors`` file holds an earlier state of the student.
        student: Gives the device, and the class where the config names none, or where the student is a model of
            sentence-transformers.
        trust_remote_code: Run the code that lies beside the weights (``auto_map`` in ``config.json``).

    Raises:
        CheckpointError: If it cannot be found or read, or its files lack a weight.
    """
    composed = _is_composed(student)
    if is_bare_weights(Path(name).expanduser()) and not composed:
        return teacher_from_weights(Path(name).expanduser(), student)
    _check_path(name, "config.json", *(["modules.json"] if composed else ()))
    device = next((parameter.device for parameter in student.parameters()), torch.device("cpu"))
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            if composed:
                return _composed_teacher(name, student, trust_remote_code).to(device)
            # never left out: transformers would ask whoever sits at the terminal
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            teacher, loading = _class_of(config, student, name, trust_remote_code).from_pretrained(
                name, config=config, output_loading_info=True
            )
        except CheckpointError:
            raise
        except Exception as error:  # transformers, safetensors and the Hub client each raise their own
            if not trust_remote_code and _TRUST in str(error):
                raise _untrusted(name) from error
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"distill: teacher must be a readable model folder or Hub name, got {name!r}: {first_line[:300]}"
            ) from error
    lacking = [*loading["missing_keys"], *(key[0] for key in loading["mismatched_keys"])]
    if lacking:
        raise CheckpointError(
            f"distill: teacher's files must hold every weight, got {name!r} without {sorted(lacking)[0]} "
            f"({len(lacking)} in all); it would teach from random weights"
        )
    check_values(teacher, dict(teacher.named_parameters()), f"distill: teacher {name!r}")
    return teacher.to(device)  # type: ignore[no-any-return]


def empty_model(name: str) -> nn.Module:
    """Return the model that a folder's config describes, in the type of its weights, on the meta device.

    Raises:
        CheckpointError: If the config cannot be read, or names no class of transformers.
    """
    _check_path(name, "config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # else a terminal is asked
    except Exception as error:  # transformers and the Hub client each raise their own
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"distill: teacher must have a readable config.json, got {name!r}: {first_line[:300]}"
        ) from error
    with torch.device("meta"):
        model: nn.Module = _class_of(config, nn.Module(), name, False)._from_config(config)
    return model.to(config.dtype) if isinstance(config.dtype, torch.dtype) else model


def _is_composed(student: nn.Module) -> bool:
    """Return whether a student is a model of sentence-transformers: several modules, listed in ``modules.json``."""
    return any(kind.__module__.startswith("sentence_transformers.") for kind in type(student).__mro__)


def _composed_teacher(name: str, student: Any, trust_remote_code: bool) -> nn.Module:
    """Return the model of the student's class that a folder of sentence-transformers, or the Hub, holds."""
    path, kind = Path(name).expanduser(), type(student)
    ours = getattr(student, "model_type", kind.__name__)
    written = path / "config_sentence_transformers.json"
    told: Any = parse_json(written.read_text(encoding="utf-8")) if written.is_file() else {}
    if (theirs := told.get("model_type", ours)) != ours:
        raise CheckpointError(f"distill: teacher must be a {ours} as the student is, got {name!r}, which is a {theirs}")
    if ours == "CrossEncoder" and not (path / "modules.json").is_file():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if not any("SequenceClassification" in one for one in config.architectures or ()):  # its head would be drawn
            raise CheckpointError(
                f"distill: teacher must be a {ours}, got {name!r} of {config.architectures}; it would teach from "
                "random weights"
            )
    device = next((str(parameter.device) for parameter in student.parameters()), "cpu")
    place = str(path) if path.exists() else name
    teacher: nn.Module = kind(place, device=device, trust_remote_code=trust_remote_code)
    return teacher


def _check_path(name: str, *files: str) -> None:
    path = Path(name).expanduser()
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or os.sep == "\\" in name
    if path.exists():
        if not any((path / file).is_file() for file in files):
            raise CheckpointError(
                f"distill: teacher must be a folder with {' or '.join(files)}, got {name!r} without; give the folder "
                "that save_model or save_pretrained wrote"
            )
    elif looks_like_path:
        raise CheckpointError(f"distill: teacher must be an existing folder or a Hub name, got {name!r}")


_TRUST = "trust_remote_code"  # what transformers names in its refusal


def _untrusted(name: str) -> CheckpointError:
    return CheckpointError(
        f"distill: teacher must be of a class of transformers, got {name!r}, whose config.json names code that lies "
        "beside it (auto_map); it was not run. Read it, then set distill.trust_remote_code: true "
        "(--distill_trust_remote_code; eff cache-teacher --trust-remote-code), or load it and pass the object"
    )


def _class_of(config: Any, student: nn.Module, name: str, trust_remote_code: bool) -> Any:
    named = (config.architectures or [None])[0]
    own = [code for code in (getattr(config, "auto_map", None) or {}).values() if isinstance(code, str)]
    own = [code for code in own if code.rpartition(".")[2] == named]
    if own and trust_remote_code:
        return get_class_from_dynamic_module(own[0], name)
    known = [getattr(transformers, found, None) for found in config.architectures or ()]
    if known and known[0] is not None:
        return known[0]
    # a model class of the user's own is not an attribute of transformers
    kind = type(student)
    if hasattr(kind, "from_pretrained") and kind.__name__ in (config.architectures or [kind.__name__]):
        return kind
    if own:
        raise _untrusted(name)
    raise CheckpointError(
        f"distill: teacher's config must name a class of transformers, got {config.architectures!r} in {name!r}; "
        "load it yourself and pass the object"
    )


class TrainerServices:
    """The services of one trainer.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.saved_steps: list[int] = []
        """Steps at which this run saved; resumed runs go on with the list of the run that they resume."""
        self.metric: str | None = None
        """The validation metric that `checkpoints` reports."""
        self.searches = False
        """Whether a greedy soup will evaluate its candidates."""
        self.note = self.say
        """Tells the user a line, and keeps it for the receipt where a session listens."""
        self.compute_loss: Callable[[nn.Module], Any] | None = None
        """The trainer's `compute_loss` on the present micro-batch, of any model."""

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher in a folder or on the Hub."""
        return load_teacher(name, student, trust_remote_code=trust_remote_code)

    def tokenizer(self) -> Any:
        """Return the trainer's tokenizer, or the processor that holds it."""
        return self._trainer.processing_class

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints of this run that still exist, oldest first; older runs' in the folder are left out."""
        run = self._trainer._get_output_dir(getattr(self._trainer, "_trial", None))
        history = self._trainer.state.log_history
        found = []
        for step in self.saved_steps:
            folder = checkpoint_folder(run, step)
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
        trainer.callback_handler.callbacks = []
        try:
            return dict(self._metrics(trainer.evaluate()))
        finally:
            trainer.callback_handler.callbacks = callbacks
            trainer.state.log_history = history
            set_rng_state(random)

    def validate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's own `evaluate`; one that a greedy soup could not use fails at the first validation."""
        metrics = method(*args, **kwargs)
        return self._metrics(metrics) if self.searches else metrics

    def _metrics(self, returned: Any) -> Mapping[str, float]:
        if not isinstance(returned, Mapping):
            raise ConfigError(
                f"hf: evaluate of {type(self._trainer).__name__} must return its metrics, got {returned!r:.80}; let it "
                "return what super().evaluate() does, with its own figures added"
            )
        return returned

    def calibrate(self, num_batches: int) -> None:
        """Run training batches without gradients; random numbers and the order of training data stay as they were."""
        trainer, model = self._trainer, self._model()
        accelerator, was_training = trainer.accelerator, model.training
        state = trainer.state
        if state.global_step < state.max_steps and is_used_up(trainer.train_dataset):
            self.note(
                f"calibration takes up to {num_batches} batches from a data set that holds an iterator: if that starts "
                "once alone, training goes on behind them; let it start anew each time that it is iterated"
            )
        loaders = list(accelerator._dataloaders)
        references = list(accelerator.gradient_state.dataloader_references)
        random = rng_state()
        model.train()
        try:
            with torch.no_grad():
                for batch in _first(trainer.get_train_dataloader(), num_batches):
                    self._run(model, trainer._prepare_inputs(batch))
        finally:
            set_rng_state(random)
            model.train(was_training)
            reshard_(model)
            # a loader left before its end stays registered, and accelerate would take it for the training one
            accelerator._dataloaders[:] = loaders
            accelerator.gradient_state.dataloader_references = references

    def _run(self, model: nn.Module, inputs: Any) -> None:
        trainer = self._trainer
        trainer._set_signature_columns_if_needed()
        if type(trainer).compute_loss is Trainer.compute_loss or {*inputs} <= {*(trainer._signature_columns or ())}:
            model(**inputs)
            return
        # what is in these batches is known to the subclass alone, whose loss may ask for this number (TRL's GRPO)
        vars(trainer).setdefault("current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
        loss = trainer.compute_loss
        (loss.method if isinstance(loss, Wrapped) else loss)(model, inputs)

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return what the trainer's `compute_loss` makes of this model and the present micro-batch."""
        if self.compute_loss is None:
            raise TrainingError("hf: compute_loss must have run before another model's loss is asked for")
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
            tqdm.write(text)

    def _model(self) -> nn.Module:
        model = self._trainer.model
        if model is None:
            raise TrainingError("hf: trainer must have a model")
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
