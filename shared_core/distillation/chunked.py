"""Distillation at a large vocabulary: from hidden states and heads, without the logits of all rows.

The student's and the teacher's logits exist for a chunk of rows at a time, and their gradient is taken back to hidden
states and head before the next chunk takes their place. The buffers of a chunk, with what softmaxes need beside them,
hold at most ``2 * chunk_rows * classes`` logits for chunks of 6 rows and more; the gradient of the head is apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_core.distillation.chunked_autograd import ChunkedDistillation, Terms
from shared_core.distillation.chunked_inputs import (
    HeadLike,
    checked_chunk_rows,
    checked_head,
    checked_rows,
    checked_terms,
    with_same_classes,
)
from shared_core.errors import ConfigError


class ChunkedSums(NamedTuple):
    """Sums over rows, for a trainer that averages by itself."""

    total: Tensor
    """``alpha * hard + (1 - alpha) * soft``, float32 (float64 for float64 logits); the one with gradients."""
    rows: Tensor
    """int64, the rows that count."""
    soft: Tensor
    """The divergence with its T², without gradients."""
    hard: Tensor
    """The cross-entropy, without gradients; 0 with alpha 0."""
    labelled: Tensor
    """int64, those of them that have a label."""


def chunked_kd_loss(
    student_hidden: Tensor,
    student_head: HeadLike,
    teacher_hidden: Tensor,
    teacher_head: HeadLike,
    *,
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
) -> Tensor:
    r"""Return :math:`\alpha\,CE + (1 - \alpha)\,T^2\,D(teacher, student)` of the logits that two heads would give.

    The same as `kd_loss` and cross-entropy of ``hidden @ weight.T + bias``, in value and gradient, without those
    logits. Gradients reach the student's hidden states, weight and bias, each if it requires one; they are computed in
    forward, so a second derivative is refused, and ``torch.no_grad`` saves their time.

    Args:
        student_hidden: ``(..., features)``, any float dtype: the input of the head.
        student_head: ``nn.Linear``, weight ``(classes, features)``, or (weight, bias). A weight tied to the embedding
            gets its gradient from both. Under autocast products are computed in autocast's type, otherwise in the
            weight's; softmaxes and sums are float32 always.
        teacher_hidden: ``(..., teacher_features)``, any float dtype and device; no gradient flows through it.
        teacher_head: Like `student_head`, on the device of `teacher_hidden`.
        temperature: ``T``, finite and > 0; softmaxes are float64 for T > 10 or < 0.01.
        labels: ``(...)`` integers, one a row, already shifted in a causal model. None: no cross-entropy.
        alpha: Weight of the cross-entropy in [0, 1]; above 0 it needs `labels`.
        ignore_index: The label of rows that do not count.
        chunk_rows: At most twice as many rows of logits exist at a time, the student's, the teacher's and scratch
            together; None: as many as `budget_mib` holds.
        mask: ``(...)`` bool, True = the row counts, and its cross-entropy if it is labelled. None: all rows count, or
            all that are labelled where `labels` are given.
        divergence: ``"forward_kl"``, ``"reverse_kl"`` or ``"jsd"``.
        beta: β of ``"jsd"`` in [0, 1]: 0 is the forward KL, 1 the reverse.
        scale_by_temperature: Multiply the divergence by T².
        softcap: c > 0 where logits are ``c tanh(z / c)``, of both heads, or (student's, teacher's); None: they are not.
        vocab_size: Classes that count, of heads padded to different sizes; None: all, and both heads have as many.
        budget_mib: MiB of logits that may exist at a time; None: 64 on CPU, 512 elsewhere.

    Returns:
        Scalar, float32 (float64 if the logits are). The divergence is averaged over rows that count, the cross-entropy
        over labelled ones among them; 0 with zero gradients if there are none. Rows that do not count are never read.

    Raises:
        ConfigError: If shapes, sizes of the vocabulary, dtypes or options are not as above.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2; gradients in forward: Hsu et al. (Liger Kernel), 2024,
    arXiv:2410.10989.

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.zeros(3, 2, requires_grad=True)
        >>> loss = chunked_kd_loss(hidden, weight, hidden, torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
        >>> loss.backward()
        >>> round(loss.item(), 4), weight.grad[:, 0]
        (0.4931, tensor([-0.4856,  0.2428,  0.2428]))
    """
    options = {"divergence": divergence, "beta": beta, "scale_by_temperature": scale_by_temperature}
    sums: ChunkedSums = _sums(
        (student_hidden, student_head, teacher_hidden, teacher_head),
        (labels, ignore_index, mask),
        checked_terms(temperature, alpha, labels, **options),
        (chunk_rows, budget_mib, softcap, vocab_size),
        mean=True,
    )
    return sums.total / sums.rows.clamp(min=1)


def chunked_kd_sum(
    student_hidden: Tensor,
    student_head: HeadLike,
    teacher_hidden: Tensor,
    teacher_head: HeadLike,
    *,
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
    """Return the sums of `chunked_kd_loss` over rows, and how many there are.

    ``total / rows`` is that loss where all rows that count are labelled. Where a `mask` lets unlabelled rows count,
    the two means have different denominators: give ``alpha`` accordingly.

    Args: As of `chunked_kd_loss`.

    Example:
        >>> hidden, weight = torch.ones(3, 1), torch.tensor([[0.0], [1.0]])
        >>> sums = chunked_kd_sum(hidden, weight, hidden, weight, labels=torch.tensor([0, 1, -100]), alpha=1.0)
        >>> round(sums.total.item(), 4), sums.rows.item(), sums.soft.item()
        (1.6265, 2, 0.0)
    """
    options = {"divergence": divergence, "beta": beta, "scale_by_temperature": scale_by_temperature}
    sums: ChunkedSums = _sums(
        (student_hidden, student_head, teacher_hidden, teacher_head),
        (labels, ignore_index, mask),
        checked_terms(temperature, alpha, labels, **options),
        (chunk_rows, budget_mib, softcap, vocab_size),
        mean=False,
    )
    return sums


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the shape of chunks follows from how many rows count
def _sums(
    pair: tuple[Tensor, HeadLike, Tensor, HeadLike],
    which: tuple[Tensor | None, int, Tensor | None],
    terms: Terms,
    limits: tuple[int | None, float | None, Any, int | None],
    *,
    mean: bool,
) -> ChunkedSums:
    student_hidden, student_head, teacher_hidden, teacher_head = pair
    chunk_rows, budget_mib, softcap, vocab_size = limits
    caps = softcap if isinstance(softcap, tuple) else (softcap, softcap)
    student = checked_head("student", student_hidden, student_head, caps[0])
    teacher = checked_head("teacher", teacher_hidden, teacher_head, caps[1])
    student, teacher = with_same_classes(student, teacher, vocab_size)
    shape = tuple(student_hidden.shape[:-1])
    if shape != tuple(teacher_hidden.shape[:-1]):
        raise ConfigError(
            f"chunked_kd_loss: teacher_hidden must have the rows of student_hidden, {shape}, "
            f"got {tuple(teacher_hidden.shape[:-1])}"
        )
    labels, rows = checked_rows(*which, shape, student_hidden.device, student.classes)
    chunk_rows = checked_chunk_rows(chunk_rows, budget_mib, student, teacher, student_hidden.device)
    count = student_hidden.shape[:-1].numel() if rows is None else rows.numel()
    labelled = 0 if labels is None else int((labels if rows is None else labels[rows]).ge(0).sum())
    if mean and labelled:
        terms = replace(terms, hard_weight=terms.hard_weight * count / labelled)
    inputs: list[Tensor | None] = [student_hidden.reshape(-1, student_hidden.shape[-1]), student.weight, student.bias]
    if not torch.is_grad_enabled():
        # a function's context does not tell that no gradient will be asked for
        inputs = [None if value is None else value.detach() for value in inputs]
    arguments = (
        teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]),
        student,
        teacher,
        labels,
        rows,
        terms,
        chunk_rows,
    )
    total, soft, hard = ChunkedDistillation.apply(*inputs, *arguments)  # type: ignore[no-untyped-call]
    counts = torch.tensor([count, labelled], device=student_hidden.device)
    return ChunkedSums(total, counts[0], soft, hard, counts[1])
