"""What only a front end can do for a technique: evaluate, read checkpoints, load a teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from shared_core.errors import CompatibilityError, TrainingError
from shared_core.printing import printable


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of this run as an ingredient: where it lies, its step, its validation metric if logged."""

    path: Path
    step: int
    metric: float | None = None


class Services(Protocol):
    """Services that only a front end has for a technique; `BareServices` is the answer of a loop without a trainer."""

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher saved under a path or Hub name, on CPU or the student's device; run no code of its own.

        Args:
            name: The path or name.
            student: The model that it will teach.
            trust_remote_code: Run the code that lies beside its weights.
        """
        ...

    def tokenizer(self) -> Any:
        """Return the tokenizer of the user's model, or the processor that holds it; None where nobody gave one."""
        ...

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that this run saved, oldest first."""
        ...

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Return a checkpoint's weights under the names of ``context.model.state_dict()``."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Return the trainer's own validation metrics for the weights that the model has now."""
        ...

    def calibrate(self, num_batches: int) -> None:
        """Run the model in train mode, without gradients, on that many training batches."""
        ...

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return the trainer's own loss of the present micro-batch for a module that stands for the user's model.

        Args:
            model: The module.
            forward: Runs it on the inputs that the user's model just had, for a loop without a trainer.
        """
        ...

    def wrapped_model(self) -> nn.Module | None:
        """Return the model as the trainer wraps it to train (DDP, compile), None if it does not."""
        ...

    def say(self, text: str) -> None:
        """Show one line to the user, on the main process, where the trainer shows its own."""
        ...


class BareServices:
    """Services of a plain training loop: whatever needs a trainer says so."""

    def _needs_trainer(self, what: str) -> CompatibilityError:
        return CompatibilityError(
            "bare loop", f"{what} needs a trainer", "use hf_eff or lightning_eff, or pass Session(services=...)"
        )

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Refuse: give the teacher as a module."""
        raise CompatibilityError(
            "bare loop", f"distill.teacher must be a module here, got {name!r}", "load it and pass the object"
        )

    def tokenizer(self) -> Any:
        """Return None."""
        return None

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Refuse."""
        raise self._needs_trainer("soup of the run's checkpoints")

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Refuse."""
        raise self._needs_trainer("reading a checkpoint")

    def evaluate(self) -> dict[str, float]:
        """Refuse."""
        raise self._needs_trainer("evaluation")

    def calibrate(self, num_batches: int) -> None:
        """Refuse."""
        raise self._needs_trainer("calibration")

    @property
    def lacks_batches(self) -> str:
        """What the user must do so that `calibrate` has training batches; empty if it has some."""
        if type(self).calibrate is not BareServices.calibrate:
            return ""
        return (
            "pass Session(services=...) with a subclass of BareServices whose calibrate(num_batches) calls the model "
            "on training batches, or train with hf_eff or lightning_eff"
        )

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return the loss that the model itself computes from labels among its inputs.

        Raises:
            TrainingError: If it returns none: then give `Session` services of your own, whose `task_loss` computes it.
        """
        output = forward()
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise TrainingError(
                "bare loop",
                f"{type(model).__name__} must return its loss (output.loss or output['loss']), got "
                f"{type(output).__name__} without",
                "pass labels to the model, or Session(services=...) with a subclass of BareServices whose "
                "task_loss(model, forward) returns the loss of forward()",
            )
        return found

    def wrapped_model(self) -> nn.Module | None:
        """Return None: a plain loop wraps what it likes."""
        return None

    def say(self, text: str) -> None:
        """Print the line."""
        print(printable(text), flush=True)  # noqa: T201
