"""The hot operation of distillation: divergence, cross-entropy and their gradient over rows of logits, in place.

The torch path processes a few rows at a time, so that temporaries stay in cache and are small
compared with the logits. On CUDA one Triton program processes a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eff_kernels._triton.launch import compiles_for

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
"""The losses that `kd_rows_` computes."""
# Divergences shrink with 1/T² while float32's rounding of log-probabilities does not, and T² multiplies both.
_FLOAT32_TEMPERATURES = (0.01, 10.0)
_CACHE_BYTES = 1 << 20  # of a tile: with smaller ones, starting operators takes longest (AMD EPYC)
_SCRATCH = 4


def arithmetic_dtype(dtype: torch.dtype, temperature: float) -> torch.dtype:
    """Return the type in which softmaxes are computed: float32, or float64 for float64 and extreme temperatures.

    Args:
        dtype: Dtype of the logits.
        temperature: Above 0.

    Example:
        >>> arithmetic_dtype(torch.bfloat16, 2.0), arithmetic_dtype(torch.float32, 50.0)
        (torch.float32, torch.float64)
    """
    low, high = _FLOAT32_TEMPERATURES
    return torch.promote_types(dtype, torch.float32) if low <= temperature <= high else torch.float64


def tile_rows(rows: int, classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many of `rows` rows `kd_rows_` processes at a time: as many as fit a core's cache, at most 1/16.

    Args:
        rows: Number of rows.
        classes: Classes per row.
        dtype: Dtype of the arithmetic.
        device: Device of the logits.

    Example:
        >>> tile_rows(256, 32_000_000, torch.float32, torch.device("cpu"))
        1
    """
    # At most 1/16 of a chunk, so that five float32 tiles for half-precision logits are smaller than the chunk itself.
    most = max(1, rows // 16)
    # On a GPU the cache does not matter: one launch over more rows is faster.
    if device.type != "cpu":
        return most
    return max(1, min(most, torch.get_num_threads() * _CACHE_BYTES // (max(classes, 1) * dtype.itemsize)))


def _in_triton(device: torch.device, student: torch.dtype, teacher: torch.dtype, temperature: float) -> bool:
    """Return True if `kd_rows_` runs one Triton kernel for logits of these types, without scratch memory."""
    return (
        device.type == "cuda"
        and arithmetic_dtype(student, temperature) == torch.float32
        and teacher != torch.float64
        and compiles_for(device)
    )


def scratch_rows(
    rows: int,
    classes: int,
    logits: torch.dtype,
    temperature: float,
    device: torch.device,
    teacher: torch.dtype | None = None,
) -> int:
    """Return the scratch memory of `kd_rows_` in rows of logits, rounded up.

    Args:
        rows: Number of rows.
        classes: Classes per row.
        logits: Dtype of the logits.
        temperature: Above 0.
        device: Device of the logits.
        teacher: Dtype of the teacher's logits; None: the student's.

    Example:
        >>> scratch_rows(256, 32_000_000, torch.bfloat16, 2.0, torch.device("cpu"))
        10
    """
    if _in_triton(device, logits, teacher or logits, temperature):
        return 0
    dtype = arithmetic_dtype(logits, temperature)
    # four tiles, and a comparison and a copy of one
    return (_SCRATCH + 1) * tile_rows(rows, classes, dtype, device) * dtype.itemsize // logits.itemsize


@torch.library.custom_op("eff_kernels::kd_rows_", mutates_args={"student_logits"})
def kd_rows_(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    student_softcap: float = 0.0,
    teacher_softcap: float = 0.0,
    ruled_out: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Return the soft and the hard loss per row, and overwrite the student's logits with the weighted gradient.

    Soft: :math:`T^2 D(softmax(t/T), softmax(s/T))`. Hard: :math:`-\log softmax(s)_{label}`. Afterwards `student_logits`
    holds ``soft_weight * d soft/ds + hard_weight * d hard/ds``. Kullback-Leibler, of the teacher from the student:
    ``T (p_s − p_t)``; any other D: ``T p_s (u − Σ p_s u)`` with ``u = log p_s/p_t``, for the generalized Jensen-Shannon
    ``u = (1 − β) log p_s/m``, ``m = β p_t + (1 − β) p_s``.

    Args:
        student_logits: ``(rows, classes)``, any float dtype; overwritten by the gradient.
        teacher_logits: ``(rows, classes)``, any float dtype; not changed.
        labels: int64 ``(rows,)``, the class, or -1 for rows without label; None: no labels.
        temperature: T > 0.
        soft_weight: Factor of the soft gradient.
        hard_weight: Factor of the hard gradient.
        divergence: ``"forward_kl"``, ``"reverse_kl"`` or ``"jsd"``.
        beta: β of ``"jsd"``, in (0, 1).
        student_softcap: c of ``c tanh(s/c)``, applied to the logits first and differentiated through; 0: none.
        teacher_softcap: Likewise for the teacher.
        ruled_out: True if logits may be -inf. Such a class then contributes 0, not NaN.

    Returns:
        Soft and hard loss, each ``(rows,)`` in `arithmetic_dtype`. The hard loss is 0 without a label.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2; Agarwal et al., 2023, arXiv:2306.13649, equation 1.

    Example:
        >>> student, teacher = torch.zeros(1, 2), torch.tensor([[2.0, 0.0]])
        >>> soft, hard = kd_rows_(student, teacher, torch.tensor([0]), 1.0, 1.0, 0.0)
        >>> soft, hard, student
        (tensor([0.3278]), tensor([0.6931]), tensor([[-0.3808,  0.3808]]))
    """
    options = (soft_weight, hard_weight, divergence, beta, student_softcap, teacher_softcap)
    return _rows(student_logits, teacher_logits, labels, temperature, options, ruled_out)


@kd_rows_.register_fake
def _(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    student_softcap: float = 0.0,
    teacher_softcap: float = 0.0,
    ruled_out: bool = True,
) -> tuple[Tensor, Tensor]:
    soft = student_logits.new_empty(student_logits.shape[0], dtype=arithmetic_dtype(student_logits.dtype, temperature))
    return soft, torch.empty_like(soft)


@torch.library.custom_op("eff_kernels::kd_rows", mutates_args=())
def kd_rows(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    divergence: str = "forward_kl",
    beta: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the soft and the hard loss per row, and their weighted gradient in `arithmetic_dtype`, not in place.

    Args: As for `kd_rows_`.

    Example:
        >>> student, teacher = torch.zeros(1, 2), torch.tensor([[2.0, 0.0]])
        >>> kd_rows(student, teacher, torch.tensor([0]), 1.0, 1.0, 0.0)
        (tensor([0.3278]), tensor([0.6931]), tensor([[-0.3808,  0.3808]]))
    """
    if student_logits.stride(-1) != 1:
        student_logits = student_logits.contiguous()
    dtype = arithmetic_dtype(student_logits.dtype, temperature)
    gradient = student_logits.new_empty(student_logits.shape, dtype=dtype)
    options = (soft_weight, hard_weight, divergence, beta, 0.0, 0.0)
    return *_rows(student_logits, teacher_logits, labels, temperature, options, True, gradient), gradient


@kd_rows.register_fake
def _(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    divergence: str = "forward_kl",
    beta: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = arithmetic_dtype(student_logits.dtype, temperature)
    soft = student_logits.new_empty(student_logits.shape[0], dtype=dtype)
    return soft, torch.empty_like(soft), student_logits.new_empty(student_logits.shape, dtype=dtype)


def _rows(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    options: tuple[float, float, str, float, float, float],
    ruled_out: bool,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if _in_triton(student_logits.device, student_logits.dtype, teacher_logits.dtype, temperature):
        from eff_kernels._triton.distillation import kd_rows_triton_

        # Triton launches on the current device, which may differ from that of the logits
        with torch.cuda.device(student_logits.get_device()):
            return kd_rows_triton_(student_logits, teacher_logits, labels, temperature, *options, gradient=gradient)
    return kd_rows_torch_(student_logits, teacher_logits, labels, temperature, *options, ruled_out, gradient=gradient)


def kd_rows_torch_(
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
    ruled_out: bool,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `kd_rows_` by torch operations on a few rows at a time.

    Args: As for `kd_rows_`, and ``gradient``, in `arithmetic_dtype`: overwritten instead of `student_logits`.

    Example:
        >>> student, teacher = torch.zeros(1, 2), torch.tensor([[2.0, 0.0]])
        >>> kd_rows_torch_(student, teacher, None, 1.0, 1.0, 0.0, "reverse_kl", 0.5, 0.0, 0.0, False)[0]
        tensor([0.4338])
    """
    rows, classes = student_logits.shape
    dtype = arithmetic_dtype(student_logits.dtype, temperature)
    size = tile_rows(rows, classes, dtype, student_logits.device)
    soft = student_logits.new_empty(rows, dtype=dtype)
    hard = torch.zeros_like(soft)
    # Four (tile, classes) buffers, named a to d below. Each step says which it overwrites.
    scratch = student_logits.new_empty(_SCRATCH, min(size, rows), classes, dtype=dtype)
    if labels is not None:
        labeled = labels >= 0
        weights = labeled.to(dtype).mul_(hard_weight)
        labels = labels.clamp(min=0)
    differentiate = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd}[divergence]
    for first in range(0, rows, size):
        here = slice(first, first + size)
        tiles = list(scratch[:, : rows - first])
        if gradient is not None:
            tiles[2] = gradient[here]  # all of them write the gradient there
        # a = student / T and b = teacher / T, after the softcap.
        a = _scaled(student_logits[here], temperature, student_softcap, tiles[0])
        b = _scaled(teacher_logits[here], temperature, teacher_softcap, tiles[1])
        divergences, grad, free = differentiate(a, b, tiles[2], tiles[3], beta, ruled_out)
        # The gradients by a come from the divergence per row. T² multiplies value and gradient.
        soft[here, None] = divergences
        # ∂(T² D)/∂z = T² ∂D/∂a / T, since a = z / T.
        grad.mul_(soft_weight * temperature)
        if labels is not None or student_softcap:
            # The cross-entropy uses the logits at T = 1.
            a.mul_(temperature)
        if labels is not None:
            hard[here] = _add_cross_entropy(a, labels[here], weights[here], grad, free)
        if student_softcap:
            # z' = c tanh(z / c) has the derivative 1 - (z' / c)². `a` now holds z'.
            grad.mul_(a.div_(student_softcap).square_().neg_().add_(1.0))
        if gradient is None:
            # The logits are overwritten last, rounded once from the arithmetic dtype.
            student_logits[here] = grad
    if labels is not None:
        hard.masked_fill_(~labeled, 0.0)
    return soft.mul_(temperature**2), hard


def _scaled(logits: Tensor, temperature: float, softcap: float, out: Tensor) -> Tensor:
    if softcap:
        return torch.div(logits, softcap, out=out).tanh_().mul_(softcap / temperature)
    return torch.div(logits, temperature, out=out)


def _forward_kl(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, beta: float, ruled_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence per row of softened logits `a` from `b`, its gradient by `a`, a free tile; keeps `a`."""
    # c = q, d = p; then b = log(p / q). The gradient by a is q - p. This takes two exponentials per element.
    # `log_softmax` would take two more.
    torch.softmax(a, -1, out=c)
    torch.softmax(b, -1, out=d)
    # z - log p is one number per row, most accurate at the likeliest class.
    of_student, of_teacher = (z.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log_() for z, p in ((a, c), (b, d)))
    b.sub_(a).add_(of_student.sub_(of_teacher))
    divergences = torch.linalg.vecdot(b, d)
    # p = 0: log p - log q may be -inf - -inf = NaN, but its term is 0. A CPU first checks if there is any.
    if ruled_out and not (b.is_cpu and divergences.isfinite().all()):
        divergences = torch.linalg.vecdot(b.masked_fill_(d == 0, 0.0), d)
    return divergences.unsqueeze(-1), c.sub_(d), d


def _reverse_kl(
    a: Tensor, b: Tensor, c: Tensor, d: Tensor, beta: float, ruled_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # c = log q, d = log p; then c = log(q / p), d = q. The gradient by a is q (log(q / p) - KL).
    torch.log_softmax(a, -1, out=c)
    torch.log_softmax(b, -1, out=d)
    c.sub_(d)
    torch.softmax(a, -1, out=d)
    if ruled_out:
        c.masked_fill_(d == 0, 0.0)
    # b is free: the teacher's logits are not needed again.
    divergences = torch.mul(c, d, out=b).sum(-1, keepdim=True)
    return divergences, c.sub_(divergences).mul_(d), d


def _jsd(a: Tensor, b: Tensor, c: Tensor, d: Tensor, beta: float, ruled_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    # m = β p + (1 - β) q. The gradient by a is (1 - β) q (log(q / m) - KL(q || m)).
    log_teacher, log_student = math.log(beta), math.log1p(-beta)
    torch.log_softmax(a, -1, out=c)
    torch.log_softmax(b, -1, out=d)
    # b = log m
    torch.logaddexp(c.add_(log_student), d.add_(log_teacher), out=b)
    if ruled_out:
        # If both sides rule the class out, log m = -inf and the differences below would be NaN.
        b.masked_fill_(b == -math.inf, 0.0)
    # log p_s/m and log p_t/m, and β p_t
    c.sub_(b).sub_(log_student)
    d.sub_(b)
    # d holds log(β p / m) here: plus log m it is log(β p).
    b.add_(d).exp_()
    d.sub_(log_teacher)
    if ruled_out:
        d.masked_fill_(b == 0, 0.0)
    divergences = d.mul_(b).sum(-1, keepdim=True)
    # d = q from here on; β KL(p || m) is in `divergences` already.
    torch.softmax(a, -1, out=d)
    if ruled_out:
        c.masked_fill_(d == 0, 0.0)
    of_student = torch.mul(c, d, out=b).sum(-1, keepdim=True)
    divergences.add_(of_student, alpha=1 - beta)
    return divergences, c.sub_(of_student).mul_(d).mul_(1 - beta), d


def _add_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor, grad: Tensor, free: Tensor) -> Tensor:
    """Return the cross-entropy per row and add its weighted gradient to `grad`."""
    torch.softmax(logits, -1, out=free)
    # flat, because in two dimensions torch 2.13 has no deterministic kernel on CUDA
    places = labels + torch.arange(0, grad.numel(), grad.shape[-1], device=grad.device)
    # The probability of the likeliest class cannot underflow, but that of the label can:
    # logsumexp(z) - z_y, with logsumexp(z) = max z - log p_max.
    loss = (logits.amax(-1) - logits.view(-1)[places]).sub_(free.amax(-1).log_())
    # ∂CE/∂z = p - onehot, times the weight of the row, 0 for one without a label.
    grad.addcmul_(free, weights[:, None]).view(-1).scatter_add_(0, places, -weights)
    return loss
