"""The first steps of every response loss: check the pair, drop rows that do not count, soften in a safe dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.nn.functional as F
from eff_kernels.distillation import arithmetic_dtype
from torch import Tensor

from shared_core.errors import ConfigError


class Options(TypedDict, total=False):
    """The options that all divergences take, as `divergence_sum` describes them."""

    temperature: float
    mask: Tensor | None
    teacher_log_probs: Tensor | None
    scale_by_temperature: bool


@dataclass(frozen=True)
class SoftenedPair:
    """Log-probabilities of both sides at one temperature, only of the rows that count."""

    student: Tensor
    teacher: Tensor
    count: Tensor
    factor: float
    out_dtype: torch.dtype

    def total(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over rows, with T² where it applies, in the dtype losses are returned in, and the count."""
        return (self.factor * rows.sum()).to(self.out_dtype), self.count


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Return ``total / count``, 0 where nothing counts."""
    # 0 / 1 where nothing counts: the sum is 0 with a graph, so gradients are zeros, not missing.
    return total / count.clamp(min=1)


def compute_dtype(dtype: torch.dtype, temperature: float = 1.0) -> torch.dtype:
    """Return the dtype that a loss of such logits is computed in: float32 at least, float64 for extreme T.

    Example:
        >>> compute_dtype(torch.bfloat16), compute_dtype(torch.bfloat16, 20.0)
        (torch.float32, torch.float64)
    """
    return arithmetic_dtype(dtype, temperature)


def check_temperature(where: str, temperature: float) -> None:
    """Raise `ConfigError` unless the temperature is finite and above 0."""
    check_positive(where, "temperature", temperature)


def check_positive(where: str, name: str, value: float, *, or_zero: bool = False) -> None:
    """Raise `ConfigError` unless the value is finite and above 0, or 0 where it may be."""
    if isinstance(value, bool) or not ((0 < value < math.inf) or (or_zero and value == 0)):
        raise ConfigError(where, f"{name} must be finite and {'at least' if or_zero else 'above'} 0, got {value}")


def check_fraction(where: str, name: str, value: float) -> None:
    """Raise `ConfigError` unless the value is in [0, 1]."""
    if isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(where, f"{name} must be in [0, 1], got {value}")


def counted_rows(
    where: str,
    student: Tensor,
    teacher: Tensor | None,
    mask: Tensor | None,
    *,
    names: tuple[str, str] = ("student_logits", "teacher_logits"),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of both sides that count, the teacher's detached and on the student's device, and their number.

    Raises:
        ConfigError: If a side is missing or not floating point, or shapes or the mask do not fit.
    """
    shape, other = tuple(student.shape), None if teacher is None else tuple(teacher.shape)
    if teacher is None or shape != other or not shape:
        raise ConfigError(where, f"{names[1]} must be given with the shape (..., classes) {shape}, got {other}")
    for name, side in zip(names, (student, teacher), strict=True):
        if not side.is_floating_point():
            raise ConfigError(where, f"{name} must be floating point, got {side.dtype}")
    check_mask(where, mask, shape[:-1])
    teacher = teacher.detach().to(student.device)
    if mask is not None:
        # rows that do not count are taken out, not multiplied by 0: padding may hold Inf or NaN
        mask = mask.to(student.device)
        student, teacher = student[mask], teacher[mask]
    # A tensor, not an int: it is summed over processes and divided by on the device, without a synchronization.
    count = torch.full((), student.shape[:-1].numel(), dtype=torch.int64, device=student.device)
    return student, teacher, count


def check_mask(where: str, mask: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise `ConfigError` unless the mask is bool and of that shape."""
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != shape):
        raise ConfigError(where, f"mask must be bool of shape {shape}, got {mask.dtype} of shape {tuple(mask.shape)}")


def rows_of_either(
    where: str, student: Tensor, teacher_logits: Tensor | None, teacher_log_probs: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `counted_rows` of the student and of the one of the teacher's two forms that is given."""
    if (teacher_logits is None) == (teacher_log_probs is None):
        got = "neither" if teacher_logits is None else "both"
        raise ConfigError(where, f"one of teacher_logits and teacher_log_probs must be given, got {got}")
    is_logits = teacher_log_probs is None
    names = "student_logits", "teacher_logits" if is_logits else "teacher_log_probs"
    return counted_rows(where, student, teacher_logits if is_logits else teacher_log_probs, mask, names=names)


def soften(
    where: str,
    student: Tensor,
    teacher_logits: Tensor | None,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    scale_by_temperature: bool = True,
) -> SoftenedPair:
    """Return both log-softmaxes at the temperature; the teacher's log-probabilities are taken as they are."""
    check_temperature(where, temperature)
    student, teacher, count = rows_of_either(where, student, teacher_logits, teacher_log_probs, mask)
    # At extreme T the factor T² multiplies differences of log-softmaxes that float32 rounds: float64 there.
    dtype = compute_dtype(student.dtype, temperature)
    teacher = teacher.to(dtype)
    return SoftenedPair(
        F.log_softmax(student.to(dtype) / temperature, dim=-1),
        F.log_softmax(teacher / temperature, dim=-1) if teacher_log_probs is None else teacher,
        count,
        temperature**2 if scale_by_temperature else 1.0,
        # The dtype of the result depends on the logits alone, so that changing T does not change it.
        compute_dtype(student.dtype),
    )
