"""Divergences between a student's and a teacher's softened class probabilities.

`divergence_sum` computes each of them; `DIVERGENCES` holds the sums by name. All leave out rows whose `mask` is False,
compute in float32 whatever the logits' dtype (float64 for T > 10 or T < 0.01, or float64 logits), give the teacher no
gradient, and give the sum and the count 0 with zero gradients if no row counts. Classes that both sides rule out (logit
-inf) change nothing. Several teachers are averaged first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Unpack, get_args

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
    Options,
    check_fraction,
    check_mask,
    check_temperature,
    compute_dtype,
    mean_of,
    soften,
)
from shared_core.errors import ConfigError, nearest

Softened = Literal["forward_kl", "reverse_kl", "jsd", "soft_cross_entropy"]


def softened_rows(kind: Softened, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return one divergence of each row from log-probabilities ``(..., C)`` of both sides, ``(...)``."""
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


def divergence_sum(
    kind: Softened,
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    beta: float = 0.5,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    r"""Return ``T²`` times a divergence of ``softmax(student / T)`` and ``softmax(teacher / T)``, summed over rows.

    ``forward_kl`` is :math:`KL(p_t \,\|\, p_s)`, ``reverse_kl`` :math:`KL(p_s \,\|\, p_t)`, ``jsd`` the generalized
    Jensen-Shannon divergence of `jsd`. ``soft_cross_entropy`` is :math:`-\sum p_t \log p_s`: the forward KL plus the
    teacher's entropy, with the same gradient and a value that does not go to 0.

    Args:
        kind: Which of the four.
        student_logits: ``(..., C)``, any float dtype.
        teacher_logits: ``(..., C)``, any float dtype and device.
        beta: Of ``jsd``: the teacher's share of the mixture, in [0, 1].
        options: ``temperature`` T, finite and > 0 (2.0). ``mask`` ``(...)`` bool, True = the row counts; None counts
            all. ``teacher_log_probs`` ``(..., C)``: the teacher's log-probabilities at this temperature in place of its
            logits, as `mean_teacher` returns them; used as they are, never renormalized. ``scale_by_temperature``:
            multiply by ``T²``, which keeps the size of the gradient about the same for all T (True).

    Returns:
        The sum over the rows that count and their number (int64), scalars; float32, or float64 for float64 logits.

    Source: Hinton et al., 2015, arXiv:1503.02531, section 2; see `reverse_kl` and `jsd` for the others.

    Example:
        >>> logits = torch.zeros(3, 2), torch.tensor([[2.0, 0.0]] * 3)
        >>> for kind in ("forward_kl", "reverse_kl", "jsd", "soft_cross_entropy"):
        ...     total, count = divergence_sum(kind, *logits, temperature=1.0)
        ...     round(total.item(), 4), count.item()
        (0.9834, 3)
        (1.3013, 3)
        (0.2686, 3)
        (2.0794, 3)
    """
    check_fraction(kind, "beta", beta)
    pair = soften("kd_loss" if kind == "forward_kl" else kind, student_logits, teacher_logits, **options)
    return pair.total(softened_rows(kind, pair.student, pair.teacher, beta))


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
    return divergence_sum("forward_kl", student_logits, teacher_logits, temperature=temperature, mask=mask)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    r"""Return :math:`T^2 \, KL(softmax(s / T) \,\|\, softmax(t / T))`, averaged over the rows that count.

    It seeks modes: a student too small for all of the teacher's distribution puts its mass where the teacher has
    most. Infinite, with a gradient that is NaN, if the teacher rules out (logit -inf) a class that the student does
    not; `jsd` stays finite there.

    Args, Returns, Raises: As of `divergence_sum`.

    Source: Gu et al. (MiniLLM), 2023, arXiv:2306.08543, section 2; Agarwal et al. (GKD), 2023, arXiv:2306.13649.

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> round(reverse_kl(student, teacher, temperature=1.0).item(), 4)
        0.4338
    """
    return mean_of(*divergence_sum("reverse_kl", student_logits, teacher_logits, **options))


def jsd(
    student_logits: Tensor, teacher_logits: Tensor | None = None, *, beta: float = 0.5, **options: Unpack[Options]
) -> Tensor:
    r"""Return the generalized Jensen-Shannon divergence times ``T²``, averaged over the rows that count.

    .. math:: \beta \, KL(p_t \,\|\, m) + (1 - \beta) \, KL(p_s \,\|\, m), \quad m = \beta p_t + (1 - \beta) p_s

    By definition beta = 0 is the forward KL (`kd_loss`) and beta = 1 the reverse KL (`reverse_kl`). That is not
    continuous: the formula itself goes to 0 at both ends, and only divided by beta (by 1 - beta) to the forward
    (reverse) KL. At beta = 0.5 it is symmetric and at most ``T² ln 2``. It is finite for 0 < beta < 1 whatever either
    side rules out.

    Args, Returns, Raises: As of `divergence_sum`.

    Source: Agarwal et al. (GKD), 2023, arXiv:2306.13649, equation 1.

    Example:
        >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
        >>> [round(jsd(student, teacher, beta=beta, temperature=1.0).item(), 4) for beta in (0, 0.5, 1)]
        [0.3278, 0.0895, 0.4338]
    """
    return mean_of(*divergence_sum("jsd", student_logits, teacher_logits, beta=beta, **options))


DIVERGENCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "forward_kl": partial(divergence_sum, "forward_kl"),
    "reverse_kl": partial(divergence_sum, "reverse_kl"),
    "jsd": partial(divergence_sum, "jsd"),
    "soft_cross_entropy": partial(divergence_sum, "soft_cross_entropy"),
    "hard_label": hard_label_sum,
    "logit_mse": logit_mse_sum,
    "bernoulli_kl": bernoulli_kl_sum,
    "huber": huber_sum,
    "teacher_bounded_mse": teacher_bounded_mse_sum,
}
"""By name, as the option `divergence` takes it: functions of both logits and of `Options`, which return the sum over
the rows that count, and their number. What one needs beyond these has a default."""


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
    """Return the weighted mean of the teachers' logits or regression outputs; arguments as of `mean_teacher`."""
    read = _weighted("mean_logits", logits_list, weights)
    dtype, device = compute_dtype(_widest(read)), read[0][0].device
    return torch.stack([weight * logits.detach().to(device, dtype) for logits, weight in read]).sum(0)


