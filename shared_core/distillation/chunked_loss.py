"""Distillation with a large vocabulary, computed from hidden states and heads in chunks of rows.

Student and teacher logits exist for one chunk at a time. Their gradient goes back to hidden states and head before the
next chunk overwrites them. The buffers of a chunk, including softmax scratch, hold at most ``2 * chunk_rows * classes``
logits for chunks of 6 rows and more, plus the gradient of the head. Cross-entropy is computed from a head's input in
the same way. Inputs are checked before any work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast

import torch
import torch.nn.functional as F
from eff_kernels.distillation import DIVERGENCES as FUSED
from eff_kernels.distillation import arithmetic_dtype, tile_rows
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shared_core.distillation.chunked_autograd import (
    ChunkedDistillation,
    Head,
    HeadGradients,
    Terms,
    even_rows,
    product,
    product_dtype,
    rows_in_budget,
)
from shared_core.distillation.losses.divergences import without_ends
from shared_core.distillation.losses.softened_pair import (
    check_fraction,
    check_mask,
    check_positive,
    check_temperature,
    mean_of,
)
from shared_core.errors import ConfigError

HeadLike = nn.Module | Tensor | tuple[Tensor, Tensor | None]
"""A linear layer, its weight ``(classes, features)``, or weight and bias."""
_WHERE = "chunked_kd_loss"


def checked_terms(
    temperature: float, alpha: float, labels: Tensor | None, *, divergence: Any, beta: Any, scale_by_temperature: Any
) -> Terms:
    """Return the terms computed per row. β of 0 or 1 becomes the forward or reverse KL."""
    check_temperature(_WHERE, temperature)
    check_fraction(_WHERE, "alpha", alpha)
    check_fraction(_WHERE, "beta", beta)
    if divergence not in FUSED:
        raise ConfigError(_WHERE, f"divergence must be one of {', '.join(FUSED)}, got {divergence!r}")
    if alpha > 0 and labels is None:
        raise ConfigError(_WHERE, f"labels must be given with alpha above 0, got alpha {alpha} and no labels")
    # The kernel cannot mix at β of 0 or 1, where its logs would be infinite.
    divergence = without_ends(divergence, beta)
    factor = temperature**2 if scale_by_temperature else 1.0
    return Terms(float(temperature), factor, 1.0 - alpha, float(alpha), divergence, float(beta))


def checked_head(whose: str, hidden: Tensor, head: HeadLike, softcap: float | None) -> Head:
    """Return a head's weight, bias and product dtype, checked against its hidden states."""
    weight, bias = head if isinstance(head, tuple) else (head, None)
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        weight, bias = head.weight, head.bias
    if wrong := _wrong_head(f"{whose}_head", f"{whose}_hidden", hidden, weight, bias):
        raise ConfigError(_WHERE, wrong)
    if softcap is not None:
        check_positive(_WHERE, "softcap", softcap)
    weight = cast(Tensor, weight)
    # softcap 0 means none, because the kernels test it as a number.
    return Head(weight, bias, product_dtype(hidden, weight), weight.shape[0], softcap or 0.0)


def _wrong_head(name: str, its_input: str, hidden: Tensor, weight: Any, bias: Tensor | None) -> str:
    if isinstance(weight, nn.Module):
        remedy = "pass the weight and bias that its forward uses"
        return f"{name} must be an nn.Linear with its own forward, got {type(weight).__name__}; {remedy}"
    if hasattr(weight, "full_tensor"):
        return f"{name} must not be sharded; call between unshard() and reshard()"
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        got = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        return f"{name} must have a floating point weight (classes, features), got {got}"
    classes, features = weight.shape
    if not hidden.is_floating_point() or hidden.dim() < 1 or hidden.shape[-1] != features:
        rule = f"{its_input} must be floating point of shape (..., {features}), the features of its head"
        return f"{rule}, got {hidden.dtype} {tuple(hidden.shape)}"
    if bias is not None and tuple(bias.shape) != (classes,):
        return f"{name} must have a bias ({classes},), got {tuple(bias.shape)}"
    if hidden.device != weight.device:
        return f"{name} must be on the device of its input, {hidden.device}, got {weight.device}"
    return "" if classes else f"{name} must have at least one class, got none"


