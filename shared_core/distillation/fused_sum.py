"""The soft loss of large logits, with its gradient computed in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from eff_kernels.distillation import DIVERGENCES as FUSED
from eff_kernels.distillation import arithmetic_dtype, kd_rows_
from eff_kernels.eager_cuda import is_plain
from torch import Tensor

from shared_core.distillation.chunked_autograd import check_first_backward, graph_is_kept, multiplied
from shared_core.distillation.divergences import DIVERGENCES
from shared_core.distillation.softened_pair import check_fraction, check_mask, check_temperature, counted_rows

SMALLEST = 1 << 19
"""Fewer logits than this take less time in whole operations than a few rows at a time (torch 2.13, CPU)."""


def fits_fused_sum(divergence: str, student: Tensor, teacher: Tensor) -> bool:
    """Return whether `fused_sum` computes this divergence of these logits, and faster than autograd would."""
    return (
        divergence in FUSED
        and student.numel() >= SMALLEST
        and torch.is_grad_enabled()
        and student.requires_grad
        and is_plain(student)
        and is_plain(teacher)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def divergence_sum(
    divergence: str, student: Tensor, teacher: Tensor, *, temperature: float, softened: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return what the function of `DIVERGENCES` returns, by `fused_sum` where that fits.

    Args:
        divergence: A key of `DIVERGENCES`.
        student: Logits.
        teacher: Logits, or log-probabilities at this temperature if `softened`.
        temperature: T.
        softened: Which of the two.
        options: As the function takes them.
    """
    options["temperature"] = temperature
    if fits_fused_sum(divergence, student, teacher):
        return fused_sum(divergence, student, teacher * temperature if softened else teacher, **options)
    if softened:
        return DIVERGENCES[divergence](student, teacher_log_probs=teacher, **options)
    return DIVERGENCES[divergence](student, teacher, **options)


def fused_sum(
    divergence: str,
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    scale_by_temperature: bool = True,
    beta: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Return what the function of `DIVERGENCES` returns for two logits; a second derivative is refused.

    The gradient takes the place of a copy of the student's logits, in float32 at least: fp16 would lose what a scaled
    loss is to save.

    Args:
        divergence: ``"forward_kl"``, ``"reverse_kl"`` or ``"jsd"``.
        student: ``(..., C)``, any float dtype.
        teacher: ``(..., C)``, any float dtype and device; no gradient flows through it.
        temperature: T, finite and > 0.
        mask: ``(...)`` bool, True = the row counts; None: all.
        scale_by_temperature: Multiply by T².
        beta: β of ``"jsd"``, in [0, 1].

    Returns:
        The sum over the rows that count, float32 or float64 for float64 logits, and their number, int64.

    Example:
        >>> student, teacher = torch.zeros(3, 2, requires_grad=True), torch.tensor([[2.0, 0.0]] * 3)
        >>> total, count = fused_sum("forward_kl", student, teacher, temperature=1.0)
        >>> total.backward()
        >>> round(total.item(), 4), count.item(), student.grad[0]
        (0.9834, 3, tensor([-0.3808,  0.3808]))
    """
    check_temperature(divergence, temperature)
    check_fraction(divergence, "beta", beta)
    if divergence == "jsd" and beta in (0, 1):
        divergence = "reverse_kl" if beta else "forward_kl"
    check_mask(divergence, mask, tuple(student.shape[:-1]))
    rows, targets, count = counted_rows(divergence, student.detach(), teacher, None)
    places = None
    if mask is not None:  # found once: on a GPU the host waits for it
        places = mask.to(student.device).flatten().nonzero().squeeze(1)
        count = torch.full_like(count, len(places))
    factor = 1.0 if scale_by_temperature else temperature**-2
    rows, targets = (side.reshape(-1, student.shape[-1]) for side in (rows, targets))
    total: Tensor = _FusedSum.apply(student, rows, targets, places, temperature, factor, divergence, beta)  # type: ignore[no-untyped-call]
    return total, count


class _FusedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        rows: Tensor,
        targets: Tensor,
        places: Tensor | None,
        temperature: float,
        factor: float,
        divergence: str,
        beta: float,
    ) -> Tensor:
        dtype = arithmetic_dtype(student.dtype, temperature)
        if places is None:
            gradient = rows.to(dtype, copy=True, memory_format=torch.contiguous_format)
        else:
            gradient, targets = rows.index_select(0, places).to(dtype), targets.index_select(0, places)
        with torch.autocast(student.device.type, enabled=False):
            soft, _ = kd_rows_(gradient, targets, None, temperature, factor, 0.0, divergence, beta)
        ctx.gradient, ctx.places, ctx.shape, ctx.dtype = gradient, places, student.shape, student.dtype
        total: Tensor = soft.sum() * factor
        return total.to(arithmetic_dtype(student.dtype, 1.0))

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        check_first_backward("distill", ctx.gradient)
        kept = graph_is_kept()
        gradient = multiplied(ctx.gradient, scale, ctx.dtype, kept)
        if not kept:
            ctx.gradient = None
        if ctx.places is not None:
            whole = gradient.new_zeros(ctx.shape).view(-1, ctx.shape[-1])
            gradient = whole.index_copy_(0, ctx.places, gradient)
        return gradient.view(ctx.shape), *[None] * 7
