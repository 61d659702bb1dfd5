"""N:M sparsity: N of every M neighbours along the input axis are kept."""

from __future__ import annotations

import torch
from eff_kernels.masks import n_of_m_mask
from torch import Tensor

from shared_core.errors import ConfigError


@torch.no_grad()
def nm_mask(weight: Tensor, n: int, m: int, *, axis: int = 1) -> Tensor:
    """Return which elements to keep: of every `m` neighbours along the input axis the `n` of largest magnitude.

    Among equal magnitudes the lowest index is kept (Mishra et al. 2021, arXiv:2104.08378: 2:4).

    Args:
        weight: Floating point scores or weights, two or more dimensions, without NaN.
        n: How many of each group stay, from 1 to `m`.
        m: Size of a group, at least 1; divides the input axis.
        axis: The input axis: 1 for `torch.nn.Linear` and convolutions, 0 for transposed ones.

    Returns:
        bool tensor of the same shape and device, True = keep; each group holds exactly `n`.

    Raises:
        ConfigError: If `n` or `m` is out of range, `m` does not divide the axis, or an element is NaN.

    Example:
        >>> nm_mask(torch.tensor([[0.1, -3.0, 2.0, 2.0]]), 2, 4)
        tensor([[False,  True,  True, False]])
    """
    if not (isinstance(n, int) and isinstance(m, int) and 1 <= n <= m):
        raise ConfigError(f"nm_mask: n must be in [1, m], both whole numbers, got n = {n!r}, m = {m!r}")
    if weight.ndim < 2 or not -weight.ndim <= axis < weight.ndim or weight.shape[axis] % m:
        raise ConfigError(
            f"nm_mask: the input axis must be a multiple of m = {m}, got axis {axis} of shape {tuple(weight.shape)}"
        )
    return nm_mask_of_scores(weight.detach().abs(), n, m, axis=axis)


@torch.no_grad()
def nm_mask_of_scores(scores: Tensor, n: int, m: int, *, axis: int) -> Tensor:
    """Return `nm_mask` of scores, whose sign counts: the `n` largest of each group stay."""
    try:
        return n_of_m_mask(scores, n, m, axis)
    except ValueError as error:
        raise ConfigError("nm_mask: scores must not be NaN") from error
