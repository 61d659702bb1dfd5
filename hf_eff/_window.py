"""How the Trainer averages its loss over an accumulation window, so that a further term is averaged the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_core.ranks import all_reduce_

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
        self._divides = False

    def open(self, batches: list[Any], num_items: Tensor | int | None) -> None:
        """Note the positions of these micro-batches, over all processes; `num_items` is the trainer's own count."""
        trainer = self._trainer
        if num_items is not None:
            # the trainer has gathered it: with average_tokens_across_devices=False several processes are refused
            self._count = torch.as_tensor(num_items, device=trainer.args.device)
        else:
            self._count = self._counted(batches)
        self._divides = self._trainer_divides(num_items)

    def _counted(self, batches: list[Any]) -> Tensor | None:
        labels = [self._labels(batch) for batch in batches]
        if any(found is None for found in labels):
            return None
        count = torch.zeros((), dtype=torch.int64, device=self._trainer.args.device)
        for found in labels:
            if found is not None:
                count += (found != -100).sum().to(count.device)
        return all_reduce_(count, "sum")

    def _labels(self, batch: Any) -> Tensor | None:
        if "shift_labels" in batch:
            found: Tensor = batch["shift_labels"]
            return found
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if not isinstance(labels, Tensor):
            return None
        if labels.is_floating_point():
            return labels.reshape(len(labels), -1)[:, 0]  # regression and multi-label: one position an example
        return labels[..., 1:] if self._trainer._loss_shifts_labels else labels

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
            return total if self._divides else total / micro_batches
        processes = trainer.accelerator.num_processes // trainer.get_tp_size()
        mean: Tensor = total * processes / self._count.clamp(min=1)
        return mean * micro_batches if self._divides else mean
