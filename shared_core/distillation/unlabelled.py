"""Examples without a label: how a batch tells them, and what the two terms of the loss count of them."""

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
    shape: tuple[int, ...], labels: Tensor | None, attention_mask: Any, *, causal: bool, unlabelled: Tensor | None
) -> Tensor | None:
    """Return which rows of logits, ``(B,)`` examples or ``(B, L)`` positions, the soft term counts; None: all of them.

    Those whose label is not -100 (None: all but padding), and of `unlabelled` examples ``(B,)`` all but padding,
    whatever their labels. An attention mask of another shape is not asked. In a causal model the logits at i answer for
    label i + 1: the last position never counts, nor does padding on the left.

    Example:
        >>> labels, told = torch.tensor([[-100, 4, -100], [7, 7, 7]]), torch.tensor([False, True])
        >>> rows_that_count((2, 3), labels, torch.tensor([[1, 1, 1], [1, 1, 0]]), causal=False, unlabelled=told)
        tensor([[False,  True, False],
                [ True,  True, False]])
    """
    if len(shape) == 1 and (labels is None or (_one_each(labels, attention_mask) and not causal)):
        return None  # labelled or not, an example has a soft target
    masked = isinstance(attention_mask, Tensor) and tuple(attention_mask.shape) == shape
    real = attention_mask != 0 if masked else None
    if labels is not None:
        counts = labels != IGNORED
        if unlabelled is not None:
            everything = torch.ones_like(counts) if real is None else real.to(counts.device)
            counts = torch.where(_column(unlabelled, counts), everything, counts)
    elif real is not None:
        counts = real
    elif causal and len(shape) == 2:
        counts = torch.ones(shape, dtype=torch.bool)
    else:
        return None
    if not causal or len(shape) != 2:
        return counts
    counts = F.pad(counts[:, 1:], (0, 1), value=False)
    # Padding before a text would predict its first token, from nothing.
    return counts if real is None else counts & (real.cumsum(1) > 0).to(counts.device)


def positions_ahead(batch: Mapping[str, Any], unlabelled: Tensor | None, *, causal: bool, per_token: bool) -> Tensor:
    """Return how many rows of a batch the soft term will count, before a model has seen it: int64 scalar."""
    labels, attention = batch.get("labels"), batch.get("attention_mask")
    if isinstance(labels, Tensor):
        # numbers and independent labels: one row for all outputs of an example
        shape = tuple(labels.shape[:-1] if labels.is_floating_point() and labels.ndim > 1 else labels.shape)
        labels = None if labels.is_floating_point() else labels
    elif per_token:
        shape = tuple((attention if isinstance(attention, Tensor) else _first(batch)).shape[:2])
    else:
        shape = (len(_first(batch)),)
    counts = rows_that_count(shape, labels, attention, causal=causal, unlabelled=unlabelled)
    return torch.tensor(math.prod(shape)) if counts is None else counts.sum()


def split_batch(batch: Mapping[str, Any], field: str | None) -> tuple[dict[str, Any], Tensor | None]:
    """Return a batch without `field`, the labels of unlabelled examples taken out, and which examples those are.

    A label taken out is -100, NaN among float labels: a loss that does not leave it out turns NaN at once. All examples
    of a batch without ``labels`` are unlabelled. Without a field nothing is told of a batch with labels (None). The
    field holds one bool, or 0 or 1, for each example; True = unlabelled.

    Example:
        >>> batch, told = split_batch({"labels": torch.tensor([3, 1]), "new": torch.tensor([0, 1])}, "new")
        >>> batch, told
        ({'labels': tensor([   3, -100])}, tensor([False,  True]))
    """
    is_mapping = isinstance(batch, Mapping)
    if not is_mapping or (field is not None and batch.get("labels") is not None and field not in batch):
        got = ", ".join(map(str, batch)) if is_mapping else f"a {type(batch).__name__}"
        remedy = "the data set or its collator drops it" if is_mapping else "let batches be dicts"
        raise ConfigError("distill", f"unlabelled_field {field!r} must be a key of every batch, got {got}", remedy)
    rest = {name: value for name, value in batch.items() if name != field}
    if rest.get("labels") is None:
        first = _first(rest)
        return rest, torch.ones(len(first), dtype=torch.bool, device=first.device)
    if field is None:
        return rest, None
    told = _flags(batch[field], field, rest["labels"])
    for name in ("labels", "shift_labels"):
        if isinstance(rest.get(name), Tensor):
            rest[name] = _taken_out(rest[name], told)
    return rest, told


