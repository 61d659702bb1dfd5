"""The task loss, where its graph says that it is the cross-entropy of the student's logits: one pass then serves both.

The pass over the logits that makes the gradient of the soft term adds that of the cross-entropy, and the graph of the
task loss is not walked. Whatever else a task loss is, it keeps its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SAME_ROWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0")
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class TaskLoss:
    """A task loss, and how it is mixed with the soft term.

    ``ratio(weight, count)`` is the weight of a row's cross-entropy in the mixture over that of its divergence, if
    `weight` is the one in the task loss and `count` the number of rows with a soft term.
    """

    loss: Tensor
    ratio: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HardTerm:
    """The cross-entropy as one pass adds it to the soft term."""

    labels: Tensor
    """int64, one for each row of the logits, -1 where a row has none."""
    ratio: float
    """The weight of a row's cross-entropy over that of its divergence."""
    count: int
    """Number of rows that have a soft term; all that have a label are among them."""


def hard_term(task: TaskLoss, found: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> HardTerm | None:
    """Return the cross-entropy that a task loss is; None if rows without a soft term have labels.

    The host waits for the device once.

    Args:
        task: The loss.
        found: Labels and factor, as `cross_entropy_of` returns them.
        mask: Which rows have a soft term, None for all.
    """
    if found is None:
        return None
    labels, weight = found
    counted = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.flatten().to(labels.device)
    count, stray = counted.sum(), ((labels >= 0) & ~counted).sum()
    ratio, rows, strays = torch.stack([task.ratio(weight, count).double(), count.double(), stray.double()]).tolist()
    return HardTerm(labels, ratio, int(rows)) if 0 < ratio < float("inf") and not strays else None


def cross_entropy_of(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return labels, -1 where a row has none, and the factor of each row's cross-entropy in a loss that has no more.

    Example:
        >>> logits = torch.zeros(3, 4, requires_grad=True) * 1
        >>> loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, -100, 2])) * 3
        >>> cross_entropy_of(loss, logits)
        (tensor([ 1, -1,  2]), tensor(1.5000))
        >>> cross_entropy_of(loss + logits.sum(), logits)
    """
    node, weight = without_factors(loss)
    if (
        node is None
        or logits.grad_fn is None
        or node.name() != "NllLossBackward0"
        or node._saved_weight is not None
        or node._saved_reduction not in (_MEAN, _SUM)
    ):
        return None
    if not _is_log_softmax(node.next_functions[0][0], logits):
        return None
    if node._saved_reduction == _MEAN:
        weight = weight / node._saved_total_weight
    labels = node._saved_target
    if weight.numel() != 1 or labels.dim() != 1 or len(labels) * logits.shape[-1] != logits.numel():
        return None
    # saved without its sign
    ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
    return labels.masked_fill(labels == ignored, -1), weight.reshape(())


def without_factors(loss: Tensor) -> tuple[Any, Tensor]:
    """Return the node of a loss's graph that constants multiply, None if others see its gradient, and their product."""
    node: Any = None if loss._backward_hooks or loss.retains_grad else loss.grad_fn
    weight = torch.ones((), device=loss.device)
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        (inner, _), *others = node.next_functions
        if inner is None or any(other is not None for other, _ in others):
            return None, weight
        factor = node._saved_other.to(loss.device)
        weight, node = weight * factor if node.name() == "MulBackward0" else weight / factor, inner
    return node, weight


def _is_log_softmax(node: Any, logits: Tensor) -> bool:
    """Return whether a node is log_softmax over the last of two dimensions, of these logits and their rows in order."""
    if node is None or node.name() != "LogSoftmaxBackward0" or node._saved_dim not in (1, -1, 2**64 - 1):
        return False
    node, output = node.next_functions[0]
    while node is not None and node is not logits.grad_fn and node.name() in _SAME_ROWS:
        node, output = node.next_functions[0]
    return node is logits.grad_fn and output == logits.output_nr
