"""Services that only a front end can offer: evaluate, read checkpoints, load a teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shared_core.distributed.collectives import is_main
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.modules.calls import loss_of
from shared_core.printing import printable


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of this run: its path, step, and validation metric if one was logged."""

    path: Path
    step: int
    metric: float | None = None


class Services:
    """What techniques may ask of a front end.

    This class is for a loop without a trainer. Methods that need a trainer raise an error. A front end, or the author
    of a loop, overrides them.
    """

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher saved under a path or Hub name, on the CPU or the student's device.

        Args:
            name: A path or a Hub name.
            student: The model that it will teach.
            trust_remote_code: Run code that comes with the weights. Without it, none is run.
        """
        raise CompatibilityError(
            "bare loop", f"distill.teacher must be a module here, got {name!r}", "load it and pass the object"
        )

    def tokenizer(self) -> Any:
        """Return the tokenizer of the user's model, or the processor that holds it. None if the user gave none."""
        return None

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the checkpoints that this run saved, oldest first."""
        raise _needs_trainer("soup of the run's checkpoints")

    def load_weights(self, path: Path) -> Mapping[str, Tensor]:
        """Return a checkpoint's weights under the names of ``context.model.state_dict()``."""
        raise _needs_trainer("reading a checkpoint")

    def evaluate(self) -> dict[str, float]:
        """Return the trainer's validation metrics for the current weights."""
        raise _needs_trainer("evaluation")

    def calibrate(self, num_batches: int) -> None:
        """Run the model in train mode, without gradients, on that many training batches."""
        raise _needs_trainer("calibration")

    @property
    def lacks_batches(self) -> str:
        """How the user can give `calibrate` training batches. Empty if it has some."""
        if type(self).calibrate is not Services.calibrate:
            return ""
        return (
            "pass Session(services=...) with a subclass of Services whose calibrate(num_batches) calls the model "
            "on training batches, or train with hf_eff or lightning_eff"
        )

    def task_loss(self, model: nn.Module, forward: Callable[[], Any]) -> Tensor:
        """Return the trainer's loss of the current micro-batch for a module in place of the user's model.

        Without a trainer, it is the loss that the model computes from the labels among its inputs.

        Args:
            model: The module.
            forward: Runs it on the inputs that the user's model just received. A trainer does not need it.

        Raises:
            TrainingError: If the model returns no loss. Then pass services whose `task_loss` computes it.
        """
        output = forward()
        found = loss_of(output)
        if not isinstance(found, Tensor):
            raise TrainingError(
                "bare loop",
                f"{type(model).__name__} returned no loss (output.loss or output['loss']), only a "
                f"{type(output).__name__}",
                "pass labels to the model, or Session(services=...) with a subclass of Services whose "
                "task_loss(model, forward) returns the loss of forward()",
            )
        return found

    def wrapped_model(self) -> nn.Module | None:
        """Return the model as the trainer wraps it for training (DDP, compile), None if it does not."""
        return None

    def say(self, text: str) -> None:
        """Print one line on the main process, where the trainer prints its own."""
        if is_main():
            print(printable(text), flush=True)  # noqa: T201


def _needs_trainer(what: str) -> CompatibilityError:
    remedy = "use hf_eff or lightning_eff, or pass Session(services=...)"
    return CompatibilityError("bare loop", f"{what} needs a trainer", remedy)
