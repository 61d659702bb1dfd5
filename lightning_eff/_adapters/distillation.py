"""Distillation in a Lightning Trainer: unlabelled examples, the clipping of peers, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_eff._adapters.adapter import Adapter
from shared_core.errors import TrainingError
from shared_core.front_ends.wrapped_method import Wrapped


class Distillation(Adapter):
    """Tells the technique of each batch, and clips the peers of mutual learning one by one."""

    key = "distill"

    def set_up(self) -> list[Wrapped]:
        """Surround the clipping where there are peers: they are among the optimizer's parameters."""
        if not self.technique.config.mutual:
            return []
        return [Wrapped(self._module, "configure_gradient_clipping", self._clip)]

    def _clip(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.technique.one_by_one(lambda: original(*args, **kwargs))

    def arguments(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Take out labels of unlabelled examples; Lightning gives the batch by position."""
        if not self.technique.config.unlabelled_field:
            return args
        return self.technique.prepare_batch(args[0]), *args[1:]


def loss_of_peer(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the loss of a module's ``training_step`` on a batch."""
    kind = type(model)
    if not hasattr(kind, "training_step"):
        raise TrainingError(
            "distill",
            f"peers must be LightningModules with a training_step, got {kind.__name__}",
            "or set distill.student to the submodule that a peer takes the place of",
        )
    output = model.training_step(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TrainingError(
            "distill", f"a peer's training_step must return a loss wherever the student's does, got {loss!r}"
        )
    return loss