def with_same_classes(student: Head, teacher: Head, vocab_size: int | None) -> tuple[Head, Head]:
    """Return both heads, limited to the classes that count."""
    sizes = student.classes, teacher.classes
    if vocab_size is None and sizes[0] != sizes[1]:
        rule = f"teacher_head must have the student's {sizes[0]} classes, got {sizes[1]}"
        remedy = "if both use one tokenizer and only padding differs, pass the tokenizer's size as vocab_size"
        raise ConfigError(_WHERE, rule, remedy)
    if vocab_size is not None and not 0 < vocab_size <= min(sizes):
        rule = f"vocab_size must be in 1 to {min(sizes)}, the smaller of the heads' {sizes[0]} and {sizes[1]} classes"
        raise ConfigError(_WHERE, f"{rule}, got {vocab_size}")
    classes = vocab_size or sizes[0]
    return replace(student, classes=classes), replace(teacher, classes=classes)


def checked_rows(
    labels: Tensor | None,
    ignore_index: int,
    mask: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    classes: int,
) -> tuple[Tensor | None, Tensor | None, int]:
    """Return flat labels (-1: no label), the indices of rows that count (None: all), and the number of labeled rows.

    Waits for the device once.
    """
    check_mask(_WHERE, mask, shape)
    kept, labeled = None if mask is None else mask.to(device).reshape(-1), 0
    if labels is not None:
        if labels.is_floating_point() or labels.dtype == torch.bool or tuple(labels.shape) != shape:
            rule = f"labels must be integers of shape {shape}, one for each row of student_hidden"
            raise ConfigError(_WHERE, f"{rule}, got {labels.dtype} of shape {tuple(labels.shape)}")
        labels = labels.to(device).reshape(-1).long()
        ignored = labels == ignore_index
        # On a GPU, out-of-range labels would read outside the buffer.
        wrong = ((labels < 0) | (labels >= classes)).logical_and_(~ignored)
        kept = ~ignored if kept is None else kept
        refused, number, labeled = torch.stack([wrong, kept, kept & ~ignored]).sum(-1).tolist()
        if refused:
            got = "{} to {}".format(*map(int, labels[~ignored].aminmax()))
            raise ConfigError(_WHERE, f"labels must be in 0 to {classes - 1} or {ignore_index}, got {got}")
        labels = labels.masked_fill(ignored, -1)
    elif kept is not None:
        number = int(kept.sum())
    # None for all rows: slices of `hidden` are views, but indexing would copy it.
    if kept is None or number == len(kept):
        return labels, None, labeled
    return labels, torch.nonzero_static(kept, size=number).squeeze(-1), labeled


def checked_chunk_rows(
    chunk_rows: int | None, budget_mib: float | None, student: Head, teacher: Head, device: torch.device
) -> int:
    """Return the rows per chunk: as given, or as many as fit into the budget."""
    if chunk_rows is not None and (isinstance(chunk_rows, bool) or chunk_rows < 1):
        raise ConfigError(_WHERE, f"chunk_rows must be at least 1, got {chunk_rows}")
    if budget_mib is not None:
        check_positive(_WHERE, "budget_mib", budget_mib)
    budget = None if budget_mib is None else int(budget_mib * 2**20)
    # Both buffers have as many rows, so the wider dtype decides.
    wider = max(student.dtype, teacher.dtype, key=lambda dtype: dtype.itemsize)
    return chunk_rows or rows_in_budget(student.classes, wider, device, budget)


class ChunkedSums(NamedTuple):
    """Sums over rows, for trainers that do their own averaging."""

    total: Tensor
    """``alpha * hard + (1 - alpha) * soft``, float32 (float64 for float64 logits). Only this has gradients."""
    rows: Tensor
    """Number of rows that count, int64."""
    soft: Tensor
    """The divergence including T², without gradients."""
    hard: Tensor
    """The cross-entropy, without gradients; 0 with alpha 0."""
    labeled: Tensor
    """Number of rows that count and have a label, int64."""


