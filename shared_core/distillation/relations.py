"""Losses of how the examples of a batch lie to each other, whatever the widths of student and teacher.

All take ``(b, ...)`` features, flattened to ``(b, D)``, and depend on the whole batch: `relation_sum` computes them
over the examples of all processes. Over accumulated micro-batches they are computed per micro-batch: pairs across
micro-batches do not count, so 4 x 1 is not 1 x 4. Arithmetic is float32 (float64 for float64 features) under autocast
too, and does not depend on the features' scale. One example, or identical ones, give finite gradients.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.distillation.feature_gather import gather_features
from shared_core.distillation.feature_losses import positive_or_one, unit_rows
from shared_core.distillation.softened_pair import check_mask, compute_dtype
from shared_core.errors import ConfigError, nearest


class Relation(Protocol):
    """The signature that all of `RELATIONS` share."""

    def __call__(self, student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return the loss of a batch."""
        ...


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
    for name, weight in (("distance_weight", distance_weight), ("angle_weight", angle_weight)):
        if isinstance(weight, bool) or not (0 <= weight < math.inf):
            raise ConfigError(f"rkd_loss: {name} must be finite and at least 0, got {weight}")
    student, teacher = _features("rkd_loss", student_features, teacher_features, mask)
    if not angle_weight:
        return distance_weight * rkd_distance(student, teacher)
    return distance_weight * rkd_distance(student, teacher) + angle_weight * rkd_angle(student, teacher)


def rkd_distance(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return the Huber loss (delta 1) between the distances of examples, each side's divided by their mean.

    :math:`\frac{1}{b^2} \sum_{ij} l_1(\|s_i - s_j\| / \mu_s, \|t_i - t_j\| / \mu_t)`, the mean :math:`\mu` over pairs
    whose distance is not 0. Divided by all :math:`b^2` pairs, as the authors' code does; the b pairs of an example
    with itself add 0.

    Args, Returns, Raises: As of `rkd_loss`. Memory ``b²``.

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

    Args, Returns, Raises: As of `rkd_loss`. Memory ``b³ + b² D``: not for batches of thousands.

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

    Args, Returns, Raises: As of `rkd_loss`. Memory ``b²``.

    Source: Tung and Mori, 2019, arXiv:1907.09682, equations 2-4.

    Example:
        >>> round(similarity_preserving(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 2)).item(), 4)
        0.2929
    """
    student, teacher = _features("similarity_preserving", student_features, teacher_features, mask)
    with _without_autocast(student):
        ours, theirs = _gram(student), _gram(teacher)
    return _mean((unit_rows(ours) - unit_rows(theirs)).square().sum(), len(student) ** 2)


def cka_loss(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return ``1 - linear_cka``.

    Args, Returns, Raises: As of `rkd_loss`. Memory ``b²``.

    Source: Saha et al., 2022, arXiv:2203.08679; the similarity: Kornblith et al., 2019, arXiv:1905.00414.

    Example:
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(cka_loss(points, 2 * points.flip(1)).item(), 4)
        0.0
    """
    return 1 - linear_cka(student_features, teacher_features, mask=mask)


def linear_cka(student_features: Tensor, teacher_features: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return the centred kernel alignment with linear kernels, a similarity in [0, 1].

    :math:`\|X_t^T X_s\|_F^2 / (\|X_s^T X_s\|_F \|X_t^T X_t\|_F)` of features centred over the batch. It does not change
    under rotation, isotropic scaling or translation of either side. It is near 1 for any two sides of which b is not
    well above the widths.

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
        ours, theirs = _gram(_centred(student)), _gram(_centred(teacher))
    size: Tensor = torch.linalg.vector_norm(ours)
    other: Tensor = torch.linalg.vector_norm(theirs)
    similarity = ((ours * theirs).sum() / positive_or_one(size * other)).clamp(0, 1)
    return similarity + ((size == 0) & (other == 0)).to(similarity.dtype)


RELATIONS: dict[str, Relation] = {
    "rkd": rkd_loss,
    "rkd_distance": rkd_distance,
    "rkd_angle": rkd_angle,
    "similarity_preserving": similarity_preserving,
    "cka": cka_loss,
}


def relation_sum(
    student_features: Tensor,
    teacher_features: Tensor,
    *,
    relation: str = "rkd",
    mask: Tensor | None = None,
    gather: bool = True,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return a relation over the examples of all processes times those of this one, and their number.

    For a trainer that divides sums by counts over processes and micro-batches: the average is the loss itself,
    weighted by examples where micro-batches differ.

    Args:
        student_features: ``(b, ...)``, any float dtype.
        teacher_features: ``(b, ...)``, any float dtype, width and device. No gradient flows through it.
        relation: A key of `RELATIONS`.
        mask: ``(b,)`` bool, True = the example counts. None counts all.
        gather: Gather the features of all processes first (`gather_features`: every process must call this). False
            computes the loss of this process's examples alone.
        group: The process group to gather over; None is the default one.

    Returns:
        The sum and the count (int64), both scalars.

    Raises:
        ConfigError: If shapes, dtypes or the relation are not as above.

    Example:
        >>> total, count = relation_sum(torch.eye(3), torch.ones(3, 2), relation="similarity_preserving")
        >>> round(total.item(), 4), count.item()
        (0.8453, 3)
    """
    if relation not in RELATIONS:
        raise ConfigError(f"relation: relation must be a known one, got {relation!r}{nearest(relation, RELATIONS)}")
    student, teacher = _features(relation, student_features, teacher_features, mask)
    rows = len(student)
    if gather:
        student, teacher = gather_features(student, group=group), gather_features(teacher, group=group)
    # by the number, not the tensor: one that is reduced in place over processes would change the gradient
    total = RELATIONS[relation](student, teacher) * rows
    return total, torch.full((), rows, dtype=torch.int64, device=student.device)


def _features(where: str, student: Tensor, teacher: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both sides' counted examples, flattened, float32 at least, on one device."""
    for name, side in (("student_features", student), ("teacher_features", teacher)):
        if side.ndim < 2 or not side.is_floating_point():
            raise ConfigError(
                f"{where}: {name} must be floating point of shape (examples, ...), got {side.dtype} {tuple(side.shape)}"
            )
    if len(student) != len(teacher):
        raise ConfigError(
            f"{where}: teacher_features must hold the student's {len(student)} examples, got {len(teacher)}"
        )
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
    pairs = (distances > 0).sum().clamp(min=1)
    return distances / positive_or_one(distances.sum() / pairs)


def _angles(features: Tensor) -> Tensor:
    features = _unit_scale(features)
    directions = unit_rows(features.unsqueeze(0) - features.unsqueeze(1))
    with _without_autocast(features):
        return directions @ directions.transpose(1, 2)


def _gram(features: Tensor) -> Tensor:
    features = _unit_scale(features)
    return features @ features.T


def _centred(features: Tensor) -> Tensor:
    # from the first example on: identical ones are exactly 0 then, which minus a rounded mean they are not
    features = features - features[:1]
    return features - features.mean(0, keepdim=True) if len(features) else features


def _mean(total: Tensor, count: int) -> Tensor:
    return total / max(count, 1)


def _without_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
