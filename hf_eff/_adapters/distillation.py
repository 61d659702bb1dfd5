"""Unlabelled examples in the Trainer: which column tells them, and batches without labels, which it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hf_eff._loss_normalisation import Window
from shared_core.engine.session import Session
from shared_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer

    from shared_core.distillation import Distillation

_NO_LABELS = torch.empty(0, dtype=torch.int64)


class UnlabelledExamples:
    """What the trainer must be told of examples without labels, around its own methods.

    Args:
        trainer: The trainer.
        window: Told of the positions that the soft term will count.
    """

    session: Session
    """The trainer's; its distillation, if any, knows the options."""

    def __init__(self, trainer: Trainer, window: Window) -> None:
        self._trainer, self._window = trainer, window

    @property
    def distillation(self) -> Distillation | None:
        """The technique, None where nothing is distilled."""
        return cast("Distillation | None", self.session.techniques.get("distill"))

    @property
    def field(self) -> str | None:
        """The column that tells unlabelled examples, if there is one."""
        return self.distillation.config.unlabelled_field if self.distillation else None

    def check(self) -> None:
        """Raise `ConfigError` where the training data lack the column, as far as they tell without being read."""
        data: Any = self._trainer.train_dataset
        if self.field is None:
            return
        columns = getattr(data, "column_names", None)
        if columns is None and isinstance(data, list | tuple) and data and isinstance(data[0], Mapping):
            columns = list(data[0])
        if isinstance(columns, list) and self.field not in columns:
            raise ConfigError(
                f"distill: unlabelled_field must be a column of the training data, got {self.field!r}; they have "
                f"{', '.join(columns)}"
            )
        if self._trainer.label_names and "labels" not in self._trainer.label_names:
            raise ConfigError(
                f"distill: unlabelled_field must be none where labels are called {', '.join(self._trainer.label_names)}"
                f", not labels, got {self.field!r}"
            )

    def keep_column(self, method: Callable[..., None]) -> None:
        """Fill the trainer's list of columns that it does not drop."""
        method()
        columns = self._trainer._signature_columns
        if self.field is not None and columns is not None and self.field not in columns:
            columns.append(self.field)

    def prepare(self, method: Callable[..., Any], inputs: Any) -> Any:
        """Return inputs as the model takes them; in training, labels of unlabelled examples are taken out."""
        inputs = method(inputs)
        if self.distillation is None or self.field is None or self._trainer.model is None:
            return inputs
        if self._trainer.model.training and self.session.is_attached:
            return self.distillation.prepare_batch(inputs)
        return {name: value for name, value in inputs.items() if name != self.field}

    def batches(
        self, method: Callable[..., Any], batches: Iterator[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[Any], Any]:
        """Return a window's micro-batches and how many labels the trainer counts, and open the window."""
        window, num_items = method(map(self._countable, batches), *args, **kwargs)
        window = [
            {name: value for name, value in batch.items() if value is not _NO_LABELS}
            if isinstance(batch, Mapping) and batch.get("labels") is _NO_LABELS
            else batch
            for batch in window
        ]
        if isinstance(num_items, Tensor) and self.distillation is not None:
            num_items = num_items.clamp(min=1)  # a window without one label: its sum of 0 would be divided by 0
        self._window.causal = self.distillation is not None and self.distillation.is_causal
        looked_at = any(technique.weighs_loss for technique in self.session.techniques.values())
        self._window.open(window if looked_at else [], self._positions(window), num_items)
        return window, num_items

    def _countable(self, batch: Any) -> Any:
        """Return a batch whose labels are those that the loss will see; the trainer counts them before it."""
        if not isinstance(batch, Mapping) or self.distillation is None:
            return batch
        if self.lacks_labels(batch):
            # transformers (5.23) looks at the first batch alone to decide whether labels can be counted
            return {**batch, "labels": _NO_LABELS}
        if self.field is None:
            return batch
        prepared = self.distillation.prepare_batch(batch)
        if prepared["labels"].is_floating_point() and self._trainer.compute_loss_func is None:
            raise ConfigError(
                f"distill: unlabelled_field {self.field!r} must come with class indices as labels, or with a "
                f"compute_loss_func that leaves NaN labels out, got {prepared['labels'].dtype}"
            )
        return {**prepared, self.field: batch[self.field]}

    def lacks_labels(self, batch: Mapping[str, Any]) -> bool:
        """Return whether a batch has no labels, where the model would take them."""
        return "labels" in self._trainer.label_names and batch.get("labels") is None

    def _positions(self, window: list[Any]) -> Tensor | None:
        trainer, distillation = self._trainer, self.distillation
        if distillation is None:
            return None
        if "labels" not in trainer.label_names and any(batch.get("labels") is None for batch in window):
            return None  # labels of another name, or none at all
        count = torch.zeros((), dtype=torch.int64, device=trainer.args.device)
        for batch in window:
            count += distillation.positions_ahead(batch).to(count.device)
        return count

    def loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loss; 0 for a batch without labels whose model returns none."""
        distillation = self.distillation
        if distillation is None:
            return method(model, inputs, *args, **kwargs)
        distillation.labels = inputs.get("labels")  # label smoothing and compute_loss_func take them out
        if not self.lacks_labels(inputs):
            return method(model, inputs, *args, **kwargs)
        distillation.prepare_batch(inputs)
        output = model(**inputs)
        own = output.get("loss") if isinstance(output, Mapping) else None
        if own is None:
            return distillation.unlabelled_task(output)
        return own if self._window.divides else own / self._trainer.current_gradient_accumulation_steps
