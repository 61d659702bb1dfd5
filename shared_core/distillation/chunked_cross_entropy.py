"""Cross-entropy of a head's input, without the logits of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels.distillation import arithmetic_dtype, tile_rows
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared_core.distillation.chunked_autograd import Head, WeightGradient, even_rows, product, scaled_product


@dataclass(frozen=True)
class CrossEntropyTerms:
    """What torch's cross-entropy takes beside logits and targets."""

    class_weight: Tensor | None = None
    label_smoothing: float = 0.0


def chunked_cross_entropy_rows(
    hidden: Tensor, head: Head, targets: Tensor, terms: CrossEntropyTerms, chunk_rows: int
) -> Tensor:
    """Return ``cross_entropy(logits, targets, reduction="none")`` of the logits that a head would give.

    Chunks are computed again in backward, so that no gradient of the head exists before it, and none at all where the
    loss is only looked at.

    Args:
        hidden: ``(rows, features)``, any float dtype.
        head: Its weight and bias get gradients.
        targets: int64 ``(rows,)``, the class of each.
        terms: Weights of classes and label smoothing.
        chunk_rows: At most so many rows of logits exist at a time, and scratch for a sixteenth of them.

    Returns:
        ``(rows,)``, float32 (float64 if the logits are).

    Example:
        >>> weight = torch.zeros(4, 2)
        >>> head = Head(weight, None, weight.dtype, 4, 0.0)
        >>> chunked_cross_entropy_rows(torch.ones(1, 2), head, torch.tensor([3]), CrossEntropyTerms(), 8)
        tensor([1.3863])
    """
    rows: Tensor = _CrossEntropyRows.apply(hidden, head.weight, head.bias, targets, head, terms, chunk_rows)  # type: ignore[no-untyped-call]
    return rows


class _CrossEntropyRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        terms: CrossEntropyTerms,
        chunk_rows: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.arguments = head, terms, chunk_rows
        losses = torch.empty(len(hidden), dtype=arithmetic_dtype(head.dtype, 1.0), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for here, logits, _ in _chunks(hidden.detach(), head.used, chunk_rows):
                for tile in _tiles(logits):
                    losses[here][tile] = F.cross_entropy(
                        _capped(logits[tile].to(losses.dtype), head.softcap), targets[here][tile],
                        _in(terms.class_weight, losses), reduction="none", label_smoothing=terms.label_smoothing,
                    )  # fmt: skip
        return losses

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head, terms, chunk_rows = ctx.arguments
        by_hidden, by_weight, by_bias, *_ = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if by_hidden else None
        several = len(hidden) > chunk_rows
        weight_grad = WeightGradient(weight, len(weight), several) if by_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32)) if by_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            used = head.used
            for here, logits, inputs in _chunks(hidden, used, chunk_rows):
                for tile in _tiles(logits):
                    _to_gradient_(logits[tile], targets[here][tile], grad_losses[here][tile], head.softcap, terms)
                if hidden_grad is not None:
                    hidden_grad[here] = scaled_product(logits, used[0], 1.0)
                if weight_grad is not None:
                    weight_grad.add(logits, inputs, 1.0)
                if bias_grad is not None:
                    bias_grad += logits.sum(0, dtype=bias_grad.dtype)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.value().to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            *[None] * 4,
        )


def _chunks(
    hidden: Tensor, used: tuple[Tensor, Tensor | None], chunk_rows: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of rows, their logits in a buffer that the next ones take, and their inputs."""
    count, (weight, bias) = len(hidden), used
    size = even_rows(count, chunk_rows)
    buffer = torch.empty(size, len(weight), dtype=weight.dtype, device=hidden.device)
    for first in range(0, count, size):
        here = slice(first, min(first + size, count))
        inputs = hidden[here].to(weight.dtype)
        logits = buffer[: len(inputs)]
        product(inputs, weight, bias, logits)
        yield here, logits, inputs


def _tiles(logits: Tensor) -> Iterator[slice]:
    size = tile_rows(len(logits), logits.shape[1], arithmetic_dtype(logits.dtype, 1.0), logits.device)
    return (slice(first, first + size) for first in range(0, len(logits), size))


def _to_gradient_(
    logits: Tensor, targets: Tensor, grad_losses: Tensor, softcap: float, terms: CrossEntropyTerms
) -> None:
    """Put the gradient by logits in their place: ``g ((1-ε) w_y + ε/C Σw) p - g ((1-ε) w_y onehot + ε/C w)``."""
    dtype = grad_losses.dtype
    capped = _capped(logits.to(dtype), softcap)
    grad, spread = torch.softmax(capped, -1), terms.label_smoothing / logits.shape[-1]
    weight = _in(terms.class_weight, grad_losses)
    of_target = 1.0 - terms.label_smoothing if weight is None else weight[targets] * (1.0 - terms.label_smoothing)
    total = logits.shape[-1] if weight is None else weight.sum()
    grad.mul_((grad_losses * (of_target + spread * total))[:, None])
    if spread:
        grad.sub_((grad_losses * spread)[:, None] * (1.0 if weight is None else weight))
    # flat: in two dimensions torch knows no deterministic kernel on CUDA (torch 2.13)
    starts = torch.arange(0, grad.numel(), grad.shape[-1], device=grad.device)
    grad.view(-1).scatter_add_(0, targets + starts, -grad_losses * of_target)
    if softcap:
        grad.mul_(1.0 - (capped / softcap).square_())
    logits.copy_(grad)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _in(weight: Tensor | None, like: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(like)
