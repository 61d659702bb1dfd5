"""The soft-target loss: how far the student's softened distribution is from the teacher's."""

from __future__ import annotations

from torch import Tensor

from shared_core.distillation.divergence_rows import forward_kl_rows
from shared_core.distillation.softened_pair import mean_of, soften


def kd_sum(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 2.0, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of `kd_loss` over counted rows, and their number, for a trainer that averages by itself.

    Args:
        student_logits: ``(..., C)``, as in `kd_loss`.
        teacher_logits: ``(..., C)``, as in `kd_loss`.
        temperature: As in `kd_loss`.
        mask: As in `kd_loss`.

    Returns:
        The sum (float32, or float64 if the student's logits are) and the count (int64), both scalars on the
        student's device; ``(0, 0)`` with zero gradients if no row counts.

    Raises:
        ConfigError: As `kd_loss` does.

    Example:
        >>> import torch
        >>> total, count = kd_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.9834, 3)
    """
    pair = soften(
        "kd_loss", student_logits, teacher_logits, None,
        temperature=temperature, mask=mask, scale_by_temperature=True,
    )  # fmt: skip
    return pair.total(forward_kl_rows(pair.student, pair.teacher))


def kd_loss(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 2.0, mask: Tensor | None = None
) -> Tensor:
    r"""Return the soft-target loss :math:`T^2 \, KL(softmax(t / T) \,\|\, softmax(s / T))`.

    Summed over classes, averaged over the rows that count. The factor ``T**2`` keeps the size of the gradient
    about the same for all ``T``; by the student's logits it is ``T * (softmax(s/T) - softmax(t/T)) / rows``.

    Args:
        student_logits: ``(..., C)``, any float dtype. A logit of -inf gives its class probability 0; the loss
            is then infinite if the teacher does not.
        teacher_logits: ``(..., C)``, same shape; any float dtype and device. No gradient flows through it.
        temperature: ``T``, finite and > 0. The arithmetic is float32, and float64 for T > 10 or < 0.01.
        mask: ``(...)`` bool, True = the row counts. None counts all.

    Returns:
        Scalar, float32 whatever the input (float64 for float64 logits); 0.0 with zero gradients if no row
        counts.

    Raises:
        ConfigError: If shapes, dtypes or the temperature are not as above.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0]])
        >>> kd_loss(logits, logits).item()
        0.0
        >>> round(kd_loss(logits, -logits, temperature=1.0).item(), 4)
        1.5232
    """
    return mean_of(*kd_sum(student_logits, teacher_logits, temperature=temperature, mask=mask))
