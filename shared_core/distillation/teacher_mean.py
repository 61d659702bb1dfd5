"""What several teachers say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.distillation.softened_pair import check_temperature, compute_dtype
from shared_core.errors import ConfigError


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
        raise ConfigError(f"mean_teacher: space must be 'probabilities' or 'logits', got {space!r}")
    if space == "logits":
        mean = mean_logits(logits_list, weights)
        scaled = mean.to(compute_dtype(mean.dtype, temperature)) / temperature
        return F.logsigmoid(scaled) if multi_label else F.log_softmax(scaled, dim=-1)
    read = _weighted("mean_teacher", logits_list, weights)
    dtype = compute_dtype(_widest(read), temperature)
    device = read[0][0].device
    total = torch.full_like(read[0][0], -torch.inf, dtype=dtype)
    for logits, weight in read:
        scaled = logits.detach().to(device, dtype) / temperature
        log_probs = F.logsigmoid(scaled) if multi_label else F.log_softmax(scaled, dim=-1)
        total = torch.logaddexp(total, log_probs + math.log(weight))
    return total


def mean_logits(logits_list: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return the weighted mean of the teachers' logits or regression outputs.

    Args:
        logits_list: As of `mean_teacher`.
        weights: As of `mean_teacher`.

    Returns:
        ``(..., C)`` on the first teacher's device, without gradient, float32 at least.

    Raises:
        ConfigError: If shapes, dtypes or weights are not as above.

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
        raise ConfigError(f"{where}: logits_list must hold at least one teacher, got none")
    if len(given) != len(teachers):
        raise ConfigError(f"{where}: weights must be {len(teachers)}, one a teacher, got {len(given)}")
    if not all(0 <= weight < math.inf for weight in given) or not sum(given) > 0:
        raise ConfigError(f"{where}: weights must be finite and at least 0, not all 0, got {given}")
    for number, logits in enumerate(teachers):
        if not logits.is_floating_point() or logits.shape != teachers[0].shape or not logits.ndim:
            raise ConfigError(
                f"{where}: logits_list must hold floating-point tensors (..., classes) of one shape, got "
                f"{teachers[0].dtype} {tuple(teachers[0].shape)} and, at {number}, {logits.dtype} {tuple(logits.shape)}"
            )
    total = sum(given)
    return [(logits, weight / total) for logits, weight in zip(teachers, given, strict=True) if weight > 0]


def _widest(read: list[tuple[Tensor, float]]) -> torch.dtype:
    dtype = read[0][0].dtype
    for logits, _ in read:
        dtype = torch.promote_types(dtype, logits.dtype)
    return dtype
