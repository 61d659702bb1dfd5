"""`eff_kernels.distillation.kd_rows_` in Triton: one program a row, online softmax over tiles of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from eff_kernels._triton.launch import has_triton

if has_triton():
    import triton
    import triton.language as tl

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}
# Sixteen classes of each side in the registers of a thread.
_BLOCK, _WARPS = 4096, 8


def _softened(
    start: tl.tensor, columns: tl.tensor, inside: tl.tensor, scale: tl.tensor, softcap: tl.tensor, capped: tl.constexpr
) -> tl.tensor:
    # One tile of logits, softened: z / T, or c tanh(z / c) / T; outside of the classes -inf, whose exp is 0.
    x = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    if capped:
        # tanh by exp: the interpreter has no libdevice
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)
    return tl.where(inside, x * scale, float("-inf"))


def _kd_rows(
    student: tl.tensor,
    teacher: tl.tensor,
    labels: tl.tensor,
    soft: tl.tensor,
    hard: tl.tensor,
    gradient: tl.tensor,
    student_stride: tl.tensor,
    teacher_stride: tl.tensor,
    gradient_stride: tl.tensor,
    classes: tl.tensor,
    temperature: tl.tensor,
    soft_weight: tl.tensor,
    hard_weight: tl.tensor,
    beta: tl.tensor,
    student_softcap: tl.tensor,
    teacher_softcap: tl.tensor,
    kind: tl.constexpr,
    student_capped: tl.constexpr,
    teacher_capped: tl.constexpr,
    labelled: tl.constexpr,
    tiles: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    gradient += row * gradient_stride
    scale = 1.0 / temperature
    label = tl.full((), -1, tl.int64)
    if labelled:
        label = tl.load(labels + row)
    offsets = tl.arange(0, block)

    # First sweep: both normalisers by online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): the sum so far
    # shrinks whenever a larger maximum is found.
    # finite starts: a tile of -inf would make inf - inf
    student_max = tl.full((), -1e38, tl.float32)
    teacher_max = tl.full((), -1e38, tl.float32)
    student_sum = tl.zeros((), tl.float32)
    teacher_sum = tl.zeros((), tl.float32)
    plain_sum = tl.zeros((), tl.float32)
    labelled_logit = tl.zeros((), tl.float32)
    for i in range(tiles):
        columns = i * block + offsets
        inside = columns < classes
        a = softened(student, columns, inside, scale, student_softcap, student_capped)
        b = softened(teacher, columns, inside, scale, teacher_softcap, teacher_capped)
        largest = tl.maximum(student_max, tl.max(a, 0))
        student_sum = student_sum * tl.exp(student_max - largest) + tl.sum(tl.exp(a - largest), 0)
        if labelled:
            # The cross-entropy is at temperature 1: a T is the logit, and T (a - max) its distance from the largest.
            shrink = tl.exp(temperature * (student_max - largest))
            plain_sum = plain_sum * shrink + tl.sum(tl.exp(temperature * (a - largest)), 0)
            labelled_logit += tl.sum(tl.where(columns == label, a, 0.0), 0)
        student_max = largest
        largest = tl.maximum(teacher_max, tl.max(b, 0))
        teacher_sum = teacher_sum * tl.exp(teacher_max - largest) + tl.sum(tl.exp(b - largest), 0)
        teacher_max = largest
    student_log = student_max + tl.log(student_sum)
    teacher_log = teacher_max + tl.log(teacher_sum)

    # Second sweep, not for the forward KL: its gradient q - p needs no sum over the row; the others' do.
    divergence = tl.zeros((), tl.float32)
    of_student = tl.zeros((), tl.float32)
    if kind != 0:
        for i in range(tiles):
            columns = i * block + offsets
            inside = columns < classes
            # log q and log p of the tile, read and softened again: 128k classes do not fit into registers.
            log_s = softened(student, columns, inside, scale, student_softcap, student_capped) - student_log
            log_t = softened(teacher, columns, inside, scale, teacher_softcap, teacher_capped) - teacher_log
            s = tl.exp(log_s)
            if kind == 1:
                of_student += tl.sum(tl.where(s == 0.0, 0.0, s * (log_s - log_t)), 0)
            else:
                t = tl.exp(log_t)
                log_m = tl.log(beta * t + (1.0 - beta) * s)
                of_student += tl.sum(tl.where(s == 0.0, 0.0, s * (log_s - log_m)), 0)
                divergence += beta * tl.sum(tl.where(t == 0.0, 0.0, t * (log_t - log_m)), 0)
        if kind == 1:
            divergence = of_student
        else:
            divergence += (1.0 - beta) * of_student

    # Last sweep: the gradient by a, times soft_weight T, as T² D has the gradient T ∂D/∂a by z; then the hard term.
    weight = tl.where(label >= 0, hard_weight, 0.0)
    for i in range(tiles):
        columns = i * block + offsets
        inside = columns < classes
        a = softened(student, columns, inside, scale, student_softcap, student_capped)
        log_t = softened(teacher, columns, inside, scale, teacher_softcap, teacher_capped) - teacher_log
        log_s = a - student_log
        s = tl.exp(log_s)
        t = tl.exp(log_t)
        if kind == 0:
            divergence += tl.sum(tl.where(t == 0.0, 0.0, t * (log_t - log_s)), 0)
            grad = s - t
        elif kind == 1:
            grad = tl.where(s == 0.0, 0.0, s * (log_s - log_t - of_student))
        else:
            log_m = tl.log(beta * t + (1.0 - beta) * s)
            grad = (1.0 - beta) * tl.where(s == 0.0, 0.0, s * (log_s - log_m - of_student))
        grad = soft_weight * temperature * grad
        if labelled:
            p = tl.exp(temperature * (a - student_max)) / plain_sum
            grad += weight * (p - tl.where(columns == label, 1.0, 0.0))
        if student_capped:
            # a T = c tanh(z / c), so ratio is the tanh, and 1 - tanh² the derivative of the cap.
            ratio = a * temperature / student_softcap
            grad = grad * (1.0 - ratio * ratio)
        tl.store(gradient + columns, grad.to(gradient.dtype.element_ty), mask=inside)
    tl.store(soft + row, temperature * temperature * divergence)
    if labelled:
        # logsumexp(z) - z_y, both in units of a.
        loss = tl.log(plain_sum) + temperature * (student_max - labelled_logit)
        tl.store(hard + row, tl.where(label >= 0, loss, 0.0))


if has_triton():
    # a kernel finds what it calls among its module's globals
    softened = triton.jit(_softened)
    kd_rows = triton.jit(_kd_rows)


def kd_rows_triton_(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    divergence: str,
    beta: float,
    student_softcap: float,
    teacher_softcap: float,
    block: int = _BLOCK,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `kd_rows_` does, without scratch: two or three sweeps over a row; -inf is always understood.

    Args:
        student_logits: As in `kd_rows_`, float32, bfloat16 or float16; its classes contiguous.
        teacher_logits: As in `kd_rows_`, likewise.
        labels: As in `kd_rows_`.
        temperature: As in `kd_rows_`.
        soft_weight: As in `kd_rows_`.
        hard_weight: As in `kd_rows_`.
        divergence: As in `kd_rows_`.
        beta: As in `kd_rows_`.
        student_softcap: As in `kd_rows_`.
        teacher_softcap: As in `kd_rows_`.
        block: Classes of a tile, a power of two.
        gradient: Takes the gradient in place of `student_logits`, which then stay.
    """
    rows, classes = student_logits.shape
    soft = student_logits.new_empty(rows, dtype=torch.float32)
    hard = torch.zeros_like(soft)
    if not rows:
        return soft, hard
    gradient = student_logits if gradient is None else gradient
    block = min(block, triton.next_power_of_2(classes))
    kd_rows[(rows,)](
        student_logits,
        teacher_logits,
        soft if labels is None else labels,
        soft,
        hard,
        gradient,
        student_logits.stride(0),
        teacher_logits.stride(0),
        gradient.stride(0),
        classes,
        float(temperature),
        float(soft_weight),
        float(hard_weight),
        float(beta),
        float(student_softcap),
        float(teacher_softcap),
        kind=_KINDS[divergence],
        student_capped=bool(student_softcap),
        teacher_capped=bool(teacher_softcap),
        labelled=labels is not None,
        tiles=triton.cdiv(classes, block),
        block=block,
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
    return soft, hard
