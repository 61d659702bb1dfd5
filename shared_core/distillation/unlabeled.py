"""Examples without a label: how a batch marks them, and how the two terms of the loss count them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.distributed.collectives import any_rank
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError, TrainingError

IGNORED = -100
"""Label of a position that does not count: ``ignore_index`` of torch's cross-entropy."""

_PER_TOKEN = ("ForMaskedLM", "ForTokenClassification")


def rows_that_count(
    shape: tuple[int, ...], labels: Tensor | None, attention_mask: Any, *, causal: bool, unlabeled: Tensor | None
) -> Tensor | None:
    """Return a mask of the rows that the soft term counts, ``(B,)`` examples or ``(B, L)`` positions; None: all.

    Rows count if their label is not -100. Without labels, and in `unlabeled` examples ``(B,)``, all rows except
    padding count. An attention mask of another shape is ignored. In a causal model the logits at i predict label i + 1,
    so the last position and padding on the left never count.

    Example:
        >>> labels, unlabeled = torch.tensor([[-100, 4, -100], [7, 7, 7]]), torch.tensor([False, True])
        >>> rows_that_count((2, 3), labels, torch.tensor([[1, 1, 1], [1, 1, 0]]), causal=False, unlabeled=unlabeled)
        tensor([[False,  True, False],
                [ True,  True, False]])
    """
    if len(shape) == 1 and (labels is None or (_one_each(labels, attention_mask) and not causal)):
        return None  # every example has a soft target, with or without a label
    masked = isinstance(attention_mask, Tensor) and tuple(attention_mask.shape) == shape
    real = attention_mask != 0 if masked else None
    if labels is not None:
        counts = labels != IGNORED
        if unlabeled is not None:
            everything = torch.ones_like(counts) if real is None else real.to(counts.device)
            counts = torch.where(_column(unlabeled, counts), everything, counts)
    elif real is not None:
        counts = real
    elif causal and len(shape) == 2:
        counts = torch.ones(shape, dtype=torch.bool)
    else:
        return None
    if not causal or len(shape) != 2:
        return counts
    counts = F.pad(counts[:, 1:], (0, 1), value=False)
    # Left padding would have to predict the first token from nothing.
    return counts if real is None else counts & (real.cumsum(1) > 0).to(counts.device)


def positions_ahead(batch: Mapping[str, Any], unlabeled: Tensor | None, *, causal: bool, per_token: bool) -> Tensor:
    """Return how many rows of a batch the soft term will count, before a model's forward: int64 scalar."""
    labels, attention = batch.get("labels"), batch.get("attention_mask")
    if isinstance(labels, Tensor):
        # Numbers and independent labels: one row holds all outputs of an example.
        shape = tuple(labels.shape[:-1] if labels.is_floating_point() and labels.ndim > 1 else labels.shape)
        labels = None if labels.is_floating_point() else labels
    elif per_token:
        shape = tuple((attention if isinstance(attention, Tensor) else _first(batch)).shape[:2])
    else:
        shape = (len(_first(batch)),)
    counts = rows_that_count(shape, labels, attention, causal=causal, unlabeled=unlabeled)
    return torch.tensor(math.prod(shape)) if counts is None else counts.sum()


def split_batch(batch: Mapping[str, Any], field: str | None) -> tuple[dict[str, Any], Tensor | None]:
    """Return a batch without `field` and without labels of unlabeled examples, and a mask of these examples.

    A removed label becomes -100, or NaN among float labels, so that a loss that fails to ignore it is NaN at once. If a
    batch has no ``labels``, all its examples are unlabeled. Without a field the mask of a batch with labels is None.
    The field holds one bool, or 0 or 1, per example; True = unlabeled.

    Example:
        >>> batch, unlabeled = split_batch({"labels": torch.tensor([3, 1]), "new": torch.tensor([0, 1])}, "new")
        >>> batch, unlabeled
        ({'labels': tensor([   3, -100])}, tensor([False,  True]))
    """
    is_mapping = isinstance(batch, Mapping)
    if not is_mapping or (field is not None and batch.get("labels") is not None and field not in batch):
        got = ", ".join(map(str, batch)) if is_mapping else f"a {type(batch).__name__}"
        remedy = "keep it in the data set and its collator" if is_mapping else "make batches dicts"
        raise ConfigError("distill", f"unlabeled_field {field!r} must be a key of every batch, got {got}", remedy)
    rest = {name: value for name, value in batch.items() if name != field}
    if rest.get("labels") is None:
        first = _first(rest)
        return rest, torch.ones(len(first), dtype=torch.bool, device=first.device)
    if field is None:
        return rest, None
    unlabeled = _flags(batch[field], field, rest["labels"])
    for name in ("labels", "shift_labels"):
        if isinstance(rest.get(name), Tensor):
            rest[name] = _taken_out(rest[name], unlabeled)
    return rest, unlabeled


