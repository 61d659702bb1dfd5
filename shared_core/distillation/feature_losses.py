"""Losses of what lies inside the models: hidden states and attention maps."""

from __future__ import annotations

import torch
from torch import Tensor

from shared_core.distillation.softened_pair import check_mask, compute_dtype, counted_rows, mean_of
from shared_core.errors import ConfigError

_NAMES = ("student_hidden", "teacher_hidden")


def hidden_mse_sum(
    student_hidden: Tensor, teacher_hidden: Tensor, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of `hidden_mse` over counted positions, and their number; arguments as of `hidden_mse`.

    Example:
        >>> total, count = hidden_mse_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3))
        >>> total.item(), count.item()
        (6.0, 3)
    """
    student, teacher, count = _hidden("hidden_mse", student_hidden, teacher_hidden, mask)
    return hidden_mse_each(student, teacher).sum(), count


def hidden_mse_each(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Return `hidden_mse` of every position ``(..., D)`` by itself, ``(...)``, float32 at least."""
    dtype = compute_dtype(student_hidden.dtype)
    return (student_hidden.to(dtype) - teacher_hidden.to(dtype)).square().mean(-1)


def hidden_mse(student_hidden: Tensor, teacher_hidden: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the mean squared difference of hidden states, averaged over the width and the counted positions.

    Args:
        student_hidden: ``(..., D)``, any float dtype; where the widths differ, what `Projection` made of it.
        teacher_hidden: ``(..., D)``, any float dtype and device. No gradient flows through it.
        mask: ``(...)`` bool, True = the position counts (not padding). None counts all.

    Returns:
        Scalar, float32 (float64 for float64 states); 0.0 with zero gradients if no position counts.

    Raises:
        ConfigError: If shapes or dtypes are not as above.

    Source: Romero et al. (FitNets), 2014, arXiv:1412.6550, equation 3 (half the sum over the width in place of the
    mean); Jiao et al. (TinyBERT), 2019, arXiv:1909.10351, equation 8.

    Example:
        >>> hidden_mse(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.0]])).item()
        2.0
    """
    return mean_of(*hidden_mse_sum(student_hidden, teacher_hidden, mask=mask))


def hidden_cosine_sum(
    student_hidden: Tensor, teacher_hidden: Tensor, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of `hidden_cosine` over counted positions, and their number; arguments as of `hidden_cosine`.

    Example:
        >>> total, count = hidden_cosine_sum(torch.tensor([[0.0, 1.0]] * 3), torch.tensor([[2.0, 0.0]] * 3))
        >>> total.item(), count.item()
        (3.0, 3)
    """
    student, teacher, count = _hidden("hidden_cosine", student_hidden, teacher_hidden, mask)
    return hidden_cosine_each(student, teacher).sum(), count


