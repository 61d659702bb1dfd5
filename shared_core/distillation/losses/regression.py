"""Hard labels from a teacher: its most probable class, where it is confident.

Losses of outputs that are no distribution over classes: logits as they are, labels of their own, regression. All take
and return what the others of `DIVERGENCES` do.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.distillation.losses.softened_pair import (
    Options,
    check_fraction,
    check_positive,
    check_temperature,
    compute_dtype,
    counted_rows,
    rows_of_either,
    soften,
)
from shared_core.errors import ConfigError


def hard_label_sum(
    student_logits: Tensor, teacher_logits: Tensor | None = None, *, threshold: float = 0.0, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with the teacher's most probable class: its sum over confident rows, their number.

    `threshold` in [0, 1] is the least probability of the teacher's first class for a row to count; of
    `teacher_log_probs`, that in them. The temperature is not used: hard labels are not softened.

    Source: Lee (pseudo-label), 2013; the threshold: Sohn et al. (FixMatch), 2020, arXiv:2001.07685, equation 4.

    Example:
        >>> teacher = torch.tensor([[3.0, 0.0], [0.1, 0.0]])
        >>> total, count = hard_label_sum(torch.zeros(2, 2), teacher, threshold=0.9)
        >>> round(total.item(), 4), count.item()
        (0.6931, 1)
    """
    check_fraction("hard_label", "threshold", threshold)
    # T = 1 and no T²: a label has no softness, and the confidence is meant of the teacher's own probabilities.
    options |= {"temperature": 1.0, "scale_by_temperature": False}
    pair = soften("hard_label", student_logits, teacher_logits, **options)
    classes = student_logits.shape[-1]
    student, teacher = pair.student.reshape(-1, classes), pair.teacher.reshape(-1, classes)
    if threshold > 0:
        # the slack is log_softmax's rounding: a probability of exactly the threshold counts
        sure = teacher.amax(-1) >= math.log(threshold) - 1e-6
        student, teacher = student[sure], teacher[sure]
    count = torch.full((), len(student), dtype=torch.int64, device=student.device)
    return F.nll_loss(student, teacher.argmax(-1), reduction="sum").to(pair.out_dtype), count


def logit_mse_sum(
    student_logits: Tensor, teacher_logits: Tensor | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Return the squared difference of logits (or regression outputs), averaged over classes: sum and number of rows.

    Classes that both sides rule out (logit -inf) add 0. The temperature is not used: ``T² mse(s/T, t/T)`` is the same
    for every T. `teacher_log_probs` are refused.

    Source: Ba and Caruana, 2014, arXiv:1312.6184, equation 1; compared with the KL by Kim et al., 2021,
    arXiv:2105.08919. Both sum over classes, which multiplies by C.

    Example:
        >>> total, count = logit_mse_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3))
        >>> total.item(), count.item()
        (6.0, 3)
    """
    student, teacher, count = _outputs("logit_mse", student_logits, teacher_logits, **options)
    # -inf minus -inf is NaN; classes that both rule out agree.
    both_out = torch.isneginf(student) & torch.isneginf(teacher)
    return (student - teacher).masked_fill(both_out, 0.0).square().mean(-1).sum(), count


def bernoulli_kl_sum(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
    average_labels: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`T^2 \sum_l KL(Bern(\sigma(t_l / T)) \,\|\, Bern(\sigma(s_l / T)))`: sum over rows, their number.

    For binary (``L = 1``) and multi-label classifiers, whose logits ``(..., L)`` are independent: the sum over labels
    is the KL of the joint distributions. `average_labels` divides it by L, as the usual binary cross-entropy does: a
    mix of the two keeps its proportion. Logits of ±inf are allowed where both sides agree.

    Source: Hinton et al., 2015, arXiv:1503.02531, for two classes; for labels one against all: Yang et al., 2023,
    arXiv:2308.06453, section 3.2.

    Example:
        >>> total, count = bernoulli_kl_sum(torch.zeros(3, 1), torch.full((3, 1), 2.0), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.9834, 3)
    """
    check_temperature("bernoulli_kl", temperature)
    student, teacher, count = rows_of_either("bernoulli_kl", student_logits, teacher_logits, teacher_log_probs, mask)
    dtype = compute_dtype(student.dtype, temperature)
    student, teacher = student.to(dtype) / temperature, teacher.to(dtype)
    if teacher_log_probs is None:
        teacher = teacher / temperature
        log_yes, log_no = F.logsigmoid(teacher), F.logsigmoid(-teacher)
    else:
        # Log-probabilities of yes only: log(1 - p) follows from them.
        log_yes, log_no = teacher, log1m_exp(teacher)
    # p log(p/q) + (1 - p) log((1 - p)/(1 - q)), all in logs: the sigmoid rounds to 1 in float32 from 17 on.
    terms = _term(log_yes, F.logsigmoid(student)) + _term(log_no, F.logsigmoid(-student))
    rows = terms.mean(-1) if average_labels else terms.sum(-1)
    factor = temperature**2 if scale_by_temperature else 1.0
    return (factor * rows.sum()).to(compute_dtype(student_logits.dtype)), count


