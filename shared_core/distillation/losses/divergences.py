"""Divergences between a student's and a teacher's softened class probabilities.

`divergence` computes each of them; `DIVERGENCES` holds the sums by name. All leave out rows whose `mask` is False,
compute in float32 whatever the logits' dtype (float64 for T > 10 or T < 0.01, or float64 logits), give the teacher no
gradient, and give the sum and the count 0 with zero gradients if no row counts. Classes that both sides rule out (logit
-inf) change nothing. Several teachers are averaged first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.distillation.losses.regression import (
    bernoulli_kl_sum,
    hard_label_sum,
    huber_sum,
    logit_mse_sum,
    teacher_bounded_mse_sum,
)
from shared_core.distillation.losses.softened_pair import (
    check_fraction,
    check_temperature,
    compute_dtype,
    mean_of,
    soften,
)
from shared_core.errors import ConfigError

Softened = Literal["forward_kl", "reverse_kl", "jsd", "soft_cross_entropy"]


def softened_rows(kind: Softened, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return one divergence of each row from log-probabilities ``(..., C)`` of both sides, ``(...)``.

    Example:
        >>> round(softened_rows("forward_kl", torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()).item(), 4)
        0.6931
    """
    one = without_ends(kind, beta)
    if one == "soft_cross_entropy":
        # -Σ p_t log p_s
        return _expected(teacher.exp(), -student)
    if one == "forward_kl":
        # Σ p_t (log p_t - log p_s)
        return _expected(teacher.exp(), teacher - student)
    if one == "reverse_kl":
        return _expected(student.exp(), student - teacher)
    p_student, p_teacher = student.exp(), teacher.exp()
    # logaddexp has no gradient where both are -inf; the probabilities, which multiply these logs, are 0 there
    neither = torch.isneginf(student) & torch.isneginf(teacher)
    student, teacher = student.masked_fill(neither, 0.0), teacher.masked_fill(neither, 0.0)
    # log m = logaddexp(log β + log p_t, log(1 - β) + log p_s): in logs, for p underflows in float32 below e^-103.
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _expected(p_teacher, teacher - mixture) + (1 - beta) * _expected(p_student, student - mixture)


def without_ends(kind: str, beta: float) -> str:
    """Return the divergence itself, or the KL that `jsd` is by definition where beta is 0 or 1."""
    return kind if kind != "jsd" or beta not in (0, 1) else "reverse_kl" if beta else "forward_kl"


def _expected(probabilities: Tensor, values: Tensor) -> Tensor:
    # terms of probability 0 are taken out before they are multiplied: 0 times an infinite log is NaN
    return (probabilities * values.masked_fill(probabilities == 0, 0.0)).sum(dim=-1)


class Options(TypedDict, total=False):
    """The options of `divergence` that `reverse_kl` and `jsd` pass on."""

    temperature: float
    mask: Tensor | None
    teacher_log_probs: Tensor | None
    scale_by_temperature: bool


