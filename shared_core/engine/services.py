"""Services that only a front end can offer: evaluate, read checkpoints, load a teacher."""

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
    """A checkpoint of this run: its path, step, and validation metric if one was logged."""

    path: Path
    step: int
    metric: float | None = None


class Services(Protocol):
    """What techniques may ask of a front end. `BareServices` implements it for a loop without a trainer."""

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher saved under a path or Hub name, on the CPU or the student's device.

        Args:
            name: A path or a Hub name.
            student: The model that it will teach.
            trust_remote_code: Run code that comes with the weights. Without it, none is run.
        """
        ...

    def tokenizer(self) -> Any:
        """Return the tokenizer of the user's model, or the processor that holds it. None if the user gave none."""
        ...

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that this run saved, oldest first."""
        ...

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Return a checkpoint's weights under the names of ``context.model.state_dict()``."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Return the trainer's validation metrics for the current weights."""
        ...

    def calibrate(self, num_batches: int) -> None:
        """Run the model in train mode, without gradients, on that many training batches."""
        ...

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return the trainer's loss of the current micro-batch for a module in place of the user's model.

        Args:
            model: The module.
            forward: Runs it on the inputs that the user's model just received. A loop without a trainer uses it.
        """
        ...

    def wrapped_model(self) -> nn.Module | None:
        """Return the model as the trainer wraps it for training (DDP, compile), None if it does not."""
        ...

    def say(self, text: str) -> None:
        """Print one line on the main process, where the trainer prints its own."""
        ...


class BareServices:
    """Services for a plain training loop. Methods that need a trainer raise an error."""

    def _needs_trainer(self, what: str) -> CompatibilityError:
        return CompatibilityError(
            "bare loop", f"{what} needs a trainer", "use hf_eff or lightning_eff, or pass Session(services=...)"
        )

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Raise: a loop passes the teacher as a module."""
        raise CompatibilityError(
            "bare loop", f"distill.teacher must be a module here, got {name!r}", "load it and pass the object"
        )

    def tokenizer(self) -> Any:
        """Return None."""
        return None

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Raise."""
        raise self._needs_trainer("soup of the run's checkpoints")

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Raise."""
        raise self._needs_trainer("reading a checkpoint")

    def evaluate(self) -> dict[str, float]:
        """Raise."""
        raise self._needs_trainer("evaluation")

    def calibrate(self, num_batches: int) -> None:
        """Raise."""
        raise self._needs_trainer("calibration")

    @property
    def lacks_batches(self) -> str:
        """How the user can give `calibrate` training batches. Empty if it has some."""
        if type(self).calibrate is not BareServices.calibrate:
            return ""
        return (
            "pass Session(services=...) with a subclass of BareServices whose calibrate(num_batches) calls the model "
            "on training batches, or train with hf_eff or lightning_eff"
        )

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return the loss that the model computes from the labels among its inputs.

        Raises:
            TrainingError: If the model returns no loss. Then pass services whose `task_loss` computes it.
        """
        output = forward()
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise TrainingError(
                "bare loop",
                f"{type(model).__name__} returned no loss (output.loss or output['loss']), only a "
                f"{type(output).__name__}",
                "pass labels to the model, or Session(services=...) with a subclass of BareServices whose "
                "task_loss(model, forward) returns the loss of forward()",
            )
        return found

    def wrapped_model(self) -> nn.Module | None:
        """Return None: a plain loop does its own wrapping."""
        return None

    def say(self, text: str) -> None:
        """Print the line."""
        print(printable(text), flush=True)  # noqa: T201
