"""Formulas of the divergences: log-probabilities ``(..., C)`` of both sides in, one number a row out.

The terms of a class that has probability 0 are taken out before they are multiplied: 0 times an infinite log is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward_kl_rows(student: Tensor, teacher: Tensor) -> Tensor:
    """Return ``KL(teacher || student)``.

    Example:
        >>> round(forward_kl_rows(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()).item(), 4)
        0.6931
    """
    return _expected(teacher.exp(), teacher - student)


def reverse_kl_rows(student: Tensor, teacher: Tensor) -> Tensor:
    """Return ``KL(student || teacher)``."""
    return _expected(student.exp(), student - teacher)


def soft_cross_entropy_rows(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the student's cross-entropy with the teacher's probabilities as targets."""
    return _expected(teacher.exp(), -student)


def jsd_rows(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return ``beta KL(teacher || m) + (1 - beta) KL(student || m)`` with ``m = beta teacher + (1 - beta) student``."""
    if beta == 0:
        return forward_kl_rows(student, teacher)
    if beta == 1:
        return reverse_kl_rows(student, teacher)
    p_student, p_teacher = student.exp(), teacher.exp()
    # logaddexp has no gradient where both are -inf; the probabilities, which multiply these logs, are 0 there
    neither = torch.isneginf(student) & torch.isneginf(teacher)
    student, teacher = student.masked_fill(neither, 0.0), teacher.masked_fill(neither, 0.0)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _expected(p_teacher, teacher - mixture) + (1 - beta) * _expected(p_student, student - mixture)


def _expected(probabilities: Tensor, values: Tensor) -> Tensor:
    return (probabilities * values.masked_fill(probabilities == 0, 0.0)).sum(dim=-1)
