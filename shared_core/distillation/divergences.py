"""Divergences between a student's and a teacher's class probabilities, all with one signature.

`DIVERGENCES` holds the sum forms by name. All of them leave out rows whose `mask` is False, compute in float32 whatever
the logits' dtype (float64 for T > 10 or T < 0.01, or float64 logits), give the teacher no gradient, and give the sum
and the count 0 with zero gradients if no row counts. Classes that both sides rule out (logit -inf) change nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch  # noqa: F401  (the examples)
from torch import Tensor

from shared_core.distillation.divergence_rows import (
    forward_kl_rows,
    jsd_rows,
    reverse_kl_rows,
    soft_cross_entropy_rows,
)
from shared_core.distillation.hard_labels import hard_label_sum
from shared_core.distillation.independent_outputs import (
    bernoulli_kl_sum,
    huber_sum,
    logit_mse_sum,
    teacher_bounded_mse_sum,
)
from shared_core.distillation.softened_pair import check_fraction, mean_of, soften


class Divergence(Protocol):
    """The signature that all of `DIVERGENCES` share; what one needs beyond it has a default."""

    def __call__(
        self,
        student: Tensor,
        teacher: Tensor | None = None,
        /,
        *,
        temperature: float = 2.0,
        mask: Tensor | None = None,
        teacher_log_probs: Tensor | None = None,
        scale_by_temperature: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum over the rows that count, and their number."""
        ...