class ChunkedOptions(TypedDict, total=False):
    """The options of `chunked_kd_loss` and `chunked_kd_sum`; see `chunked_kd_loss`."""

    temperature: float
    labels: Tensor | None
    alpha: float
    ignore_index: int
    chunk_rows: int | None
    mask: Tensor | None
    divergence: str
    beta: float
    scale_by_temperature: bool
    softcap: float | tuple[float | None, float | None] | None
    vocab_size: int | None
    budget_mib: float | None


def chunked_kd_loss(
    student_hidden: Tensor,
    student_head: HeadLike,
    teacher_hidden: Tensor,
    teacher_head: HeadLike,
    **options: Unpack[ChunkedOptions],
) -> Tensor:
    r"""Return :math:`\alpha\,CE + (1 - \alpha)\,T^2\,D(teacher, student)` without computing all logits at once.

    Value and gradient equal those of `kd_loss` and cross-entropy on ``hidden @ weight.T + bias``. Gradients reach the
    student's hidden states, weight and bias if these require them. They are computed in forward, so second derivatives
    are not supported, and ``torch.no_grad`` skips this work.

    Args:
        student_hidden: ``(..., features)``, any float dtype: the input of the head.
        student_head: ``nn.Linear``, weight ``(classes, features)``, or (weight, bias). A weight tied to the embedding
            gets its gradient from both. Products are computed in autocast's dtype, or without autocast in the
            weight's; softmaxes and sums are always float32.
        teacher_hidden: ``(..., teacher_features)``, any float dtype and device; no gradient flows through it.
        teacher_head: Like `student_head`, on the device of `teacher_hidden`.
        options: See below.

    Options:
        temperature: ``T``, finite and > 0; softmaxes are float64 for T > 10 or < 0.01.
        labels: ``(...)`` integers, one per row, already shifted for a causal model. None: no cross-entropy.
        alpha: Weight of the cross-entropy in [0, 1]; above 0 it needs `labels`.
        ignore_index: The label of rows that do not count.
        chunk_rows: At most twice this many rows of logits exist at a time, including the teacher's and scratch. None:
            as many as fit into `budget_mib`.
        mask: ``(...)`` bool, True = the row counts, and its cross-entropy too if it has a label. None: all rows count,
            or with `labels` all labeled ones.
        divergence: ``"forward_kl"``, ``"reverse_kl"`` or ``"jsd"``.
        beta: β of ``"jsd"`` in [0, 1]: 0 is the forward KL, 1 the reverse.
        scale_by_temperature: Multiply the divergence by T².
        softcap: c > 0 if logits are ``c tanh(z / c)``: one for both heads, or (student's, teacher's). None: no cap.
        vocab_size: Number of classes that count, for heads padded to different sizes. None: all, and sizes are equal.
        budget_mib: MiB of logits that may exist at a time; None: 64 on CPU, 512 elsewhere.

    Returns:
        Scalar, float32 (float64 if the logits are). The divergence is averaged over the rows that count, the
        cross-entropy over the labeled ones among them. 0 with zero gradients if there are none. Other rows are never
        read.

    Raises:
        ConfigError: If a shape, vocabulary size, dtype or option does not match the above.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2; gradients in forward: Hsu et al. (Liger Kernel), 2024,
    arXiv:2410.10989.

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.zeros(3, 2, requires_grad=True)
        >>> loss = chunked_kd_loss(hidden, weight, hidden, torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
        >>> loss.backward()
        >>> round(loss.item(), 4), weight.grad[:, 0]
        (0.4931, tensor([-0.4856,  0.2428,  0.2428]))
    """
    sums: ChunkedSums = _sums(student_hidden, student_head, teacher_hidden, teacher_head, reduction="mean", **options)
    return mean_of(sums.total, sums.rows)