def _weighted(where: str, logits_list: Sequence[Tensor], weights: Sequence[float] | None) -> list[tuple[Tensor, float]]:
    """Return the teachers whose weight is above 0, with weights that sum to 1."""
    teachers = list(logits_list)
    given = [1.0] * len(teachers) if weights is None else [float(weight) for weight in weights]
    wrong = ""
    if not teachers or len(given) != len(teachers):
        wrong = f"logits_list must hold at least one teacher, weights {len(teachers)}, one a teacher, got {len(given)}"
    elif not all(0 <= weight < math.inf for weight in given) or not sum(given) > 0:
        wrong = f"weights must be finite and at least 0, not all 0, got {given}"
    elif not all(each.is_floating_point() and each.shape == teachers[0].shape and each.ndim for each in teachers):
        got = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in teachers)
        wrong = f"logits_list must hold floating-point tensors (..., classes) of one shape, got {got}"
    if wrong:
        raise ConfigError(where, wrong)
    total = sum(given)
    # A teacher of weight 0 is dropped here: log 0 would be -inf, and its NaN must not count.
    return [(logits, weight / total) for logits, weight in zip(teachers, given, strict=True) if weight > 0]


def _widest(read: list[tuple[Tensor, float]]) -> torch.dtype:
    dtype = read[0][0].dtype
    for logits, _ in read:
        dtype = torch.promote_types(dtype, logits.dtype)
    return dtype


