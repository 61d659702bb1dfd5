"""How the Trainer averages its loss over an accumulation window, so that a further term is averaged the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import Trainer


class Window:
    """The counted positions of the accumulation window that is being trained on.

    The loss that `compute_loss` returns is summed over the micro-batches and averaged over the processes by DDP. In
    between the trainer may divide it by the number of micro-batches: then a term must be multiplied by it first.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._count: Tensor | None = None
        self.divides = False
        """Whether the trainer divides the loss by the number of micro-batches."""

    def open(self, count: Tensor | None, num_items: Tensor | int | None) -> None:
        """Note the soft term's positions in the window, over all processes, and the trainer's own count of labels."""
        self._count = count
        self.divides = self._trainer_divides(num_items)

    def _trainer_divides(self, num_items: Tensor | int | None) -> bool:
        declared = getattr(self._trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if declared is not None:
            return not declared
        counted = self._trainer.model_accepts_loss_kwargs and num_items is not None
        return not (counted or self._trainer.compute_loss_func is not None)

    def normalise(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return a micro-batch's `total`, divided so that the whole window's become one mean over its positions."""
        trainer = self._trainer
        micro_batches = getattr(trainer, "current_gradient_accumulation_steps", 1)
        if self._count is None:
            # nothing tells how many positions the window has: average as a trainer without counts does
            total = total / max(int(count), 1)
            return total if self.divides else total / micro_batches
        processes = trainer.accelerator.num_processes // trainer.get_tp_size()
        mean: Tensor = total * processes / self._count.clamp(min=1)
        return mean * micro_batches if self.divides else mean