def hidden_cosine_each(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Return `hidden_cosine` of every position ``(..., D)`` by itself, ``(...)``, float32 at least."""
    dtype = compute_dtype(student_hidden.dtype)
    return 1 - (unit_rows(student_hidden.to(dtype)) * unit_rows(teacher_hidden.to(dtype))).sum(-1)


def hidden_cosine(student_hidden: Tensor, teacher_hidden: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return 1 - the cosine between hidden states, averaged over the counted positions.

    Args:
        student_hidden: ``(..., D)``, any float dtype; a state of zeros has cosine 0 and no gradient.
        teacher_hidden: ``(..., D)``, any float dtype and device. No gradient flows through it.
        mask: ``(...)`` bool, True = the position counts (not padding). None counts all.

    Returns:
        Scalar in [0, 2], float32 (float64 for float64 states); 0.0 with zero gradients if no position counts.

    Raises:
        ConfigError: If shapes or dtypes are not as above.

    Source: Sanh et al. (DistilBERT), 2019, arXiv:1910.01108, section 3.

    Example:
        >>> round(hidden_cosine(torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 4.0]])).item(), 4)
        0.2
    """
    return mean_of(*hidden_cosine_sum(student_hidden, teacher_hidden, mask=mask))


def attention_kl_sum(
    student_attentions: Tensor,
    teacher_attentions: Tensor,
    *,
    mask: Tensor | None = None,
    average_heads: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `attention_kl` over counted query positions, and their number; arguments as there.

    Example:
        >>> student, teacher = torch.full((1, 2, 3, 2), 0.5), torch.tensor([0.75, 0.25]).expand(1, 2, 3, 2)
        >>> total, count = attention_kl_sum(student, teacher)
        >>> round(total.item(), 4), count.item()
        (0.3924, 3)
    """
    _check_attentions(student_attentions, teacher_attentions, mask, average_heads)
    teacher_attentions = teacher_attentions.detach().to(student_attentions.device)
    if mask is not None:
        # rows first: a mask takes query positions out, whatever their heads hold
        rows = mask.to(student_attentions.device)
        student_attentions, teacher_attentions = (
            each.transpose(1, 2)[rows].unsqueeze(2) for each in (student_attentions, teacher_attentions)
        )
    each = attention_kl_each(student_attentions, teacher_attentions, average_heads=average_heads)
    return each.sum(), torch.full((), each.numel(), dtype=torch.int64, device=each.device)


def attention_kl_each(student_attentions: Tensor, teacher_attentions: Tensor, *, average_heads: bool = False) -> Tensor:
    """Return `attention_kl` of every query ``(B, Q)`` by itself, float32 at least; arguments as there."""
    # torch's half-precision softmax rounds small probabilities to 0; below the floor nothing is asked of the student.
    # It also bounds the gradient 1 / p by what the dtype can hold.
    floor = torch.finfo(torch.float16).tiny if student_attentions.dtype == torch.float16 else 1e-8
    dtype = compute_dtype(student_attentions.dtype)
    student, teacher = student_attentions.to(dtype), teacher_attentions.to(dtype)
    if average_heads:
        student, teacher = student.mean(1, keepdim=True), teacher.mean(1, keepdim=True)
    ratio = teacher.clamp(min=floor).log() - student.clamp(min=floor).log()
    return (teacher * ratio).sum(-1).mean(1)


def attention_kl(
    student_attentions: Tensor,
    teacher_attentions: Tensor,
    *,
    mask: Tensor | None = None,
    average_heads: bool = False,
) -> Tensor:
    """Return ``KL(teacher || student)`` of attention maps, averaged over heads and counted query positions.

    Args:
        student_attentions: ``(B, H, Q, K)`` probabilities over K, any float dtype. Those below 1e-8 (float16: 6e-5)
            count as that.
        teacher_attentions: ``(B, H, Q, K)``, any float dtype and device. No gradient flows through it.
        mask: ``(B, Q)`` bool, True = the query counts: the attention mask. Keys that it hides have probability 0 on
            both sides and add nothing. None counts all.
        average_heads: Average both maps over their heads first, so that the numbers of heads may differ. Otherwise
            head h is compared with head h and different numbers are refused.

    Returns:
        Scalar, float32 (float64 for float64 maps); 0.0 with zero gradients if no query counts.

    Raises:
        ConfigError: If shapes or dtypes are not as above.

    Source: Wang et al. (MiniLM), 2020, arXiv:2002.10957, equation 5.

    Example:
        >>> student, teacher = torch.full((1, 2, 3, 2), 0.5), torch.tensor([0.75, 0.25]).expand(1, 2, 3, 2)
        >>> round(attention_kl(student, teacher).item(), 4)
        0.1308
    """
    return mean_of(*attention_kl_sum(student_attentions, teacher_attentions, mask=mask, average_heads=average_heads))


def unit_rows(rows: Tensor) -> Tensor:
    """Return each row (last dimension) divided by its L2 norm; a row of zeros stays 0 and has no gradient.

    Example:
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    if not rows.numel():
        return rows
    # by the largest entry first, so that squares neither overflow nor vanish; the quotient does not depend on it
    rows = rows / positive_or_one(rows.detach().abs().amax(-1, keepdim=True))
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return (rows / positive_or_one(norms)).masked_fill(norms == 0, 0.0)


def positive_or_one(values: Tensor) -> Tensor:
    """Return the values with 1 for 0: what a norm that may be 0 is divided by."""
    return values.masked_fill(values == 0, 1.0)


def _hidden(where: str, student: Tensor, teacher: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if student.ndim and teacher.ndim and student.shape[-1] != teacher.shape[-1]:
        raise ConfigError(
            f"{where}: teacher_hidden must be as wide as student_hidden, {student.shape[-1]}, got "
            f"{teacher.shape[-1]}; map the student's with a Projection"
        )
    student, teacher, count = counted_rows(where, student, teacher, mask, names=_NAMES)
    dtype = compute_dtype(student.dtype)
    return student.to(dtype), teacher.to(dtype), count


def _check_attentions(student: Tensor, teacher: Tensor, mask: Tensor | None, average_heads: bool) -> None:
    ours, theirs = tuple(student.shape), tuple(teacher.shape)
    if len(ours) != 4 or len(theirs) != 4 or (ours[0], *ours[2:]) != (theirs[0], *theirs[2:]):
        raise ConfigError(
            f"attention_kl: teacher_attentions must have the batch, queries and keys of student_attentions "
            f"(B, H, Q, K), {ours}, got {theirs}"
        )
    if ours[1] != theirs[1] and not average_heads:
        raise ConfigError(
            f"attention_kl: teacher_attentions must have the student's {ours[1]} heads, got {theirs[1]}; "
            "set average_heads to compare the means over heads"
        )
    for name, value in (("student_attentions", student), ("teacher_attentions", teacher)):
        if not value.is_floating_point():
            raise ConfigError(f"attention_kl: {name} must be floating point, got {value.dtype}")
    check_mask("attention_kl", mask, (ours[0], ours[2]))