def chunked_kd_sum(
    student_hidden: Tensor,
    student_head: HeadLike,
    teacher_hidden: Tensor,
    teacher_head: HeadLike,
    **options: Unpack[ChunkedOptions],
) -> ChunkedSums:
    """Return the sums behind `chunked_kd_loss`, and the number of rows.

    ``total / rows`` equals that loss if all rows that count have labels. If a `mask` includes unlabeled rows, the two
    means have different denominators: choose ``alpha`` accordingly.

    Args: Same as `chunked_kd_loss`.

    Example:
        >>> hidden, weight = torch.ones(3, 1), torch.tensor([[0.0], [1.0]])
        >>> sums = chunked_kd_sum(hidden, weight, hidden, weight, labels=torch.tensor([0, 1, -100]), alpha=1.0)
        >>> round(sums.total.item(), 4), sums.rows.item(), sums.soft.item()
        (1.6265, 2, 0.0)
    """
    sums: ChunkedSums = _sums(student_hidden, student_head, teacher_hidden, teacher_head, reduction="sum", **options)
    return sums


@torch.compiler.disable  # type: ignore[untyped-decorator]  # chunk shapes depend on how many rows count
def _sums(
    student_hidden: Tensor,
    student_head: HeadLike,
    teacher_hidden: Tensor,
    teacher_head: HeadLike,
    *,
    reduction: Literal["mean", "sum"],
    temperature: float = 2.0,
    labels: Tensor | None = None,
    alpha: float = 0.0,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
    mask: Tensor | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    scale_by_temperature: bool = True,
    softcap: float | tuple[float | None, float | None] | None = None,
    vocab_size: int | None = None,
    budget_mib: float | None = None,
) -> ChunkedSums:
    terms = checked_terms(
        temperature, alpha, labels, divergence=divergence, beta=beta, scale_by_temperature=scale_by_temperature
    )
    caps = softcap if isinstance(softcap, tuple) else (softcap, softcap)
    student = checked_head("student", student_hidden, student_head, caps[0])
    teacher = checked_head("teacher", teacher_hidden, teacher_head, caps[1])
    student, teacher = with_same_classes(student, teacher, vocab_size)
    shape = tuple(student_hidden.shape[:-1])
    if shape != tuple(teacher_hidden.shape[:-1]):
        got = tuple(teacher_hidden.shape[:-1])
        raise ConfigError(_WHERE, f"teacher_hidden must have the rows of student_hidden, {shape}, got {got}")
    labels, rows, labeled = checked_rows(labels, ignore_index, mask, shape, student_hidden.device, student.classes)
    chunk_rows = checked_chunk_rows(chunk_rows, budget_mib, student, teacher, student_hidden.device)
    count = student_hidden.shape[:-1].numel() if rows is None else rows.numel()
    if reduction == "mean" and labeled:
        # Both sums are divided by `count` at the end, but the hard one needs `labeled` as its divisor.
        terms = replace(terms, hard_weight=terms.hard_weight * count / labeled)
    inputs: list[Tensor | None] = [student_hidden.reshape(-1, student_hidden.shape[-1]), student.weight, student.bias]
    if not torch.is_grad_enabled():
        # With detached inputs needs_input_grad is False, so forward computes no gradients.
        inputs = [None if value is None else value.detach() for value in inputs]
    theirs = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
    arguments = terms, theirs, student, teacher, labels, rows, chunk_rows
    total, soft, hard = ChunkedDistillation.apply(*inputs, *arguments)  # type: ignore[no-untyped-call]
    # Created on the device: copying would make the host wait.
    counts = [torch.full((), number, dtype=torch.int64, device=student_hidden.device) for number in (count, labeled)]
    return ChunkedSums(total, counts[0], soft, hard, counts[1])


@dataclass(frozen=True)
class CrossEntropyTerms:
    """Further arguments of torch's cross-entropy besides logits and targets."""

    class_weight: Tensor | None = None
    label_smoothing: float = 0.0