def labelled_part(task_loss: Tensor, labels: Any, *, causal: bool) -> Tensor:
    """Return the task loss, or 0 with zero gradients where no label of the micro-batch counts: there a mean is 0/0.

    Labels are class indices, -100 = ignored, or floats, NaN = none; something else changes nothing. In a causal model
    the first label of each sequence is not predicted. The loss's own gradients must be finite, as cross-entropy's are.

    Example:
        >>> labelled_part(torch.tensor(float("nan")), torch.tensor([-100, -100]), causal=False)
        tensor(0.)
    """
    if not isinstance(labels, Tensor):
        return task_loss
    counts = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
    counts = counts[:, 1:] if causal and labels.ndim == 2 else counts
    return torch.where(counts.any().to(task_loss.device), task_loss, torch.zeros_like(task_loss))


def zero_of(output: Any) -> Tensor:
    """Return 0 with zero gradients for all that a forward's output depends on, be it infinite."""
    items: Iterable[Any] = [output] if isinstance(output, Tensor) else output
    items = items.values() if isinstance(items, Mapping) else items
    found = next((item for item in items if isinstance(item, Tensor) and item.requires_grad), None)
    if found is None:
        raise TrainingError("distill", "a batch without labels needs a forward that returns logits with gradients")
    return found.flatten()[:0].sum()


def is_per_token(student: nn.Module, *, causal: bool) -> bool:
    """Return True if a model has logits for every token, as far as its class tells."""
    return causal or any(kind.__name__.endswith(_PER_TOKEN) for kind in type(student).__mro__)


class Examples:
    """Which examples of the next loss are unlabelled, and how many had a label, none, and positions without.

    Args:
        field: Key of a batch that tells unlabelled examples, None where labels alone tell.
    """

    NAMES = ("labelled_examples", "unlabelled_examples", "unlabelled_positions")

    def __init__(self, field: str | None) -> None:
        self._field = field
        self._told: Tensor | None = None
        self._sums: Tensor | None = None

    def check(self, student: nn.Module) -> None:
        """Refuse a field for a model whose inputs are made of its labels."""
        if self._field and getattr(getattr(student, "config", None), "is_encoder_decoder", False):
            rule = f"unlabelled_field must be none for an encoder-decoder, which is fed its labels, got {self._field!r}"
            raise ConfigError("distill", rule, "give the teacher's texts as labels")

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch without the field and labels of unlabelled examples, which are kept for the next loss."""
        prepared, self._told = split_batch(batch, self._field)
        return prepared

    def positions_ahead(self, batch: Mapping[str, Any], *, causal: bool, per_token: bool) -> Tensor:
        """Return `positions_ahead` of a batch as it comes."""
        return positions_ahead(*split_batch(batch, self._field), causal=causal, per_token=per_token)

    def take(self) -> Tensor | None:
        """Return which examples of the next loss are unlabelled, ``(B,)`` bool, where that was told, and forget it."""
        told, self._told = self._told, None
        return told

    def check_told(self, told: Tensor | None) -> None:
        """Refuse a loss of a batch that was not prepared."""
        if self._field and told is None:
            raise TrainingError(
                "distill",
                f"unlabelled_field {self._field!r} must be told of every micro-batch, and was not",
                "in a loop of your own call batch = session.techniques['distill'].prepare_batch(batch) before the "
                "student's forward",
            )

    def add(
        self, labels: Any, told: Tensor | None, attention_mask: Any, counted: Tensor | None, rows: Tensor
    ) -> Tensor | None:
        """Count a micro-batch; return which of its examples are unlabelled, None if neither labels nor a field tell.

        `told` is that of `split_batch`, `counted` tells the rows with a soft target (None: all), `rows` their number.
        """
        flags = told if told is not None else _unlabelled(labels, attention_mask)
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
        """Return what the receipt says of a field that called no example of any process unlabelled."""
        device = next((parameter.device for parameter in model.parameters()), "cpu")
        if not self._field or any_rank(self.state_dict().get("unlabelled_examples", 0) > 0, device):
            return {}
        told = f"{self._field} called not one example unlabelled"
        context.services.say(f"distill: {told}; every one was trained on its label")
        return {"unlabelled_field": told}

    def report(self) -> dict[str, int]:
        """Return the counts, where examples are unlabelled or could be."""
        counts = self.state_dict()
        return counts if self._field or counts.get("unlabelled_examples") else {}

    def state_dict(self) -> dict[str, int]:
        """Return the counts by name; empty where nothing was told."""
        return {} if self._sums is None else dict(zip(self.NAMES, self._sums.tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts among a technique's state."""
        told = all(name in state for name in self.NAMES)
        self._sums = torch.tensor([int(state[name]) for name in self.NAMES]) if told else None