def labeled_part(task_loss: Tensor, labels: Any, *, causal: bool) -> Tensor:
    """Return the task loss, or 0 with zero gradients if no label of the micro-batch counts (its mean would be 0/0).

    Labels are class indices (-100: ignored) or floats (NaN: none). With other labels the loss does not change. In a
    causal model the first label of each sequence is not predicted. The loss's own gradients must be finite, as those of
    cross-entropy are.

    Example:
        >>> labeled_part(torch.tensor(float("nan")), torch.tensor([-100, -100]), causal=False)
        tensor(0.)
    """
    if not isinstance(labels, Tensor):
        return task_loss
    counts = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
    counts = counts[:, 1:] if causal and labels.ndim == 2 else counts
    return torch.where(counts.any().to(task_loss.device), task_loss, torch.zeros_like(task_loss))


def zero_of(output: Any) -> Tensor:
    """Return 0, with zero gradients for everything a forward's output depends on, even if the output is infinite."""
    items: Iterable[Any] = [output] if isinstance(output, Tensor) else output
    items = items.values() if isinstance(items, Mapping) else items
    found = next((item for item in items if isinstance(item, Tensor) and item.requires_grad), None)
    if found is None:
        raise TrainingError("distill", "forward must return logits with gradients for a batch without labels")
    return found.flatten()[:0].sum()


def is_per_token(student: nn.Module, *, causal: bool) -> bool:
    """Return True if a model's class shows that it has logits for every token."""
    return causal or any(kind.__name__.endswith(_PER_TOKEN) for kind in type(student).__mro__)


class Examples:
    """Tracks the unlabeled examples of the next loss, and counts labeled and unlabeled examples.

    Args:
        field: Key of a batch that marks unlabeled examples; None if only the labels mark them.
    """

    NAMES = ("labeled_examples", "unlabeled_examples", "unlabeled_positions")

    def __init__(self, field: str | None) -> None:
        self._field = field
        self._unlabeled: Tensor | None = None
        self._sums: Tensor | None = None

    def check(self, student: nn.Module) -> None:
        """Raise if a field is set for a model that builds inputs from its labels."""
        if self._field and getattr(getattr(student, "config", None), "is_encoder_decoder", False):
            rule = f"unlabeled_field must be none for an encoder-decoder, whose inputs need labels, got {self._field!r}"
            raise ConfigError("distill", rule, "use texts generated by the teacher as labels")

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch without the field and labels of unlabeled examples, and remember these for the next loss."""
        prepared, self._unlabeled = split_batch(batch, self._field)
        return prepared

    def positions_ahead(self, batch: Mapping[str, Any], *, causal: bool, per_token: bool) -> Tensor:
        """Return `positions_ahead` of a batch that is not prepared yet."""
        return positions_ahead(*split_batch(batch, self._field), causal=causal, per_token=per_token)

    def take(self) -> Tensor | None:
        """Return and forget the mask of unlabeled examples of the next loss, ``(B,)`` bool, None if unknown."""
        unlabeled, self._unlabeled = self._unlabeled, None
        return unlabeled

    def check_prepared(self, unlabeled: Tensor | None) -> None:
        """Raise if the batch of a loss was not prepared."""
        if self._field and unlabeled is None:
            raise TrainingError(
                "distill",
                f"unlabeled_field {self._field!r} must be read from every micro-batch, but this one was not prepared",
                "in your own loop, call batch = session.techniques['distill'].prepare_batch(batch) before the "
                "student's forward",
            )

    def add(
        self, labels: Any, unlabeled: Tensor | None, attention_mask: Any, counted: Tensor | None, rows: Tensor
    ) -> Tensor | None:
        """Count a micro-batch; return a mask of its unlabeled examples, None if unknown.

        `unlabeled` is the mask from `split_batch`, `counted` that of rows with a soft target (None: all), `rows` their
        number.
        """
        flags = unlabeled if unlabeled is not None else _unlabeled(labels, attention_mask)
        if flags is None:
            return None
        if counted is None:
            positions = flags.sum() * rows.to(flags.device) // max(len(flags), 1)
        else:
            positions = (counted & _column(flags, counted)).sum().to(flags.device)
        sums = torch.stack([(~flags).sum(), flags.sum(), positions])
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums
        return flags

    def finish(self, model: nn.Module, context: Context) -> dict[str, str]:
        """Return a note for the receipt if the field marked no example of any process as unlabeled."""
        device = next((parameter.device for parameter in model.parameters()), "cpu")
        if not self._field or any_rank(self.state_dict().get("unlabeled_examples", 0) > 0, device):
            return {}
        text = f"{self._field} marked no example as unlabeled"
        context.services.say(f"distill: {text}; all examples were trained on their labels")
        return {"unlabeled_field": text}

    def report(self) -> dict[str, int]:
        """Return the counts if there are or could be unlabeled examples."""
        counts = self.state_dict()
        return counts if self._field or counts.get("unlabeled_examples") else {}

    def state_dict(self) -> dict[str, int]:
        """Return the counts by name; empty if nothing was counted."""
        return {} if self._sums is None else dict(zip(self.NAMES, self._sums.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from a technique's state."""
        is_saved = all(name in state for name in self.NAMES)
        self._sums = torch.tensor([int(state[name]) for name in self.NAMES]) if is_saved else None


