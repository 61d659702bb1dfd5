"""Losses on what lies inside the models: hidden states, attention maps, and relations between examples.

Relations take ``(b, ...)`` features, flattened to ``(b, D)``, whatever the widths of student and teacher, and depend on
the whole batch: `relation_sum` computes them over the examples of all processes. Over accumulated micro-batches they
are computed per micro-batch: pairs across micro-batches do not count, so 4 x 1 is not 1 x 4. Arithmetic is float32
(float64 for float64 features) under autocast too, and does not depend on the features' scale. One example, or identical
ones, give finite gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared_core.distillation.losses.softened_pair import check_mask, check_positive, compute_dtype, counted_rows
from shared_core.distributed.collectives import world_size
from shared_core.errors import ConfigError, nearest


def gather_features(features: Tensor) -> Tensor:
    """Return the rows of all processes, rank 0's first; the tensor itself with one process.

    Its backward sums the gradients of all processes' losses for the rows of this one. If each process computes the
    same loss of the gathered batch and the gradients are averaged over processes, as DDP does, the parameters get
    the gradient of one process on the joined batch. It is a collective, forward and backward: every process must
    call both. The numbers of rows ``(b, ...)`` may differ, even be 0.
    """
    if not features.ndim:
        raise ConfigError("gather_features", "features must have the shape (rows, ...), got a scalar")
    if world_size() == 1:
        return features
    gathered: Tensor = _Gather.apply(features)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    # torch.distributed.nn's all_gather (2.13) needs as many rows on every rank, which a last batch does not have

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ranks, own = dist.get_world_size(), dist.get_rank()
        # Ranks may have different numbers of rows: sizes first, then padding to the largest, cut off again after the
        # gather.
        size = torch.tensor([len(features), math.prod(features.shape[1:])], device=features.device)
        sizes = [torch.empty_like(size) for _ in range(ranks)]
        dist.all_gather(sizes, size)
        rows, widths = torch.stack(sizes).T.tolist()
        if len(set(widths)) > 1:
            raise ConfigError("gather_features", f"features must be as wide on every rank, got {widths}")
        # Padded rows are zeros, not `empty`: what is sent must be the same bytes in a repeated run.
        padded = features.new_zeros(max(rows), *features.shape[1:])
        padded[: len(features)] = features.detach()
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded)
        ctx.start, ctx.rows = sum(rows[:own]), rows[own]
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # all_reduce works in place, and autograd may still own `gradient`.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        # Every rank's loss depends on every row: the sum over ranks is the row's whole gradient.
        dist.all_reduce(gradient)
        return gradient[ctx.start : ctx.start + ctx.rows]


def hidden_mse(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Return the squared difference of hidden states ``(..., D)``, averaged over the width: ``(...)``, one a position.

    Source: Romero et al. (FitNets), 2014, arXiv:1412.6550, equation 3 (half the sum over the width in place of the
    mean); Jiao et al. (TinyBERT), 2019, arXiv:1909.10351, equation 8.

    Example:
        >>> hidden_mse(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.0]]))
        tensor([2.])
    """
    dtype = compute_dtype(student_hidden.dtype)
    return (student_hidden.to(dtype) - teacher_hidden.to(dtype)).square().mean(-1)


