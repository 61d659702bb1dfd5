"""Weight sharing: every nonzero weight of a tensor becomes the centroid of its cluster; zeros stay zeros."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared_core.errors import ConfigError, TrainingError
from shared_core.pruning.compression.kmeans import kmeans_1d

SHARED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MIN_BITS, MAX_BITS = 2, 8
_PIECE = 1 << 20
CACHED = 1 << 18
"""Elements at a time in a training step: what is made in between stays in cache, four times as fast."""


@dataclass(frozen=True)
class SharedValues:
    """A tensor as codes into a short list of values.

    `codes` has the tensor's shape, on CPU, uint8 or int16: 0 for a zero, i for ``values[i - 1]``. `values` has its
    dtype, shape (k,), ascending, each once.
    """

    codes: Tensor
    values: Tensor

    def weight(self) -> Tensor:
        """Return the tensor whose weights are shared, on CPU."""
        weight = torch.empty(self.codes.shape, dtype=self.values.dtype)
        put_values_(weight, self.codes, self.values)
        return weight


def check_bits(bits: object, where: str) -> int:
    """Return `bits` if it is a whole number in [2, 8].

    Raises:
        ConfigError: If not.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not MIN_BITS <= bits <= MAX_BITS:
        raise ConfigError(f"{where}: bits must be a whole number in [{MIN_BITS}, {MAX_BITS}], got {bits!r}")
    return bits


def wide(tensor: Tensor) -> NDArray[np.floating]:
    """Return a floating-point tensor's elements, flat, in a dtype that numpy has; exactly the same numbers."""
    flat = tensor.detach().to("cpu").reshape(-1)
    values: NDArray[np.floating] = (flat if flat.dtype == torch.float64 else flat.float()).numpy()
    return values


@torch.no_grad()
def share_values(weight: Tensor, bits: int, *, name: str = "weight") -> SharedValues:
    """Return a tensor whose nonzero weights share at most ``2**bits`` values, found by k-means; zeros stay zeros.

    A tensor that has no more distinct nonzero values than that keeps them all: sharing again changes nothing. Zero is
    no cluster, so all of them serve the weights that are left after pruning (Han, Mao and Dally 2016,
    arXiv:1510.00149, section 3).

    Args:
        weight: float16, bfloat16, float32 or float64, any shape and device.
        bits: Of a code, in [2, 8].
        name: For errors.

    Returns:
        Codes and values. Centroids are rounded to the weight's dtype, those that become equal are one.

    Raises:
        ConfigError: If `bits` is out of range or the dtype is another.
        TrainingError: If a weight is NaN or infinite.

    Example:
        >>> shared = share_values(torch.tensor([0.0, 1.0, 1.1, -1.0, 0.0, 3.0, 5.0]), 2)
        >>> shared.values, shared.codes
        (tensor([-1.0000,  1.0500,  3.0000,  5.0000]), tensor([0, 2, 2, 1, 0, 3, 4], dtype=torch.uint8))
    """
    check_bits(bits, name)
    if weight.dtype not in SHARED_DTYPES:
        raise ConfigError(f"{name}: weight must be float16, bfloat16, float32 or float64, got {weight.dtype}")
    flat = wide(weight)
    live = flat != 0
    ordered = flat[live]
    if not np.isfinite(ordered).all():
        bad = int((~np.isfinite(flat)).argmax())
        raise TrainingError(
            f"{name}: weights must be finite to share values, got {flat[bad]} at flat index {bad}; training has "
            "diverged, or this tensor is no weight: leave it out"
        )
    ordered.sort()
    if not len(ordered):
        codes = torch.zeros(weight.shape, dtype=torch.uint8)
        return SharedValues(codes, torch.empty(0, dtype=weight.dtype))
    centroids, thresholds = kmeans_1d(ordered, 2**bits)
    # adding zero turns -0.0, which a mean may round to, into +0.0
    values, index = torch.unique_consecutive(torch.from_numpy(centroids).to(weight.dtype) + 0.0, return_inverse=True)
    number = 1 + index.numpy()
    narrow = np.uint8 if len(values) < 256 else np.int16
    codes_of = np.zeros(len(flat), dtype=narrow)
    for first in range(0, len(flat), _PIECE):
        piece = slice(first, first + _PIECE)
        clusters = np.searchsorted(thresholds, flat[piece], side="right")
        codes_of[piece] = np.where(live[piece], number[clusters], 0)
    return SharedValues(torch.from_numpy(codes_of).view(weight.shape), values)


def summed_by_code(gradient: Tensor, codes: Tensor, num_values: int) -> Tensor:
    """Return the gradient of each shared value: the sum over the weights that have it, in float64.

    ``∂L/∂c_k = Σ_ij ∂L/∂w_ij · 1(I_ij = k)`` (Han, Mao and Dally 2016, arXiv:1510.00149, equation 3). The order of the
    sum is fixed on CPU and on CUDA, so equal gradients give equal sums on every rank.

    Args:
        gradient: Floating point, of the weight's shape.
        codes: Integer, the same shape and device: 0 for a zero, whose gradient goes nowhere, i for value i - 1.
        num_values: k.

    Returns:
        float64, shape (k,), on the gradient's device.

    Example:
        >>> summed_by_code(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 2, 1]), 2)
        tensor([9., 4.], dtype=torch.float64)
    """
    flat, places = gradient.detach().reshape(-1), codes.reshape(-1)
    if flat.is_cpu and flat.numel() <= CACHED:
        return torch.bincount(places, weights=flat.double(), minlength=num_values + 1)[1:]
    sums = torch.zeros(num_values + 1, dtype=torch.float64, device=flat.device)
    if not flat.is_cpu:
        # bincount and index_add_ add in no fixed order on CUDA; this sorts first
        return sums.index_put_((places.long(),), flat.double(), accumulate=True)[1:]
    for part, of in zip(torch.split(flat, CACHED), torch.split(places, CACHED), strict=True):
        sums += torch.bincount(of, weights=part.double(), minlength=num_values + 1)
    return sums[1:]


@torch.no_grad()
def put_values_(weight: Tensor, codes: Tensor, values: Tensor) -> None:
    """Give every weight the value that its code says, in place, and +0.0 where the code is 0.

    Args:
        weight: Floating point, any layout; parameters too.
        codes: Integer, of the same shape and device.
        values: Of the weight's dtype, shape (k,), on its device.

    Example:
        >>> weight = torch.ones(4)
        >>> put_values_(weight, torch.tensor([2, 0, 1, 2]), torch.tensor([0.5, -1.0]))
        >>> weight
        tensor([-1.0000,  0.0000,  0.5000, -1.0000])
    """
    table, places = torch.cat([values.new_zeros(1), values]), codes.reshape(-1)
    flat = weight.detach().reshape(-1)
    if flat.is_cpu and flat.numel() > CACHED:
        for part, of in zip(torch.split(flat, CACHED), torch.split(places, CACHED), strict=True):
            torch.index_select(table, 0, of.int(), out=part)
    else:
        torch.index_select(table, 0, places.int(), out=flat)
    if flat.data_ptr() != weight.data_ptr():
        weight.detach().copy_(flat.view(weight.shape))