@overload
def divergence(
    kind: Softened,
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    reduction: Literal["sum"],
    beta: float = 0.5,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def divergence(
    kind: Softened,
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    reduction: Literal["mean"] = "mean",
    beta: float = 0.5,
    **options: Unpack[Options],
) -> Tensor: ...
def divergence(
    kind: Softened,
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    beta: float = 0.5,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return ``T²`` times a divergence of ``softmax(student / T)`` and ``softmax(teacher / T)``.

    ``forward_kl`` is :math:`KL(p_t \,\|\, p_s)`, ``reverse_kl`` :math:`KL(p_s \,\|\, p_t)`, ``jsd`` the generalised
    Jensen-Shannon divergence of `jsd`. ``soft_cross_entropy`` is :math:`-\sum p_t \log p_s`: the forward KL plus the
    teacher's entropy, with the same gradient and a value that does not go to 0.

    Args:
        kind: Which of the four.
        student_logits: ``(..., C)``, any float dtype.
        teacher_logits: ``(..., C)``, any float dtype and device.
        reduction: ``mean`` over the rows that count, or ``sum``: the sum and the number of those rows.
        beta: Of ``jsd``: the teacher's share of the mixture, in [0, 1].
        options: ``temperature`` T, finite and > 0 (2.0). ``mask`` ``(...)`` bool, True = the row counts; None counts
            all. ``teacher_log_probs`` ``(..., C)``: the teacher's log-probabilities at this temperature in place of its
            logits, as `mean_teacher` returns them; used as they are, never renormalised. ``scale_by_temperature``:
            multiply by ``T²``, which keeps the size of the gradient about the same for all T (True).

    Returns:
        The mean, or the sum and the count (int64), scalars; float32, or float64 for float64 logits.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2; see `reverse_kl` and `jsd` for the others.

    Example:
        >>> logits = torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3)
        >>> for kind in ("forward_kl", "reverse_kl", "jsd", "soft_cross_entropy"):
        ...     total, count = divergence(kind, *logits, temperature=1.0, reduction="sum")
        ...     round(total.item(), 4), count.item()
        (0.9834, 3)
        (1.3013, 3)
        (0.2686, 3)
        (2.0794, 3)
    """
    check_fraction(kind, "beta", beta)
    pair = soften("kd_loss" if kind == "forward_kl" else kind, student_logits, teacher_logits, **options)
    sums = pair.total(softened_rows(kind, pair.student, pair.teacher, beta))
    return sums if reduction == "sum" else mean_of(*sums)


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
    return divergence("forward_kl", student_logits, teacher_logits, temperature=temperature, mask=mask)


def kd_sum(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float = 2.0, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of `kd_loss` over counted rows, and their number, for a trainer that averages by itself.

    Args, Raises: As of `kd_loss`.

    Example:
        >>> import torch
        >>> total, count = kd_sum(torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3), temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.9834, 3)
    """
    return divergence("forward_kl", student_logits, teacher_logits, temperature=temperature, mask=mask, reduction="sum")


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    r"""Return :math:`T^2 \, KL(softmax(s / T) \,\|\, softmax(t / T))`, averaged over the rows that count.

    It seeks modes: a student too small for all of the teacher's distribution puts its mass where the teacher has
    most. Infinite, with a gradient that is NaN, if the teacher rules out (logit -inf) a class that the student does
    not; `jsd` stays finite there.

    Args, Returns, Raises: As of `divergence`.

    Source: Gu et al. (MiniLLM), 2023, arXiv:2306.08543, section 2; Agarwal et al. (GKD), 2023, arXiv:2306.13649.

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> round(reverse_kl(student, teacher, temperature=1.0).item(), 4)
        0.4338
    """
    return divergence("reverse_kl", student_logits, teacher_logits, **options)


def jsd(
    student_logits: Tensor, teacher_logits: Tensor | None = None, *, beta: float = 0.5, **options: Unpack[Options]
) -> Tensor:
    r"""Return the generalised Jensen-Shannon divergence times ``T²``, averaged over the rows that count.

    .. math:: \beta \, KL(p_t \,\|\, m) + (1 - \beta) \, KL(p_s \,\|\, m), \quad m = \beta p_t + (1 - \beta) p_s

    By definition beta = 0 is the forward KL (`kd_loss`) and beta = 1 the reverse KL (`reverse_kl`). That is not
    continuous: the formula itself goes to 0 at both ends, and only divided by beta (by 1 - beta) to the forward
    (reverse) KL. At beta = 0.5 it is symmetric and at most ``T² ln 2``. It is finite for 0 < beta < 1 whatever either
    side rules out.

    Args, Returns, Raises: As of `divergence`.

    Source: Agarwal et al. (GKD), 2023, arXiv:2306.13649, equation 1.

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> [round(jsd(student, teacher, beta=beta, temperature=1.0).item(), 4) for beta in (0, 0.5, 1)]
        [0.3278, 0.0895, 0.4338]
    """
    return divergence("jsd", student_logits, teacher_logits, beta=beta, **options)


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


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": partial(divergence, "forward_kl", reduction="sum"),
    "reverse_kl": partial(divergence, "reverse_kl", reduction="sum"),
    "jsd": partial(divergence, "jsd", reduction="sum"),
    "soft_cross_entropy": partial(divergence, "soft_cross_entropy", reduction="sum"),
    "hard_label": hard_label_sum,
    "logit_mse": logit_mse_sum,
    "bernoulli_kl": bernoulli_kl_sum,
    "huber": huber_sum,
    "teacher_bounded_mse": teacher_bounded_mse_sum,
}
"""By name, as the option `divergence` takes it: functions of both logits, which return a sum and what it counts."""