def huber_sum(
    student_outputs: Tensor, teacher_outputs: Tensor | None = None, *, delta: float = 1.0, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Return the Huber loss of regression outputs, averaged over outputs: its sum over counted rows, their number.

    ``d² / 2`` for ``|d| <= delta``, else ``delta (|d| - delta / 2)``: one wild output of the teacher weighs less than
    in `logit_mse_sum`. `delta`, > 0, is in units of the outputs.

    Source: Huber, 1964, Annals of Mathematical Statistics 35 (1).

    Example:
        >>> total, count = huber_sum(torch.zeros(2, 1), torch.tensor([[3.0], [0.5]]))
        >>> total.item(), count.item()
        (2.625, 2)
    """
    check_positive("huber", "delta", delta)
    student, teacher, count = _outputs("huber", student_outputs, teacher_outputs, **options)
    return F.huber_loss(student, teacher, reduction="none", delta=delta).mean(-1).sum(), count


def teacher_bounded_mse_sum(
    student_outputs: Tensor,
    teacher_outputs: Tensor | None = None,
    *,
    targets: Tensor | None = None,
    margin: float = 0.0,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    r"""Return the student's squared error where it is not yet below the teacher's: its sum over rows, their number.

    :math:`\|s - y\|^2` of rows with :math:`\|s - y\|^2 + margin > \|t - y\|^2`, 0 of the others: a teacher's output
    may be wrong without bound, so that it is a bound to beat, not a target. `targets` ``(..., D)`` are the true values,
    `margin`, >= 0, is in squared units of the outputs.

    Source: Chen et al., 2017, Learning Efficient Object Detection Models with Knowledge Distillation
    (the teacher bounded regression loss).

    Example:
        >>> student, teacher = torch.tensor([[2.0], [0.5]]), torch.tensor([[1.0], [1.0]])
        >>> total, count = teacher_bounded_mse_sum(student, teacher, targets=torch.zeros(2, 1))
        >>> total.item(), count.item()
        (4.0, 2)
    """
    where = "teacher_bounded_mse"
    check_positive(where, "margin", margin, or_zero=True)
    if targets is not None and not targets.is_floating_point():
        targets = targets.to(torch.float32)
    # Checked with the same mask first, so that both calls drop the same rows.
    _, truth, _ = counted_rows(
        where, student_outputs, targets, options.get("mask"), names=("student_outputs", "targets")
    )
    student, teacher, count = _outputs(where, student_outputs, teacher_outputs, **options)
    truth = truth.to(student.dtype)
    errors, bound = (student - truth).square().sum(-1), (teacher - truth).square().sum(-1)
    # The comparison decides which rows count and is no part of the loss, so it has no gradient.
    return errors.masked_fill(errors.detach() + margin <= bound, 0.0).sum(), count


def log1m_exp(log_probs: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for x <= 0 without losing digits at either end.

    Example:
        >>> [f"{x:.4g}" for x in log1m_exp(torch.tensor([-30.0, -0.6931472, 0.0])).tolist()]
        ['-9.358e-14', '-0.6931', '-inf']
    """
    # Mächler, 2012: log1p is exact for small probabilities, expm1 for those near 1
    return torch.where(log_probs < -math.log(2), torch.log1p(-log_probs.exp()), torch.log(-torch.expm1(log_probs)))


def _term(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    # Where p underflows to 0 the difference of logs may be infinite, and 0 * inf is NaN.
    return p * (log_p - log_q).masked_fill(p == 0, 0.0)


def _outputs(
    where: str,
    student: Tensor,
    teacher: Tensor | None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    if teacher_log_probs is not None:
        rule = "teacher_logits must be given, got teacher_log_probs"
        raise ConfigError(where, rule, "logits cannot be computed from probabilities")
    student, teacher, count = counted_rows(where, student, teacher, mask)
    dtype = compute_dtype(student.dtype)
    return student.to(dtype), teacher.to(dtype), count