def _unlabeled(labels: Any, attention_mask: Any) -> Tensor | None:
    if not isinstance(labels, Tensor) or not labels.ndim:
        return None
    if labels.is_floating_point():
        return labels.isnan().reshape(len(labels), -1).all(1)
    if labels.ndim == 1:
        return labels == IGNORED if _one_each(labels, attention_mask) else None
    # In a sequence, -100 means padding or prompt, even if all labels are -100.
    return torch.zeros(len(labels), dtype=torch.bool, device=labels.device)


def _one_each(labels: Tensor, attention_mask: Any) -> bool:
    """Return True if there is one label per example, not a flattened batch of sequences."""
    return not isinstance(attention_mask, Tensor) or attention_mask.ndim == 0 or len(attention_mask) == len(labels)


def _flags(values: Any, field: str, labels: Any) -> Tensor:
    flags = values if isinstance(values, Tensor) else torch.as_tensor(values)
    flags = flags.squeeze(1) if flags.ndim == 2 and flags.shape[1] == 1 else flags
    wrong = ""
    if flags.is_floating_point() or flags.is_complex() or tuple(flags.shape) != tuple(labels.shape[:1]):
        wrong = f"one bool for each of {len(labels)} examples, got {flags.dtype} of shape {tuple(flags.shape)}"
    elif flags.device.type == "cpu" and flags.numel() and not 0 <= int(flags.min()) <= int(flags.max()) <= 1:
        wrong = f"bools, or 0 and 1, got {flags.tolist()}"
    if wrong:
        raise ConfigError("distill", f"unlabeled_field {field!r} must hold {wrong}")
    return flags.bool().to(labels.device)


def _taken_out(labels: Tensor, unlabeled: Tensor) -> Tensor:
    if labels.dtype in (torch.bool, torch.uint8):
        raise ConfigError(
            "distill", f"labels must be signed integers or floats so that they can be ignored, got {labels.dtype}"
        )
    return labels.masked_fill(_column(unlabeled, labels), math.nan if labels.is_floating_point() else IGNORED)


def _column(flags: Tensor, like: Tensor) -> Tensor:
    return flags.to(like.device).view(-1, *[1] * (like.ndim - 1))


def _first(batch: Mapping[str, Any]) -> Tensor:
    found = next((value for value in batch.values() if isinstance(value, Tensor) and value.ndim), None)
    if found is None:
        raise ConfigError("distill", f"a batch must hold tensors, got {', '.join(map(str, batch)) or 'nothing'}")
    return found
