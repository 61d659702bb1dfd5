"""The soft-target loss from a teacher of whom only the k most probable classes and the rest's mass are known."""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.distillation.losses.divergences import Softened, softened_rows
from shared_core.distillation.losses.softened_pair import check_mask, check_temperature, compute_dtype
from shared_core.errors import ConfigError, nearest


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

    The mass outside the top k is never renormalised away: a student that spreads the tail's mass as it likes pays
    nothing, one that gives it another size does. With ``k = C`` this is `kd_loss`; merging classes can only make the
    divergence smaller, so for ``k < C`` it is a lower bound.

    Args:
        student_logits: ``(..., C)``, any float dtype.
        topk_indices: ``(..., k)`` integers, the teacher's classes, none twice in a row.
        topk_log_probs: ``(..., k)`` floats, its log-probabilities at this temperature: of all C classes.
        temperature: ``T``, finite and > 0, the one of `topk_log_probs`.
        mask: ``(...)`` bool, True = the row counts; other rows may hold anything. None counts all.
        tail_mass: ``(...)``, the probability outside the top k. None: what is left to 1, for log-probabilities of
            float32 or float64; a rest below their rounding is 0.
        divergence: ``forward_kl``, ``reverse_kl``, ``jsd`` (beta 0.5) or ``soft_cross_entropy`` of the k + 1 classes.
        scale_by_temperature: Multiply by ``T²``.

    Returns:
        The sum, float32 (float64 for float64 logits), with zero gradients if no row counts, and the count (int64).

    Source: Hinton et al., 2015, arXiv:1503.02531, of coarser classes; why the tail must stay: Anshumann et al., 2025,
    arXiv:2503.16870.

    Example:
        >>> log_probs, indices = torch.log_softmax(torch.tensor([[2.0, 1.0, 0.0]]), -1).topk(3)
        >>> total, count = kd_topk_sum(torch.zeros(1, 3), indices, log_probs, temperature=1.0)
        >>> round(total.item(), 4), count.item()
        (0.2662, 1)
    """
    check_temperature("kd_topk", temperature)
    if divergence not in get_args(Softened):
        near = nearest(divergence, get_args(Softened))
        raise ConfigError("kd_topk", f"divergence must be one of them, got {divergence!r}{near}")
    _check(student_logits, topk_indices, topk_log_probs, tail_mass, mask)
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
    """Return both sides' log-probabilities of the k classes and, last, of all the others together.

    Returns:
        The student's and the teacher's ``(..., k + 1)``, float32 or float64. If k is C the last is -inf in both.

    Example:
        >>> student, teacher = with_tail(torch.zeros(4), torch.tensor([2]), torch.tensor([0.7]).log())
        >>> [round(p, 4) for p in student.exp().tolist()], [round(p, 4) for p in teacher.exp().tolist()]
        ([0.25, 0.75], [0.7, 0.3])
    """
    classes, known = student_logits.shape[-1], topk_indices.shape[-1]
    # The student's log-probabilities of all C classes first: normalising over the k alone would drop the tail's mass.
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


def _check(
    student_logits: Tensor,
    topk_indices: Tensor,
    topk_log_probs: Tensor,
    tail_mass: Tensor | None,
    mask: Tensor | None,
) -> None:
    shape, known = tuple(student_logits.shape), tuple(topk_indices.shape)
    if not shape or known[:-1] != shape[:-1] or len(known) != len(shape) or not 1 <= known[-1] <= shape[-1]:
        raise ConfigError(
            "kd_topk",
            f"topk_indices must have the shape (..., k) with k at most the student's classes, student_logits {shape}, "
            f"got {known}",
        )
    if tuple(topk_log_probs.shape) != known:
        raise ConfigError(
            "kd_topk", f"topk_log_probs must have the shape of topk_indices, {known}, got {tuple(topk_log_probs.shape)}"
        )
    for name, value in (("student_logits", student_logits), ("topk_log_probs", topk_log_probs)):
        if not value.is_floating_point():
            raise ConfigError("kd_topk", f"{name} must be floating point, got {value.dtype}")
    if topk_indices.is_floating_point() or topk_indices.dtype == torch.bool:
        raise ConfigError("kd_topk", f"topk_indices must be integers, got {topk_indices.dtype}")
    if tail_mass is None and known[-1] < shape[-1] and topk_log_probs.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            "kd_topk",
            f"topk_log_probs must be float32 or float64 where tail_mass is not given, got {topk_log_probs.dtype}",
            "what is left to 1 would be rounding: store the tail's mass",
        )
    if tail_mass is not None and tuple(tail_mass.shape) != shape[:-1]:
        raise ConfigError("kd_topk", f"tail_mass must have the shape {shape[:-1]}, got {tuple(tail_mass.shape)}")
    check_mask("kd_topk", mask, shape[:-1])