def hidden_cosine(student_hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Return 1 - the cosine between hidden states ``(..., D)``: ``(...)`` in [0, 2], one a position.

    A state of zeros has cosine 0 and no gradient.

    Source: Sanh et al. (DistilBERT), 2019, arXiv:1910.01108, section 3.

    Example:
        >>> hidden_cosine(torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([0.2000])
    """
    dtype = compute_dtype(student_hidden.dtype)
    return 1 - (unit_rows(student_hidden.to(dtype)) * unit_rows(teacher_hidden.to(dtype))).sum(-1)


def hidden_cosine_sum(
    student_hidden: Tensor, teacher_hidden: Tensor, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of `hidden_cosine` over positions whose ``mask`` is True (None: all), and their number."""
    names = ("student_hidden", "teacher_hidden")
    student, teacher, count = counted_rows("hidden_cosine", student_hidden, teacher_hidden, mask, names=names)
    return hidden_cosine(student, teacher).sum(), count


def attention_kl(student_attentions: Tensor, teacher_attentions: Tensor, *, average_heads: bool = False) -> Tensor:
    """Return ``KL(teacher || student)`` of attention maps, averaged over heads: ``(B, Q)``, one a query.

    Both are ``(B, H, Q, K)`` probabilities over K, any float dtype. The student's below 1e-8 (float16: 6e-5) count as
    that. A hidden key has probability 0 on both sides and adds nothing. `average_heads` averages both maps over their
    heads first, so that the numbers of heads may differ; otherwise head h is compared with head h.

    Source: Wang et al. (MiniLM), 2020, arXiv:2002.10957, equation 5.

    Example:
        >>> student, teacher = torch.full((1, 2, 3, 2), 0.5), torch.tensor([0.75, 0.25]).expand(1, 2, 3, 2)
        >>> attention_kl(student, teacher)
        tensor([[0.1308, 0.1308, 0.1308]])
    """
    if wrong := _unlike_attentions(student_attentions, teacher_attentions, average_heads):
        raise ConfigError("attention_kl", wrong)
    # torch's half-precision softmax rounds small probabilities to 0; below the floor nothing is asked of the student.
    # It also bounds the gradient 1 / p by what the dtype can hold.
    floor = torch.finfo(torch.float16).tiny if student_attentions.dtype == torch.float16 else 1e-8
    dtype = compute_dtype(student_attentions.dtype)
    student, teacher = student_attentions.to(dtype), teacher_attentions.to(dtype)
    if average_heads:
        # Heads are averaged as probabilities, before the log.
        student, teacher = student.mean(1, keepdim=True), teacher.mean(1, keepdim=True)
    ratio = teacher.clamp(min=floor).log() - student.clamp(min=floor).log()
    return (teacher * ratio).sum(-1).mean(1)


def unit_rows(rows: Tensor) -> Tensor:
    """Return each row (last dimension) divided by its L2 norm; a row of zeros stays 0 and has no gradient."""
    if not rows.numel():
        return rows
    # by the largest entry first, so that squares neither overflow nor vanish; the quotient does not depend on it
    rows = rows / positive_or_one(rows.detach().abs().amax(-1, keepdim=True))
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return (rows / positive_or_one(norms)).masked_fill(norms == 0, 0.0)


def positive_or_one(values: Tensor) -> Tensor:
    """Return the values with 1 for 0: what a norm that may be 0 is divided by."""
    return values.masked_fill(values == 0, 1.0)


def _unlike_attentions(student: Tensor, teacher: Tensor, average_heads: bool) -> str:
    ours, theirs, must = tuple(student.shape), tuple(teacher.shape), "teacher_attentions must have the"
    if len(ours) != 4 or len(theirs) != 4 or (ours[0], *ours[2:]) != (theirs[0], *theirs[2:]):
        return f"{must} batch, queries and keys of student_attentions (B, H, Q, K), {ours}, got {theirs}"
    if ours[1] != theirs[1] and not average_heads:
        return f"{must} student's {ours[1]} heads, got {theirs[1]}; set average_heads to compare the means over heads"
    dtypes = {"student_attentions": student.dtype, "teacher_attentions": teacher.dtype}
    return next((f"{x} must be floating point, got {dtypes[x]}" for x in dtypes if not dtypes[x].is_floating_point), "")


def rkd_loss(
    student_features: Tensor,
    teacher_features: Tensor,
    *,
    distance_weight: float = 1.0,
    angle_weight: float = 2.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return relational distillation: ``distance_weight * rkd_distance + angle_weight * rkd_angle``.

    Args:
        student_features: ``(b, ...)``, any float dtype.
        teacher_features: ``(b, ...)``, any float dtype, width and device. No gradient flows through it.
        distance_weight: >= 0.
        angle_weight: >= 0; the paper's ratio is 1 to 2. With 0 angles, and their memory, are not computed.
        mask: ``(b,)`` bool, True = the example counts. None counts all.

    Returns:
        Scalar, float32 (float64 for float64 features); 0.0 with zero gradients for fewer than two examples.

    Raises:
        ConfigError: If shapes, dtypes or weights are not as above.

    Source: Park et al., 2019, arXiv:1904.05068, section 3.2.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(rkd_loss(3 * points + 1, points).item(), 4)
        0.0
    """
    check_positive("rkd_loss", "distance_weight", distance_weight, or_zero=True)
    check_positive("rkd_loss", "angle_weight", angle_weight, or_zero=True)
    student, teacher = _features("rkd_loss", student_features, teacher_features, mask)
    if not angle_weight:
        return distance_weight * rkd_distance(student, teacher)
    return distance_weight * rkd_distance(student, teacher) + angle_weight * rkd_angle(student, teacher)


def rkd_distance(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return the Huber loss (delta 1) between the distances of examples, each side's divided by their mean.

    :math:`\frac{1}{b^2} \sum_{ij} l_1(\|s_i - s_j\| / \mu_s, \|t_i - t_j\| / \mu_t)`, the mean :math:`\mu` over pairs
    whose distance is not 0. Divided by all :math:`b^2` pairs, as the authors' code does; the b pairs of an example
    with itself add 0.

    Memory ``b²``.

    Source: Park et al., 2019, arXiv:1904.05068, equations 7-9.

    Example:
        >>> student, teacher = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[0.0], [1.0], [1.0]])
        >>> round(rkd_distance(student, teacher).item(), 4)
        0.0972
    """
    student, teacher = _features("rkd_distance", student_features, teacher_features, mask)
    return _mean(F.smooth_l1_loss(_distances(student), _distances(teacher), reduction="sum"), len(student) ** 2)


def rkd_angle(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return the Huber loss (delta 1) between the cosines of the angles at every example to every two others.

    The mean over all :math:`b^3` triples, as in the authors' code; where two of three examples are the same the
    cosine is 0.

    Memory ``b³ + b² D``: not for batches of thousands.

    Source: Park et al., 2019, arXiv:1904.05068, equations 10-11.

    Example:
        >>> corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> line = torch.tensor([[0.0], [1.0], [2.0]])
        >>> round(rkd_angle(corner, line).item(), 4)
        0.1296
    """
    student, teacher = _features("rkd_angle", student_features, teacher_features, mask)
    return _mean(F.smooth_l1_loss(_angles(student), _angles(teacher), reduction="sum"), len(student) ** 3)


def similarity_preserving(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return :math:`\|G_s - G_t\|_F^2 / b^2` of the Gram matrices, their rows divided by their L2 norms.

    Memory ``b²``.

    Source: Tung and Mori, 2019, arXiv:1907.09682, equations 2-4.

    Example:
        >>> round(similarity_preserving(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 2)).item(), 4)
        0.2929
    """
    student, teacher = _features("similarity_preserving", student_features, teacher_features, mask)
    # Autocast would take the product of `_gram` in half precision.
    with _without_autocast(student):
        ours, theirs = _gram(student), _gram(teacher)
    # G = X Xᵀ, then each row over its L2 norm (equation 3): (b, b) whatever the widths.
    return _mean((unit_rows(ours) - unit_rows(theirs)).square().sum(), len(student) ** 2)


def cka_loss(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return ``1 - linear_cka``.

    Memory ``b²``.

    Source: Saha et al., 2022, arXiv:2203.08679; the similarity: Kornblith et al., 2019, arXiv:1905.00414.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(cka_loss(points, 2 * points.flip(1)).item(), 4)
        0.0
    """
    return 1 - linear_cka(student_features, teacher_features, mask=mask)


def linear_cka(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return the centered kernel alignment with linear kernels, a similarity in [0, 1].

    :math:`\|X_t^T X_s\|_F^2 / (\|X_s^T X_s\|_F \|X_t^T X_t\|_F)` of features centered over the batch. It does not
    change under rotation, isotropic scaling or translation of either side. It is near 1 for any two sides of which b is
    not well above the widths.

    Args:
        student_features: ``(b, ...)``, any float dtype.
        teacher_features: ``(b, ...)``, any float dtype, width and device. No gradient flows through it.
        mask: ``(b,)`` bool, True = the example counts. None counts all.

    Returns:
        Scalar, float32 (float64 for float64 features). With no variation on one side 0, on both (one example, or
        none) 1, in either case without gradient.

    Raises:
        ConfigError: If shapes or dtypes are not as above.

    Source: Kornblith et al., 2019, arXiv:1905.00414, section 3.

    Example:
        >>> line = torch.tensor([[0.0], [1.0], [2.0]])
        >>> round(linear_cka(line, line**2).item(), 4)
        0.9231
    """
    student, teacher = _features("linear_cka", student_features, teacher_features, mask)
    with _without_autocast(student):
        ours, theirs = _gram(_centered(student)), _gram(_centered(teacher))
    # By Gram matrices: ‖X_tᵀ X_s‖² = ⟨X_s X_sᵀ, X_t X_tᵀ⟩, so two (b, b) products serve in place of one (D, D) each.
    size: Tensor = torch.linalg.vector_norm(ours)
    other: Tensor = torch.linalg.vector_norm(theirs)
    # Rounding may give 1 + 1e-7, and the loss 1 - similarity must not be negative.
    similarity = ((ours * theirs).sum() / positive_or_one(size * other)).clamp(0, 1)
    # Both sides constant: nothing differs, so the similarity is 1 by definition, without a gradient.
    return similarity + ((size == 0) & (other == 0)).to(similarity.dtype)


RELATIONS: dict[str, Callable[..., Tensor]] = {
    "rkd": rkd_loss,
    "rkd_distance": rkd_distance,
    "rkd_angle": rkd_angle,
    "similarity_preserving": similarity_preserving,
    "cka": cka_loss,
}


def relation_sum(
    student_features: Tensor, teacher_features: Tensor, *, relation: str = "rkd", mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a relation over the examples of all processes times those of this one, and their number.

    For a trainer that divides sums by counts over processes and micro-batches: the average is the loss itself,
    weighted by examples where micro-batches differ. Every process must call this: it gathers the features of all.

    Example:
        >>> total, count = relation_sum(torch.eye(3), torch.ones(3, 2), relation="similarity_preserving")
        >>> round(total.item(), 4), count.item()
        (0.8453, 3)
    """
    if relation not in RELATIONS:
        raise ConfigError("relation", f"relation must be a known one, got {relation!r}{nearest(relation, RELATIONS)}")
    student, teacher = _features(relation, student_features, teacher_features, mask)
    rows = len(student)
    student, teacher = gather_features(student), gather_features(teacher)
    # by the number, not the tensor: one that is reduced in place over processes would change the gradient
    total = RELATIONS[relation](student, teacher) * rows
    return total, torch.full((), rows, dtype=torch.int64, device=student.device)


def _features(where: str, student: Tensor, teacher: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both sides' counted examples, flattened, float32 at least, on one device."""
    wrong = [
        f"{name} must be floating point of shape (examples, ...), got {side.dtype} {tuple(side.shape)}"
        for name, side in (("student_features", student), ("teacher_features", teacher))
        if side.ndim < 2 or not side.is_floating_point()
    ]
    if not wrong and len(student) != len(teacher):
        wrong = [f"teacher_features must hold the student's {len(student)} examples, got {len(teacher)}"]
    if wrong:
        raise ConfigError(where, wrong[0])
    check_mask(where, mask, (len(student),))
    dtype = compute_dtype(student.dtype)
    teacher = teacher.detach().to(student.device)
    if mask is not None:
        mask = mask.to(student.device)
        student, teacher = student[mask], teacher[mask]
    return student.flatten(1).to(dtype), teacher.flatten(1).to(dtype)


def _unit_scale(features: Tensor) -> Tensor:
    """Return the features over their largest: relations do not depend on it, squares of what is left fit the dtype."""
    if not features.numel():
        return features
    return features / positive_or_one(features.detach().abs().amax())


def _distances(features: Tensor) -> Tensor:
    # by differences, not by the Gram matrix, whose cancellation loses near pairs; cdist's gradient at 0 is 0
    distances = torch.cdist(_unit_scale(features), _unit_scale(features), compute_mode="donot_use_mm_for_euclid_dist")
    # The paper's μ is over pairs that differ, so the zeros of the diagonal are left out.
    pairs = (distances > 0).sum().clamp(min=1)
    return distances / positive_or_one(distances.sum() / pairs)


def _angles(features: Tensor) -> Tensor:
    features = _unit_scale(features)
    # (b, b, D): [i, j] is the unit vector of x_i - x_j, zeros where both are the same example.
    directions = unit_rows(features.unsqueeze(0) - features.unsqueeze(1))
    with _without_autocast(features):
        # [i, j, k] is the cosine of the angle at x_i between x_j and x_k.
        return directions @ directions.transpose(1, 2)


def _gram(features: Tensor) -> Tensor:
    features = _unit_scale(features)
    return features @ features.T


def _centered(features: Tensor) -> Tensor:
    # from the first example on: identical ones are exactly 0 then, which minus a rounded mean they are not
    features = features - features[:1]
    return features - features.mean(0, keepdim=True) if len(features) else features


def _mean(total: Tensor, count: int) -> Tensor:
    return total / max(count, 1)


def _without_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