def mean_teacher(
    logits_list: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    temperature: float = 2.0,
    space: Literal["probabilities", "logits"] = "probabilities",
    *,
    multi_label: bool = False,
) -> Tensor:
    """Return the log-probabilities of the teachers' mean, for `teacher_log_probs` of the divergences.

    ``log(sum_k w_k softmax(t_k / T))``, or ``log softmax(sum_k w_k t_k / T)`` in the space of logits (a geometric
    mean of probabilities, which is small wherever one teacher says so).

    Args:
        logits_list: One ``(..., C)`` tensor a teacher, all of one shape; any float dtypes and devices.
        weights: One a teacher, finite and >= 0, not all 0; divided by their sum. None weighs all the same. A teacher
            of weight 0 is not read.
        temperature: ``T``, finite and > 0: the one that the divergence is then given.
        space: What is averaged.
        multi_label: The logits are of independent labels: sigmoid in place of softmax, for `bernoulli_kl`.

    Returns:
        ``(..., C)`` on the first teacher's device, without gradient; float32, or float64 for T > 10, T < 0.01 or a
        float64 teacher.

    Raises:
        ConfigError: If shapes, dtypes, weights, the temperature or the space are not as above.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2 (arithmetic or geometric mean of an ensemble); You et al.,
    2017, Learning from Multiple Teacher Networks.

    Example:
        >>> teachers = [torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0])]
        >>> [round(p, 4) for p in mean_teacher(teachers, [3, 1], temperature=1.0).exp().tolist()]
        [0.6904, 0.3096]
    """
    check_temperature("mean_teacher", temperature)
    if space not in ("probabilities", "logits"):
        raise ConfigError("mean_teacher", f"space must be 'probabilities' or 'logits', got {space!r}")
    if space == "logits":
        mean = mean_logits(logits_list, weights)
        scaled = mean.to(compute_dtype(mean.dtype, temperature)) / temperature
        # logsigmoid of the label's logit is the log-probability of yes; no softmax couples independent labels.
        return F.logsigmoid(scaled) if multi_label else F.log_softmax(scaled, dim=-1)
    read = _weighted("mean_teacher", logits_list, weights)
    dtype = compute_dtype(_widest(read), temperature)
    device = read[0][0].device
    # -inf is the neutral element of logaddexp. The mean is taken in logs: log Σ w p, with no underflow of p.
    total = torch.full_like(read[0][0], -torch.inf, dtype=dtype)
    for logits, weight in read:
        scaled = logits.detach().to(device, dtype) / temperature
        log_probs = F.logsigmoid(scaled) if multi_label else F.log_softmax(scaled, dim=-1)
        total = torch.logaddexp(total, log_probs + math.log(weight))
    return total


def mean_logits(logits_list: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return the weighted mean of the teachers' logits or regression outputs.

    Returns:
        ``(..., C)`` on the first teacher's device, without gradient, float32 at least.

    Example:
        >>> mean_logits([torch.tensor([2.0, 0.0]), torch.tensor([-2.0, 0.0])], [3, 1]).tolist()
        [1.0, 0.0]
    """
    read = _weighted("mean_logits", logits_list, weights)
    dtype, device = compute_dtype(_widest(read)), read[0][0].device
    return torch.stack([weight * logits.detach().to(device, dtype) for logits, weight in read]).sum(0)


def _weighted(where: str, logits_list: Sequence[Tensor], weights: Sequence[float] | None) -> list[tuple[Tensor, float]]:
    """Return the teachers whose weight is above 0, with weights that sum to 1."""
    teachers = list(logits_list)
    given = [1.0] * len(teachers) if weights is None else [float(weight) for weight in weights]
    if not teachers:
        raise ConfigError(where, "logits_list must hold at least one teacher, got none")
    if len(given) != len(teachers):
        raise ConfigError(where, f"weights must be {len(teachers)}, one a teacher, got {len(given)}")
    if not all(0 <= weight < math.inf for weight in given) or not sum(given) > 0:
        raise ConfigError(where, f"weights must be finite and at least 0, not all 0, got {given}")
    for number, logits in enumerate(teachers):
        if not logits.is_floating_point() or logits.shape != teachers[0].shape or not logits.ndim:
            raise ConfigError(
                where,
                f"logits_list must hold floating-point tensors (..., classes) of one shape, got {teachers[0].dtype} "
                f"{tuple(teachers[0].shape)} and, at {number}, {logits.dtype} {tuple(logits.shape)}",
            )
    total = sum(given)
    # A teacher of weight 0 is dropped here: log 0 would be -inf, and its NaN must not count.
    return [(logits, weight / total) for logits, weight in zip(teachers, given, strict=True) if weight > 0]


def _widest(read: list[tuple[Tensor, float]]) -> torch.dtype:
    dtype = read[0][0].dtype
    for logits, _ in read:
        dtype = torch.promote_types(dtype, logits.dtype)
    return dtype