def chunked_cross_entropy_rows(
    hidden: Tensor, head: Head, targets: Tensor, terms: CrossEntropyTerms, chunk_rows: int
) -> Tensor:
    """Return ``cross_entropy(logits, targets, reduction="none")`` from a head's input, ``(rows,)``.

    Backward computes the chunks again. So the head's gradient exists only from then on, and never if the loss is only
    read. At most `chunk_rows` rows of logits exist at a time, plus scratch for a sixteenth of them.
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
        # Only inputs are saved: backward computes the logits again.
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.arguments = head, terms, chunk_rows
        losses = torch.empty(len(hidden), dtype=arithmetic_dtype(head.dtype, 1.0), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for here, logits, _ in _chunks(hidden.detach(), head.used, chunk_rows):
                for tile in _tiles(logits):
                    # float32 copies exist for one tile of rows only
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
        # With several chunks the weight's gradient is summed in float32.
        several = len(hidden) > chunk_rows
        gradients = HeadGradients(hidden, head, ctx.needs_input_grad[:3], hidden.dtype, several=several)
        with torch.autocast(hidden.device.type, enabled=False):
            used = head.used
            for here, logits, inputs in _chunks(hidden, used, chunk_rows):
                for tile in _tiles(logits):
                    _to_gradient_(logits[tile], targets[here][tile], grad_losses[here][tile], head.softcap, terms)
                # logits now hold their own gradient, until the next chunk overwrites them.
                gradients.add(here, logits, inputs, used[0])
        found = zip((hidden, weight, bias), gradients.values(), strict=True)
        # The sums may have a wider dtype than the inputs, but autograd needs each gradient in its input's dtype.
        return (*(None if grad is None else grad.to(like.dtype) for like, grad in found), *[None] * 4)


def _chunks(
    hidden: Tensor, used: tuple[Tensor, Tensor | None], chunk_rows: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of rows, their logits in a buffer that is reused, and their inputs."""
    count, (weight, bias) = len(hidden), used
    size = even_rows(count, chunk_rows)
    # (size, classes) in the product's dtype. The caller must finish with it before asking for the next chunk.
    buffer = torch.empty(size, len(weight), dtype=weight.dtype, device=hidden.device)
    for first in range(0, count, size):
        here = slice(first, min(first + size, count))
        inputs = hidden[here].to(weight.dtype)
        logits = buffer[: len(inputs)]
        product(inputs, weight, bias, logits)
        yield here, logits, inputs


def _tiles(logits: Tensor) -> Iterator[slice]:
    # Softmax needs float32 copies of half logits. A tile is the part of a chunk that is copied at a time.
    size = tile_rows(len(logits), logits.shape[1], arithmetic_dtype(logits.dtype, 1.0), logits.device)
    return (slice(first, first + size) for first in range(0, len(logits), size))


def _to_gradient_(
    logits: Tensor, targets: Tensor, grad_losses: Tensor, softcap: float, terms: CrossEntropyTerms
) -> None:
    """Overwrite the logits with their gradient: ``g ((1-ε) w_y + ε/C Σw) p - g ((1-ε) w_y onehot + ε/C w)``."""
    dtype = grad_losses.dtype
    capped = _capped(logits.to(dtype), softcap)
    grad, spread = torch.softmax(capped, -1), terms.label_smoothing / logits.shape[-1]
    weight = _in(terms.class_weight, grad_losses)
    # L_i = (1-ε) w_y (-log p_y) + ε/C Σ_c w_c (-log p_c): p gets the sum of these weights, each class its own.
    of_target = 1.0 - terms.label_smoothing if weight is None else weight[targets] * (1.0 - terms.label_smoothing)
    total = logits.shape[-1] if weight is None else weight.sum()
    grad.mul_((grad_losses * (of_target + spread * total))[:, None])
    if spread:
        grad.sub_((grad_losses * spread)[:, None] * (1.0 if weight is None else weight))
    # Flat, because torch 2.13 has no deterministic CUDA kernel for two dimensions.
    starts = torch.arange(0, grad.numel(), grad.shape[-1], device=grad.device)
    grad.view(-1).scatter_add_(0, targets + starts, -grad_losses * of_target)
    if softcap:
        # c tanh(z/c) has the derivative 1 - tanh² = 1 - (capped/c)².
        grad.mul_(1.0 - (capped / softcap).square_())
    logits.copy_(grad)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _in(weight: Tensor | None, like: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(like)