def kd_topk_sum(
    student_logits: Tensor,
    topk_indices: Tensor,
    topk_log_probs: Tensor,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    tail_mass: Tensor | None = None,
    divergence: Softened = "forward_kl",
    scale_by_temperature: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Return the loss over k classes and one more for all the others: its sum over counted rows, and their number.

    .. math:: T^2 \Big( \sum_{i \le k} p_i \log \frac{p_i}{q_i} + p_{tail} \log \frac{p_{tail}}{q_{tail}} \Big)

    The mass outside the top k is never renormalized away: a student that spreads the tail's mass as it likes pays
    nothing, one that gives it another size does. With ``k = C`` this is `kd_loss`; merging classes can only make the
    divergence smaller, so for ``k < C`` it is a lower bound.

    Options are those of `divergence_sum`, with beta 0.5. The teacher's k classes ``(..., k)`` are given with their
    log-probabilities among all C at this temperature; none may come twice in a row. `tail_mass` ``(...)`` is the
    probability of the others. None: what is left to 1, for log-probabilities of float32 or float64; a rest below their
    rounding is 0. Rows that do not count may hold anything.

    Source: Hinton et al., 2015, arXiv:1503.02531, of coarser classes; why the tail must stay: Anshumann et al., 2025,
    arXiv:2503.16870.

    Example:
        >>> log_probs, indices = torch.log_softmax(torch.tensor([[2.0, 1.0, 0.0]]), -1).topk(3)
        >>> total, count = kd_topk_sum(torch.zeros(1, 3), indices, log_probs, temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.2662, 1)
    """
    check_temperature("kd_topk", temperature)
    wrong = _wrong_topk(student_logits, topk_indices, topk_log_probs, tail_mass)
    if divergence not in get_args(Softened):
        wrong = f"divergence must be one of them, got {divergence!r}{nearest(divergence, get_args(Softened))}"
    if wrong:
        raise ConfigError("kd_topk", wrong)
    check_mask("kd_topk", mask, tuple(student_logits.shape[:-1]))
    device = student_logits.device
    topk_indices, topk_log_probs = topk_indices.to(device), topk_log_probs.detach().to(device)
    tail_mass = None if tail_mass is None else tail_mass.detach().to(device)
    if mask is not None:
        mask = mask.to(device)
        student_logits, topk_indices, topk_log_probs = student_logits[mask], topk_indices[mask], topk_log_probs[mask]
        tail_mass = None if tail_mass is None else tail_mass[mask]
    student, teacher = with_tail(student_logits, topk_indices, topk_log_probs, tail_mass, temperature=temperature)
    factor = temperature**2 if scale_by_temperature else 1.0
    total = factor * softened_rows(divergence, student, teacher).sum()
    count = torch.full((), student_logits.shape[:-1].numel(), dtype=torch.int64, device=device)
    return total.to(compute_dtype(student_logits.dtype)), count


def with_tail(
    student_logits: Tensor,
    topk_indices: Tensor,
    topk_log_probs: Tensor,
    tail_mass: Tensor | None = None,
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return both sides' log-probabilities ``(..., k + 1)``: last, of all other classes (-inf if k is C)."""
    classes, known = student_logits.shape[-1], topk_indices.shape[-1]
    # The student's log-probabilities of all C classes first: normalizing over the k alone would drop the tail's mass.
    dtype = compute_dtype(student_logits.dtype, temperature)
    log_q = F.log_softmax(student_logits.to(dtype) / temperature, dim=-1)
    indices = topk_indices.long()
    top = log_q.gather(-1, indices)
    log_p = topk_log_probs.to(dtype)
    if known == classes:
        # No tail: an extra class of probability 0 on both sides adds nothing to any divergence.
        nothing = torch.full_like(top[..., :1], -torch.inf)
        return torch.cat([top, nothing], -1), torch.cat([log_p, nothing], -1)
    rest = log_q.scatter(-1, indices, -torch.inf)
    # logsumexp has no gradient where the student rules out the whole rest
    empty = torch.isneginf(rest).all(-1, keepdim=True)
    tail = rest.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
    if tail_mass is None:
        # 1 - Σ p is a difference of near numbers: in float64, and below the stored dtype's epsilon it is only
        # rounding.
        left = 1 - topk_log_probs.double().exp().sum(-1, keepdim=True)
        left = left.masked_fill(left < torch.finfo(topk_log_probs.dtype).eps, 0.0)
    else:
        left = tail_mass.double().unsqueeze(-1).clamp(min=0)
    return torch.cat([top, tail], -1), torch.cat([log_p, left.log().to(dtype)], -1)


def _wrong_topk(student_logits: Tensor, indices: Tensor, log_probs: Tensor, tail_mass: Tensor | None) -> str:
    shape, known = tuple(student_logits.shape), tuple(indices.shape)
    if not shape or known[:-1] != shape[:-1] or len(known) != len(shape) or not 1 <= known[-1] <= shape[-1]:
        return f"topk_indices must be (..., k) with k at most the student's classes, of {shape}, got {known}"
    if tuple(log_probs.shape) != known:
        return f"topk_log_probs must have the shape of topk_indices, {known}, got {tuple(log_probs.shape)}"
    for name, value in (("student_logits", student_logits), ("topk_log_probs", log_probs)):
        if not value.is_floating_point():
            return f"{name} must be floating point, got {value.dtype}"
    if indices.is_floating_point() or indices.dtype == torch.bool:
        return f"topk_indices must be integers, got {indices.dtype}"
    if tail_mass is None:
        if known[-1] == shape[-1] or log_probs.dtype in (torch.float32, torch.float64):
            return ""
        rule = "topk_log_probs must be float32 or float64 where tail_mass is not given, got"
        return f"{rule} {log_probs.dtype}; what is left to 1 would be rounding: store the tail's mass"
    got = tuple(tail_mass.shape)
    return "" if got == shape[:-1] else f"tail_mass must have the shape {shape[:-1]}, got {got}"
