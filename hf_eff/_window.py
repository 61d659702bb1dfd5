"""How the Trainer averages its loss over an accumulation window, so that a further term is averaged the same way."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        self._labels: Tensor | None = None
        self.causal = False
        """Whether a technique knows that labels are one position ahead; the trainer may not."""
        self.divides = False
        """Whether the trainer divides the loss by the number of micro-batches."""

    @property
    def micro_batches(self) -> int:
        """How many micro-batches this process has in the window; an epoch's last may have fewer than the others."""
        return int(getattr(self._trainer, "current_gradient_accumulation_steps", 1))

    @property
    def processes(self) -> int:
        """How many processes have data of their own."""
        return int(self._trainer.accelerator.num_processes // self._trainer.get_tp_size())

    def open(self, batches: list[Any], count: Tensor | None, num_items: Tensor | int | None) -> None:
        """Note the window's labels, the soft term's positions in it, and the trainer's own count of labels.

        Args:
            batches: The micro-batches of this process; none where no technique looks at the loss's size.
            count: The soft term's positions in them, None where nothing tells.
            num_items: What the trainer counted, over all processes.
        """
        self.divides = self._trainer_divides(num_items)
        self._labels = self._count = None
        if not batches:
            return
        device = self._trainer.args.device
        both = torch.zeros(2, dtype=torch.int64, device=device)
        for labelled in map(self.labelled, batches):
            both[0] += 0 if labelled is None else labelled.sum().to(device)
        both[1] = 0 if count is None else count
        if self._joins_counts:
            # these ranks see the same batches
            names = ("get_tp_size", "get_cp_size", "get_sp_size")
            replicas = math.prod(getattr(self._trainer, name, lambda: 1)() for name in names)
            both = all_reduce_(both, "sum") / replicas
        self._labels = None if num_items is None else both[0]
        self._count = None if count is None else both[1]

    @property
    def _joins_counts(self) -> bool:
        return bool(self._trainer.args.average_tokens_across_devices)

    def labelled(self, inputs: Any) -> Tensor | None:
        """Return which of a micro-batch's labels the task loss is a mean over, as the trainer counts them; or None."""
        labels = inputs.get("shift_labels", inputs.get("labels")) if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor):
            return None
        shifts = self.causal or getattr(self._trainer, "_loss_shifts_labels", False)
        if shifts and "shift_labels" not in inputs and labels.dim() > 1:
            labels = labels[..., 1:]
        return labels.ne(-100) & labels.isnan().logical_not()

    def share(self, inputs: Mapping[str, Any]) -> Tensor | float:
        """Return what a micro-batch's mean is multiplied by, so that the window's sum is the mean over its labels."""
        mine = self.labelled(inputs)
        if self._labels is None or mine is None:
            return 1 / self.micro_batches
        replicas = self.processes if self._joins_counts else 1
        return mine.sum() * replicas / self._labels.to(mine.device).clamp(min=1)

    def _trainer_divides(self, num_items: Tensor | int | None) -> bool:
        declared = getattr(self._trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if declared is not None:
            return not declared
        counted = self._trainer.model_accepts_loss_kwargs and num_items is not None
        return not (counted or self._trainer.compute_loss_func is not None)

    def normalise(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return a micro-batch's `total`, divided so that the whole window's become one mean over its positions."""
        if self._count is None:
            # nothing tells how many positions the window has: average as a trainer without counts does
            total = total / max(int(count), 1)
            return total if self.divides else total / self.micro_batches
        mean: Tensor = total * self.processes / self._count.clamp(min=1)
        return mean * self.micro_batches if self.divides else mean
