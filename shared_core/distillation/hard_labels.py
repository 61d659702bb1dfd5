"""Hard labels from a teacher: its most probable class, where it is confident."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.distillation.softened_pair import check_fraction, mean_of, soften


def hard_label_sum(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    threshold: float = 0.0,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `hard_label_loss` over rows that count and are confident, and their number.

    Args:
        student_logits: ``(..., C)``, any float dtype.
        teacher_logits: ``(..., C)``, any float dtype and device.
        threshold: Least probability, in [0, 1], of the teacher's first class for a row to count.
        temperature: Not used, nor is `scale_by_temperature`: hard labels are not softened.
        mask: ``(...)`` bool, True = the row counts.
        teacher_log_probs: In place of `teacher_logits`; the threshold then applies to these probabilities.
        scale_by_temperature: Not used.

    Returns:
        The sum (float32, or float64 if the student's logits are) and the count (int64), both scalars.

    Raises:
        ConfigError: If shapes, dtypes or the threshold are not as above.

    Example:
        >>> teacher = torch.tensor([[3.0, 0.0], [0.1, 0.0]])
        >>> total, count = hard_label_sum(torch.zeros(2, 2), teacher, threshold=0.9)
        >>> round(total.item(), 4), count.item()
        (0.6931, 1)
    """
    check_fraction("hard_label_loss", "threshold", threshold)
    pair = soften(
        "hard_label_loss",
        student_logits,
        teacher_logits,
        teacher_log_probs,
        temperature=1.0,
        mask=mask,
        scale_by_temperature=False,
    )
    classes = student_logits.shape[-1]
    student, teacher = pair.student.reshape(-1, classes), pair.teacher.reshape(-1, classes)
    if threshold > 0:
        # the slack is log_softmax's rounding: a probability of exactly the threshold counts
        sure = teacher.amax(-1) >= math.log(threshold) - 1e-6
        student, teacher = student[sure], teacher[sure]
    count = torch.full((), len(student), dtype=torch.int64, device=student.device)
    return F.nll_loss(student, teacher.argmax(-1), reduction="sum").to(pair.out_dtype), count


def hard_label_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    threshold: float = 0.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy with the teacher's most probable class, averaged over rows that count.

    Args, Returns, Raises: As of `hard_label_sum`, the mean in place of the sum; 0.0 if no row is confident.

    Source: Lee (pseudo-label), 2013; the threshold: Sohn et al. (FixMatch), 2020, arXiv:2001.07685, equation 4.

    Example:
        >>> round(hard_label_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0]])).item(), 4)
        1.3133
    """
    return mean_of(
        *hard_label_sum(
            student_logits, teacher_logits, threshold=threshold, mask=mask, teacher_log_probs=teacher_log_probs
        )
    )
