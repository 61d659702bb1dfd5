"""Distillation in a Lightning Trainer: teachers from its files, unlabeled examples, and clipping of peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_eff._adapters import Adapter
from lightning_eff._checkpoints import read_checkpoint
from shared_core.checkpoint_formats.opening import is_bare_weights, same_class_teacher, teacher_from_weights
from shared_core.errors import CheckpointError, MissingExtraError, TrainingError
from shared_core.front_ends.finding import front_ends
from shared_core.front_ends.wrapped_method import Wrapped


class Distillation(Adapter):
    """Passes each batch to the technique, and clips the peers of mutual learning one by one."""

    key = "distill"

    def set_up(self) -> list[Wrapped]:
        """Wrap the clipping if there are peers, whose parameters are in the optimizer too."""
        if not self.technique.config.mutual:
            return []
        return [Wrapped(self._module, "configure_gradient_clipping", self._clip)]

    def _clip(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.technique.one_by_one(lambda: original(*args, **kwargs))

    def arguments(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Remove labels of unlabeled examples. Lightning passes the batch by position."""
        if not self.technique.config.unlabeled_field:
            return args
        return self.technique.prepare_batch(args[0]), *args[1:]


def loss_of_peer(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the loss of a module's ``training_step`` on a batch."""
    kind = type(model)
    if not hasattr(kind, "training_step"):
        rule = f"peers must be LightningModules with a training_step, got {kind.__name__}"
        raise TrainingError("distill", rule, "or set distill.student to the submodule that a peer replaces")
    output = model.training_step(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        rule = f"a peer's training_step must return a loss wherever the student's does, got {loss!r}"
        raise TrainingError("distill", rule)
    return loss


_INSTANTIATORS = ("pytorch_lightning.cli.instantiate_module", "lightning.pytorch.cli.instantiate_module")


def load_teacher(name: str, student: nn.Module, trainer: Any, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the teacher in a ``.ckpt`` of a LightningModule, or under a Transformers folder or Hub name.

    A ``.safetensors`` file holds an earlier state of the student, and so does a ``.ckpt`` whose class cannot be built
    from its contents.
    """
    if name.endswith(".ckpt"):
        return _from_checkpoint(Path(name).expanduser(), student, trainer.lightning_module)
    if is_bare_weights(path := Path(name).expanduser()):
        return teacher_from_weights(path, student)
    return _from_hub(name, student, trust_remote_code)


def _from_checkpoint(path: Path, student: nn.Module, model: Any) -> nn.Module:
    student_name = next(name for name, module in model.named_modules() if module is student)
    if not path.is_file():
        raise CheckpointError("distill", f"teacher must be an existing file, got {path}")
    weights = read_checkpoint(path)
    hyperparameters = weights.get("hyper_parameters")
    instantiator = hyperparameters.get("_instantiator") if isinstance(hyperparameters, Mapping) else None
    # Lightning imports what it names, and calls it
    if instantiator is not None and not (isinstance(instantiator, str) and instantiator in _INSTANTIATORS):
        raise CheckpointError(
            "distill", f"teacher {path} must be built by Lightning, got {instantiator!r}", "no code was run"
        )
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


def _as_module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise CheckpointError("distill", f"teacher must be a module, got {type(model).__name__}")
    return model


def _from_hub(name: str, student: nn.Module, trust_remote_code: bool) -> nn.Module:
    for front_end in front_ends():
        if (load := getattr(front_end, "load_teacher", None)) is not None:
            return _as_module(load(name, student, trust_remote_code=trust_remote_code))
    raise MissingExtraError(f"distill: teacher {name!r}", "transformers", "hf")