def _unlabelled(labels: Any, attention_mask: Any) -> Tensor | None:
    if not isinstance(labels, Tensor) or not labels.ndim:
        return None
    if labels.is_floating_point():
        return labels.isnan().reshape(len(labels), -1).all(1)
    if labels.ndim == 1:
        return labels == IGNORED if _one_each(labels, attention_mask) else None
    # -100 within a sequence is padding or a prompt, even where nothing else is
    return torch.zeros(len(labels), dtype=torch.bool, device=labels.device)


def _one_each(labels: Tensor, attention_mask: Any) -> bool:
    """Return True if labels are one for each example, not those of a flattened batch of sequences."""
    return not isinstance(attention_mask, Tensor) or attention_mask.ndim == 0 or len(attention_mask) == len(labels)


def _flags(values: Any, field: str, labels: Any) -> Tensor:
    told = values if isinstance(values, Tensor) else torch.as_tensor(values)
    told = told.squeeze(1) if told.ndim == 2 and told.shape[1] == 1 else told
    wrong = ""
    if told.is_floating_point() or told.is_complex() or tuple(told.shape) != tuple(labels.shape[:1]):
        wrong = f"a bool for each of {len(labels)} examples, got {told.dtype} of shape {tuple(told.shape)}"
    elif told.device.type == "cpu" and told.numel() and not 0 <= int(told.min()) <= int(told.max()) <= 1:
        wrong = f"bools, or 0 and 1, got {told.tolist()}"
    if wrong:
        raise ConfigError("distill", f"unlabelled_field {field!r} must hold {wrong}")
    return told.bool().to(labels.device)


def _taken_out(labels: Tensor, told: Tensor) -> Tensor:
    if labels.dtype in (torch.bool, torch.uint8):
        raise ConfigError("distill", f"labels must be signed integers or floats to be taken out, got {labels.dtype}")
    return labels.masked_fill(_column(told, labels), math.nan if labels.is_floating_point() else IGNORED)


def _column(flags: Tensor, like: Tensor) -> Tensor:
    return flags.to(like.device).view(-1, *[1] * (like.ndim - 1))


def _first(batch: Mapping[str, Any]) -> Tensor:
    found = next((value for value in batch.values() if isinstance(value, Tensor) and value.ndim), None)
    if found is None:
        raise ConfigError("distill", f"a batch must hold tensors, got {', '.join(map(str, batch)) or 'nothing'}")
    return found
