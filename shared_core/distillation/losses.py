"""The soft-target loss: how far the student's softened distribution is from the teacher's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.errors import ConfigError

# KL shrinks with 1/T² while float32's rounding of log-probabilities does not, and T² multiplies both.
_FLOAT32_TEMPERATURES = (0.01, 10.0)


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
        >>> total, count = kd_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.9834, 3)
    """
    _check(student_logits, teacher_logits, temperature, mask)
    teacher_logits = teacher_logits.detach().to(student_logits.device)
    if mask is not None:
        # rows that do not count are taken out, not multiplied by 0: padding may hold Inf or NaN
        student_logits, teacher_logits = student_logits[mask], teacher_logits[mask]
    low, high = _FLOAT32_TEMPERATURES
    out_dtype = torch.promote_types(student_logits.dtype, torch.float32)
    dtype = out_dtype if low <= temperature <= high else torch.float64
    log_p_student = F.log_softmax(student_logits.to(dtype) / temperature, dim=-1)
    log_p_teacher = F.log_softmax(teacher_logits.to(dtype) / temperature, dim=-1)
    p_teacher = log_p_teacher.exp()
    # a class that the teacher rules out (logit -inf) adds 0 whatever the student says, not 0 * inf
    difference = (log_p_teacher - log_p_student).masked_fill(p_teacher == 0, 0.0)
    total = temperature**2 * (p_teacher * difference).sum()
    count = torch.full((), student_logits.shape[:-1].numel(), dtype=torch.int64, device=student_logits.device)
    return total.to(out_dtype), count


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
        >>> logits = torch.tensor([[2.0, 0.0]])
        >>> kd_loss(logits, logits).item()
        0.0
        >>> round(kd_loss(logits, -logits, temperature=1.0).item(), 4)
        1.5232
    """
    total, count = kd_sum(student_logits, teacher_logits, temperature=temperature, mask=mask)
    return total / count.clamp(min=1)


def _check(student_logits: Tensor, teacher_logits: Tensor, temperature: float, mask: Tensor | None) -> None:
    shape = tuple(student_logits.shape)
    if shape != tuple(teacher_logits.shape) or not shape:
        raise ConfigError(
            f"kd_loss: teacher_logits must have the shape (..., classes) of student_logits, {shape}, "
            f"got {tuple(teacher_logits.shape)}"
        )
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if not logits.is_floating_point():
            raise ConfigError(f"kd_loss: {name} must be floating point, got {logits.dtype}")
    if isinstance(temperature, bool) or not (0 < temperature < math.inf):
        raise ConfigError(f"kd_loss: temperature must be finite and above 0, got {temperature}")
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != shape[:-1]):
        raise ConfigError(
            f"kd_loss: mask must be bool of shape {shape[:-1]}, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
