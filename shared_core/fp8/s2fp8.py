"""S2FP8: e5m2 after a shift and a squeeze of log2|x| that fit the tensor's own spread; no loss scaling."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shared_core.numerics import round_to

_MAX_EXPONENT = 15.0  # log2 of the largest power of two in e5m2
# Below this, m - µ is the rounding error of a mean over equal magnitudes (some 2^-41), not a spread.
_NO_SPREAD = 2.0**-32


class Squeezed(NamedTuple):
    """A tensor in S2FP8: ``x = sign(y)·(2^-beta·|y|)^(1/alpha)``.

    Args:
        values: y, values of e5m2 in float64; NaN and infinities are those of the tensor.
        alpha: The squeeze, float64 of no dimensions, positive.
        beta: The shift, likewise.
    """

    values: Tensor
    alpha: Tensor
    beta: Tensor


def squeeze(x: Tensor) -> Squeezed:
    """Return ``|y| = 2^beta·|x|^alpha`` with the sign of x, rounded to e5m2.

    ``alpha = 15/(m - µ)`` and ``beta = -alpha·µ`` with µ and m the mean and the maximum of log2|x|: the mean of log2|y|
    is 0 and its maximum 15. Where all magnitudes are equal, alpha is 1 and beta ``15 - m``. Zeros, NaN and infinities
    count in neither µ nor m, and stay what they are.

    Args:
        x: Any shape; float64, float32, bfloat16 or float16.

    Source: Cambier et al. 2020, *Shifted and Squeezed 8-bit Floating Point Format for Low-Precision Training of Deep
    Neural Networks*, arXiv:2001.05674.

    Example:
        >>> values, alpha, beta = squeeze(torch.tensor([1.0, 4.0, -16.0, 0.0]))
        >>> values.tolist(), alpha.item(), beta.item()  # log2: 0, 2, 4, so µ = 2 and m = 4
        ([3.0517578125e-05, 1.0, -32768.0, 0.0], 7.5, -15.0)
    """
    # float64 throughout: alpha, unbounded, multiplies the error of the logarithm.
    x = x.detach().double()
    used = x.isfinite() & (x != 0)
    log = x.abs().log2()
    known = torch.where(used, log, 0.0)
    mean = known.sum() / used.sum().clamp_min(1)
    largest = torch.where(used, log, -math.inf).amax() if x.numel() else torch.zeros_like(mean)
    largest = torch.where(largest.isfinite(), largest, 0.0)  # nothing but zeros, NaN and infinities
    spread = largest - mean
    flat = spread <= _NO_SPREAD
    alpha = torch.where(flat, 1.0, _MAX_EXPONENT / spread.clamp_min(_NO_SPREAD))
    beta = torch.where(flat, _MAX_EXPONENT - largest, -alpha * mean)
    y = torch.where(used, (alpha * known + beta).exp2().copysign(x), x)
    return Squeezed(torch.where(used, round_to(y, "fp8_e5m2"), x), alpha, beta)


def unsqueeze(squeezed: Squeezed) -> Tensor:
    """Return the values of a tensor in S2FP8 in float64.

    Example:
        >>> unsqueeze(squeeze(torch.tensor([1.0, 4.0, -16.0, 0.0]))).tolist()
        [1.0, 4.0, -16.0, 0.0]
    """
    y, alpha, beta = squeezed
    used = y.isfinite() & (y != 0)
    log = torch.where(used, y, 1.0).abs().log2()
    return torch.where(used, ((log - beta) / alpha).exp2().copysign(y), y)


class S2fp8Cast:
    """Every operand, with an alpha and a beta of its own for each product; nothing is remembered."""

    def cast(self, matrix: Tensor, role: str, record: bool) -> Tensor:
        """Return the values that S2FP8 holds.

        Example:
            >>> S2fp8Cast().cast(torch.tensor([[1e-20, 1e-21, 2e-21]]), "gradient", False).tolist()
            [[9.999999682655225e-21, 1.0062437076670382e-21, 2.017168982951314e-21]]
        """
        values = unsqueeze(squeeze(matrix))
        return values if matrix.dtype == torch.float64 else values.float()
