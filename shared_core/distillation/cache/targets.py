"""What is kept of a teacher's logits: the k most probable classes at one temperature, and the mass of the others."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_core.distillation.softened_pair import check_temperature, compute_dtype
from shared_core.errors import ConfigError, TrainingError

_CHUNK_ELEMENTS = 2**24


class TopK(NamedTuple):
    """The k most probable classes of each row, most probable first, and the log-mass of all the others."""

    indices: Tensor
    log_probs: Tensor
    tail_log_mass: Tensor


class CachedTargets(NamedTuple):
    """A teacher's stored outputs in the layout of a batch: ``(B, L)``, or ``(B,)`` for one output an example.

    Attributes:
        indices: ``(..., k)`` int64, the classes.
        log_probs: ``(..., k)`` float32, their log-probabilities among all classes at the store's temperature.
        tail_log_mass: ``(...)`` float32, the log-probability of all other classes together; -inf where there is none.
        mask: ``(...)`` bool, True where a target is stored; the others hold zeros.
    """

    indices: Tensor
    log_probs: Tensor
    tail_log_mass: Tensor
    mask: Tensor

    @property
    def tail_mass(self) -> Tensor:
        """The probability of all other classes together, ``(...)``, as `kd_topk_sum` takes it."""
        return self.tail_log_mass.exp()

    def counted(self, mask: Tensor | None) -> Tensor:
        """Return which positions the loss runs over: those that count, all of which must be stored.

        Args:
            mask: ``(...)`` bool, True where a position counts for the loss; None: all that are stored.

        Raises:
            TrainingError: If one that counts has no target, or the shapes differ.

        Example:
            >>> zeros, stored = torch.zeros(1, 3), torch.tensor([[True, True, False]])
            >>> targets = CachedTargets(zeros.long(), zeros, zeros, stored)
            >>> targets.counted(torch.tensor([[False, True, False]])).tolist()
            [[False, True, False]]
        """
        if mask is None:
            return self.mask
        if mask.shape != self.mask.shape:
            raise TrainingError(
                f"cached teacher: the student must have outputs of the teacher's shape {tuple(self.mask.shape)}, got "
                f"{tuple(mask.shape)}"
            )
        mask = mask.to(self.mask.device)
        lacking = int((mask & ~self.mask).sum())
        if lacking:
            raise TrainingError(
                f"cached teacher: every position that counts must have a target, {lacking} of {int(mask.sum())} have "
                "none; write the cache without --labelled, or with these labels"
            )
        return mask


def top_k_targets(logits: Tensor, *, temperature: float, top_k: int) -> TopK:
    r"""Return the k most probable classes of :math:`softmax(z / T)` and the log-mass of the others.

    .. math:: \log p_i = z_i / T - \log \sum_j e^{z_j / T}, \quad tail = \log \sum_{i > k} p_i

    The tail is summed over its own classes, not taken as what the top k leave to 1, so a small one keeps its digits.
    With ``k = C`` the classes stay in their order and the tail is -inf.

    Args:
        logits: ``(rows, C)``, any float dtype.
        temperature: ``T``, finite and > 0. The arithmetic is float32, float64 for T > 10 or < 0.01.
        top_k: Classes to keep, 1..C.

    Returns:
        int64 ``(rows, k)``, float32 ``(rows, k)`` and float32 ``(rows,)``, on the logits' device.

    Raises:
        ConfigError: If an argument is not as above.
        TrainingError: If a row is no distribution: NaN, +inf, or -inf everywhere.

    Source: Hinton et al., 2015, arXiv:1503.02531, for T; Anshumann et al., 2025, arXiv:2503.16870, for why the tail
    must stay.

    Example:
        >>> top = top_k_targets(torch.tensor([[0.0, 2.0, 1.0]]), temperature=1.0, top_k=2)
        >>> top.indices.tolist(), [round(p, 3) for p in top.log_probs.exp()[0].tolist()]
        ([[1, 2]], [0.665, 0.245])
        >>> round(top.tail_log_mass.exp().item(), 3)
        0.09
    """
    check_temperature("cached teacher", temperature)
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ConfigError(
            f"cached teacher: logits must be floats of shape (rows, classes), got {logits.dtype} {tuple(logits.shape)}"
        )
    rows, classes = logits.shape
    if not 1 <= top_k <= classes:
        raise ConfigError(f"cached teacher: top_k must be between 1 and the {classes} classes, got {top_k}")
    chunk = max(1, _CHUNK_ELEMENTS // classes)  # copies of (rows, C) in float32 would outgrow the logits themselves
    parts = [_top_k(logits[at : at + chunk], temperature, top_k) for at in range(0, max(rows, 1), chunk)]
    return TopK(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _top_k(logits: Tensor, temperature: float, top_k: int) -> TopK:
    log_probs = F.log_softmax(logits.to(compute_dtype(logits.dtype, temperature)) / temperature, dim=-1)
    if torch.isnan(log_probs).any():
        raise TrainingError(
            "cached teacher: the teacher's logits must be finite or -inf, got NaN or +inf; run it in float32 or "
            "bfloat16"
        )
    if top_k == logits.shape[-1]:
        indices = torch.arange(top_k, device=logits.device).expand(len(logits), -1)
        return TopK(indices, log_probs.float(), log_probs.new_full((len(logits),), -torch.inf).float())
    top, indices = log_probs.topk(top_k, dim=-1)
    tail = log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1)
    return TopK(indices, top.float(), tail.float())


def to_stored(log_probs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log-probabilities in the dtype they are stored in; what is too small for float16 becomes its smallest.

    The error of float16 is at most ``2**-11 * |log p|``, and ``2**-12`` above -1: of a probability p, relative to it,
    the same. -inf, a class that the teacher rules out, stays.

    Example:
        >>> to_stored(torch.tensor([-1e6, -torch.inf, -0.5]), torch.float16).tolist()
        [-65504.0, -inf, -0.5]
    """
    low = torch.finfo(dtype).min
    return torch.where(torch.isneginf(log_probs), log_probs, log_probs.clamp(min=low)).to(dtype)


def normalised(log_probs: Tensor, tail_log_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return rounded log-probabilities and tail with their sum of probabilities, about 1 ± 2e-4, brought back to 1."""
    total = torch.logsumexp(torch.cat([log_probs, tail_log_mass.unsqueeze(-1)], -1), -1)
    return log_probs - total.unsqueeze(-1), tail_log_mass - total
