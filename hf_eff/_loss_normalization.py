"""Average an added loss term over an accumulation window as the Trainer averages the task loss.

If the task loss ignores the Trainer's count of labels, each micro-batch's mean is weighted here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import Trainer

from shared_core.distributed.collectives import all_reduce_
from shared_core.engine.observers.micro_batches import mean_over_micro_batch
from shared_core.engine.saving.state_file import rng_restored
from shared_core.modules.calls import evaluated

if TYPE_CHECKING:
    from shared_core.front_ends.session import Session


class Window:
    """The counted positions of the current accumulation window.

    The loss that `compute_loss` returns is summed over micro-batches and averaged over processes by DDP. If the trainer
    divides it by the number of micro-batches, a term must be multiplied by that number first.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._count: Tensor | None = None
        self._labels: Tensor | None = None
        self.causal = False  # True if a technique knows that labels are one position ahead; the trainer may not
        self.is_weighed = False  # True if a technique weights the loss
        self.adds_term = False  # True if a technique adds a term to the task loss
        self.lacks_logits = False  # True if logits of a whole micro-batch do not fit
        self.term_positions: Tensor | None = None
        """The term's positions in the next window, None if unknown."""
        self.divides = False  # True if the trainer divides the loss by the number of micro-batches

    @property
    def micro_batches(self) -> int:
        """Number of this process's micro-batches in the window; an epoch's last window may have fewer."""
        return int(getattr(self._trainer, "current_gradient_accumulation_steps", 1))

    @property
    def processes(self) -> int:
        """Number of processes with their own data."""
        return int(self._trainer.accelerator.num_processes // self._trainer.get_tp_size())

    def open(self, batches: list[Any], num_items: Tensor | int | None) -> None:
        """Record labels, positions of the added term, and the trainer's count over all processes.

        Without a technique that needs the loss's scale, there are no micro-batches.
        """
        self.divides = self._trainer_divides(num_items)
        self._labels = self._count = None
        count = self.term_positions
        if not batches:
            return
        # Two counts in one tensor: one all-reduce per window.
        device = self._trainer.args.device
        both = torch.zeros(2, dtype=torch.int64, device=device)
        for labeled in map(self.labeled, batches):
            both[0] += 0 if labeled is None else labeled.sum().to(device)
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

    def labeled(self, inputs: Any) -> Tensor | None:
        """Return which labels of a micro-batch the task loss averages, as the trainer counts them, or None."""
        labels = inputs.get("shift_labels", inputs.get("labels")) if isinstance(inputs, Mapping) else None
        if not isinstance(labels, Tensor):
            return None
        shifts = self.causal or getattr(self._trainer, "_loss_shifts_labels", False)
        if shifts and "shift_labels" not in inputs and labels.dim() > 1:
            # Causal models predict the next token: a row's first label is not a target.
            labels = labels[..., 1:]
        # In regression, NaN marks an example without a label.
        return labels.ne(-100) & labels.isnan().logical_not()

    def share(self, inputs: Mapping[str, Any]) -> Tensor | float:
        """Return the factor for a micro-batch's mean that makes the window's sum the mean over its labels."""
        mine = self.labeled(inputs)
        if self._labels is None or mine is None:
            return 1 / self.micro_batches
        replicas = self.processes if self._joins_counts else 1
        # The window's loss is sum(mean_i * n_i) / sum(n_i), so a micro-batch's mean has weight n_i / sum(n_i). DDP
        # averages over processes, so multiply by their number.
        return mine.sum() * replicas / self._labels.to(mine.device).clamp(min=1)

    def _trainer_divides(self, num_items: Tensor | int | None) -> bool:
        declared = getattr(self._trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if declared is not None:
            return not declared
        counted = self._trainer.model_accepts_loss_kwargs and num_items is not None
        return not (counted or self._trainer.compute_loss_func is not None)

    def normalize(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return a micro-batch's `total`, scaled so that the window's sum is one mean over its positions."""
        if self._count is None:
            # The number of positions is unknown: average as a trainer without counts does.
            total = mean_over_micro_batch(total, count)
            # The trainer adds up micro-batches: give each an equal weight.
            return total if self.divides else total / self.micro_batches
        # DDP divides by the number of processes, but the count covers all of them.
        mean: Tensor = total * self.processes / self._count.clamp(min=1)
        return mean * self.micro_batches if self.divides else mean


_IGNORES, _TOLD = 0.98, 0.02
"""Share of the loss that does not change with the count, above which the loss is taken to ignore the count.

The first is near 1: next to a cross-entropy that follows the count, a router's loss may be most of the loss.
"""


class TaskLoss:
    """Makes the task loss of a window the mean over its labels, however the batch is split.

    For models that take loss keywords, the trainer (transformers 5.23) does not divide: the loss should be divided by
    `num_items_in_batch`. Many such models return a mean anyway (`BertForSequenceClassification` and its siblings), as
    do many `compute_loss_func` and overridden `compute_loss`. These means add up over micro-batches and processes,
    which changes the balance with an added term. If no technique weights the loss, nothing is changed.
    """

    session: Session
    """The trainer's."""

    def __init__(self, trainer: Trainer, window: Window) -> None:
        self._trainer, self._window = trainer, window
        self.follows: bool | None = None  # True if the loss follows the count; None if not checked yet

    def look(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        """Check if the loss follows the count, the first time that it matters.

        The loss is computed for the count of its own labels and for twice as many, in eval mode and without gradients,
        so random numbers, running statistics and observers do not change. `method` is the trainer's own `compute_loss`,
        the others are its arguments.
        """
        if self.follows is not None or _count(args, kwargs) is None or not self._matters():
            return
        try:
            whole, half = self._for_two_counts(method, model, self._few(inputs), _count(args, kwargs))
        except Exception as error:  # the user's own code, which may not support eval mode
            self.follows = True
            self.session.note(
                f"{self._whose()} cannot be computed in eval mode ({error}): it is assumed to be divided by "
                "num_items_in_batch; if it is a mean, set loss_is_scaled_for_ga = False on the trainer"
            )
            return
        if whole == 0.0:
            return  # no labels anywhere: nothing to check
        # A loss divided by the count halves when the count doubles: 2 * half / whole is 1, so `ignoring` is 0. A mean
        # ignores the count: half = whole, and it is 1. Parts of a loss may do either (the auxiliary loss of a mixture
        # of experts is a mean).
        ignoring = 2 * half / whole - 1
        self.follows = ignoring < _IGNORES
        if not self.follows:
            self.session.note(
                f"{self._whose()} ignores num_items_in_batch, so the Trainer adds up the means of a step's "
                f"{self._means()}: each is weighted by its share of the step's labels, as in one batch"
            )
        elif ignoring > _TOLD:
            self.session.note(
                f"{ignoring:.0%} of {self._whose()} ignores num_items_in_batch: that part adds up over a step's "
                f"{self._means()}, as it does without techniques"
            )

    def _for_two_counts(self, method: Callable[..., Any], model: Any, inputs: Any, count: Any) -> list[float]:
        """Return all processes' losses for the count of these labels and for twice as many, in the type of `count`."""
        # The whole window's count would work for a loss that is one sum. If a mean is added, it makes the sum too small
        # to see.
        figures = copy.deepcopy(getattr(self._trainer, "_metrics", None))
        losses = torch.zeros(2, device=self._trainer.args.device)
        try:
            with evaluated(model):
                # Eval mode, so that dropout does not cause a difference. A whole window is not needed.
                for index in range(2):
                    labeled = self._window.labeled(inputs)
                    if labeled is None:
                        model(**inputs)  # other processes have labels and may wait for this one inside the model
                        continue
                    own: Any = max(int(labeled.sum()), 1) * (index + 1)
                    own = torch.full_like(count, own) if isinstance(count, Tensor) else own
                    with rng_restored():  # the same random numbers for both calls
                        found = method(model, dict(inputs), False, own)
                    losses[index] = found if found.isfinite() else 0.0
        finally:
            if figures is not None:
                cast(Any, self._trainer)._metrics = figures  # TRL (1.16) records figures of every loss there
        # Summed over processes: all decide alike, also those without labels.
        return all_reduce_(losses, "sum").tolist()

    def _matters(self) -> bool:
        declared = getattr(self._trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        several = self._window.micro_batches * self._window.processes > 1
        # It matters only if more than one mean is added up.
        return self._window.is_weighed and several and not self._window.divides and declared is None

    def _few(self, inputs: Any) -> Any:
        """Return the row with most labels if logits of a whole micro-batch do not fit."""
        labels = self._window.labeled(inputs)
        if labels is None or not self._window.lacks_logits:
            return inputs
        # One row tells as much, at a fraction of the logits.
        row = int(labels.reshape(len(labels), -1).sum(1).argmax())
        rows = {len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()}
        if rows != {len(labels)}:
            return inputs
        return {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def _whose(self) -> str:
        trainer = self._trainer
        if type(trainer).compute_loss is not Trainer.compute_loss:
            return f"the loss of {type(trainer).__name__}.compute_loss"
        if trainer.compute_loss_func is not None:
            return "the loss of compute_loss_func"
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        return f"the loss of {type(model).__name__}"

    def _means(self) -> str:
        batches, processes = self._window.micro_batches, self._window.processes
        text = f"{batches} micro-batches" if batches > 1 else ""
        text += " and " if text and processes > 1 else ""
        return text + (f"{processes} processes" if processes > 1 else "")

    def share(self, inputs: Any, *args: Any, **kwargs: Any) -> Tensor | float | None:
        """Return the factor for the mean of such a call, None if it is right already."""
        # a compute_loss_func without a count can only return means
        uncounted = _count(args, kwargs) is None and self._window.adds_term
        return self._window.share(inputs) if (uncounted or self.follows is False) and self._matters() else None

    def of(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's own `compute_loss`, with the loss weighted if it ignores the count."""
        share = self.share(inputs, *args, **kwargs)
        if share is None:
            return method(model, inputs, *args, **kwargs)
        # without a count, the trainer does not multiply by the number of processes
        result = method(model, inputs, *args[:1], **{**kwargs, "num_items_in_batch": None})
        loss = result[0] if isinstance(result, tuple) else result
        weighted = (loss * share).to(loss.dtype)
        return (weighted, *result[1:]) if isinstance(result, tuple) else weighted


def _count(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("num_items_in_batch")