def forward_kl_sum(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the sum over counted rows of ``T² KL(teacher || student)``, and their number: `kd_sum` with options.

    Args:
        student_logits: ``(..., C)``, any float dtype.
        teacher_logits: ``(..., C)``, any float dtype and device.
        temperature: ``T``, finite and > 0.
        mask: ``(...)`` bool, True = the row counts. None counts all.
        teacher_log_probs: ``(..., C)``, the teacher's log-probabilities at this `temperature` in place of its
            logits, as `mean_teacher` returns them. Used as they are, never renormalised.
        scale_by_temperature: Multiply by ``T²``, which keeps the size of the gradient about the same for all T.
            False compares with losses that leave it out.

    Returns:
        The sum (float32, or float64 if the student's logits are) and the count (int64), both scalars.

    Raises:
        ConfigError: If shapes, dtypes or the temperature are not as above, or not one teacher is given.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2.

    Example:
        >>> total, count = forward_kl_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.9834, 3)
    """
    pair = soften(
        "forward_kl",
        student_logits,
        teacher_logits,
        teacher_log_probs,
        temperature=temperature,
        mask=mask,
        scale_by_temperature=scale_by_temperature,
    )
    return pair.total(forward_kl_rows(pair.student, pair.teacher))


def reverse_kl_sum(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `reverse_kl` over counted rows, and their number; arguments as of `forward_kl_sum`.

    Example:
        >>> total, count = reverse_kl_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (1.3013, 3)
    """
    pair = soften(
        "reverse_kl",
        student_logits,
        teacher_logits,
        teacher_log_probs,
        temperature=temperature,
        mask=mask,
        scale_by_temperature=scale_by_temperature,
    )
    return pair.total(reverse_kl_rows(pair.student, pair.teacher))


def reverse_kl(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> Tensor:
    r"""Return :math:`T^2 \, KL(softmax(s / T) \,\|\, softmax(t / T))`, averaged over the rows that count.

    It seeks modes: a student too small for all of the teacher's distribution puts its mass where the teacher has
    most. Infinite, with a gradient that is NaN, if the teacher rules out (logit -inf) a class that the student does
    not; `jsd` stays finite there.

    Args, Returns, Raises: As of `forward_kl_sum`, the mean in place of the sum.

    Source: Gu et al. (MiniLLM), 2023, arXiv:2306.08543, section 2; Agarwal et al. (GKD), 2023, arXiv:2306.13649.

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> round(reverse_kl(student, teacher, temperature=1.0).item(), 4)
        0.4338
    """
    return mean_of(
        *reverse_kl_sum(
            student_logits,
            teacher_logits,
            temperature=temperature,
            mask=mask,
            teacher_log_probs=teacher_log_probs,
            scale_by_temperature=scale_by_temperature,
        )
    )


def jsd_sum(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `jsd` over counted rows, and their number; arguments as of `forward_kl_sum` and `jsd`.

    Example:
        >>> total, count = jsd_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.2686, 3)
    """
    check_fraction("jsd", "beta", beta)
    pair = soften(
        "jsd",
        student_logits,
        teacher_logits,
        teacher_log_probs,
        temperature=temperature,
        mask=mask,
        scale_by_temperature=scale_by_temperature,
    )
    return pair.total(jsd_rows(pair.student, pair.teacher, beta))


def jsd(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> Tensor:
    r"""Return the generalised Jensen-Shannon divergence times ``T²``, averaged over the rows that count.

    .. math:: \beta \, KL(p_t \,\|\, m) + (1 - \beta) \, KL(p_s \,\|\, m), \quad m = \beta p_t + (1 - \beta) p_s

    By definition beta = 0 is the forward KL (`kd_loss`) and beta = 1 the reverse KL (`reverse_kl`). That is not
    continuous: the formula itself goes to 0 at both ends, and only divided by beta (by 1 - beta) to the forward
    (reverse) KL. At beta = 0.5 it is symmetric and at most ``T² ln 2``.

    Args:
        student_logits: As of `forward_kl_sum`, and so are all others but `beta`.
        teacher_logits: See there.
        beta: The teacher's share of the mixture ``m``, in [0, 1].
        temperature: See there.
        mask: See there.
        teacher_log_probs: See there.
        scale_by_temperature: See there.

    Returns:
        Scalar, float32 (float64 for float64 logits); finite for 0 < beta < 1 whatever either side rules out.

    Raises:
        ConfigError: As `forward_kl_sum`, and if beta is outside [0, 1].

    Source: Agarwal et al. (GKD), 2023, arXiv:2306.13649, equation 1.

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> [round(jsd(student, teacher, beta=beta, temperature=1.0).item(), 4) for beta in (0, 0.5, 1)]
        [0.3278, 0.0895, 0.4338]
    """
    return mean_of(
        *jsd_sum(
            student_logits,
            teacher_logits,
            beta=beta,
            temperature=temperature,
            mask=mask,
            teacher_log_probs=teacher_log_probs,
            scale_by_temperature=scale_by_temperature,
        )
    )


def soft_cross_entropy_sum(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `soft_cross_entropy` over counted rows, and their number; arguments as of `forward_kl_sum`.

    Example:
        >>> total, count = soft_cross_entropy_sum(torch.zeros(3, 2), torch.zeros(3, 2), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (2.0794, 3)
    """
    pair = soften(
        "soft_cross_entropy",
        student_logits,
        teacher_logits,
        teacher_log_probs,
        temperature=temperature,
        mask=mask,
        scale_by_temperature=scale_by_temperature,
    )
    return pair.total(soft_cross_entropy_rows(pair.student, pair.teacher))


def soft_cross_entropy(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> Tensor:
    r"""Return :math:`-T^2 \sum softmax(t / T) \log softmax(s / T)`, averaged over the rows that count.

    The forward KL plus the teacher's entropy: the same gradient, and a value that does not go to 0.

    Args, Returns, Raises: As of `forward_kl_sum`, the mean in place of the sum.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2.

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> round(soft_cross_entropy(student, teacher, temperature=1.0).item(), 4)
        0.6931
    """
    return mean_of(
        *soft_cross_entropy_sum(
            student_logits,
            teacher_logits,
            temperature=temperature,
            mask=mask,
            teacher_log_probs=teacher_log_probs,
            scale_by_temperature=scale_by_temperature,
        )
    )


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl_sum,
    "reverse_kl": reverse_kl_sum,
    "jsd": jsd_sum,
    "soft_cross_entropy": soft_cross_entropy_sum,
    "hard_label": hard_label_sum,
    "logit_mse": logit_mse_sum,
    "bernoulli_kl": bernoulli_kl_sum,
    "huber": huber_sum,
    "teacher_bounded_mse": teacher_bounded_mse_sum,
}
"""By name, as the option `divergence` takes it: functions of both logits, which return a sum and what it counts."""
