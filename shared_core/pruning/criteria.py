"""Criteria that are functions of a weight alone: its magnitude, and an absolute threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from shared_core.errors import ConfigError


def magnitude(weight: Tensor) -> Tensor:
    """Return ``|w|`` as float32 (float64 for float64), a new tensor (Han et al. 2015, arXiv:1506.02626).

    Args:
        weight: Any shape, any floating dtype.

    Example:
        >>> magnitude(torch.tensor([-2.0, 0.5]))
        tensor([2.0000, 0.5000])
    """
    weight = weight.detach()
    return weight.abs() if weight.dtype == torch.float64 else weight.float().abs()


@torch.no_grad()
def below_threshold_mask(weight: Tensor, eps: float) -> Tensor:
    """Return which weights to keep: those with ``|w| < eps`` go, however many they are.

    Magnitudes are compared in float32 (float64 for float64). A NaN is kept: it has no magnitude.

    Args:
        weight: Floating point, any shape and device.
        eps: At least 0; 0 prunes nothing.

    Returns:
        bool tensor of the same shape and device, True = keep.

    Raises:
        ConfigError: If `eps` is negative or NaN.

    Example:
        >>> below_threshold_mask(torch.tensor([-0.5, 0.1, 0.2]), 0.2)
        tensor([ True, False,  True])
    """
    if not eps >= 0:
        raise ConfigError(f"below_threshold_mask: eps must be at least 0, got {eps!r}")
    scores = magnitude(weight)
    # in the type of the scores: a weight of float32 0.1 is not below 0.1
    return scores.lt(scores.new_tensor(eps)).logical_not_()
