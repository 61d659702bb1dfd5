"""Unscaling gradients, with what loss scaling wants to know of them found in the same pass.

On CUDA one Triton launch reads and writes each gradient once; elsewhere torch's fused operator unscales, and the
question is answered by a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eff_kernels.loss_scaling import (
    INFINITY,
    MAGNITUDE,
    NUM_BINS,
    Magnitudes,
    as_magnitudes,
    bits_of_threshold,
    count_magnitudes_of,
)
from eff_kernels.tensor_table import runs_in_one_launch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def unscale_with_largest_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor:
    """Multiply gradients in place and return the largest magnitude that they had, 0 where one was not finite.

    Args:
        grads: Floating point, any shapes, all on one device and of one dtype; DTensors too, whose local part counts.
        found_inf: float32 ``[1]``, set to 1 where an element is not finite, else left.
        inv_scale: float32 ``[1]``.

    Returns:
        float32 scalar on the device of the gradients.

    Example:
        >>> grad, found_inf = torch.tensor([4.0, -8.0]), torch.zeros(1)
        >>> unscale_with_largest_([grad], found_inf, torch.tensor([0.5])), grad, found_inf
        (tensor(8.), tensor([ 2., -4.]), tensor([0.]))
    """
    if _runs_in_one_launch(grads, found_inf, inv_scale):
        _, rest = unscale_and_scan_(list(grads), found_inf, inv_scale, 0)
        bits = rest[:, 2].max().to(torch.int32)
        return torch.where(bits < INFINITY, bits, 0).view(torch.float32)
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    norms = torch._foreach_norm([grad for grad in local if grad.numel()] or [inv_scale.new_zeros(1)], math.inf)
    # Inf and NaN have a flag of their own; NaN in a maximum over processes would be undefined
    largest = torch.stack(list(norms)).max().float().nan_to_num(nan=0.0, posinf=0.0)
    torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)
    return largest


@torch.no_grad()
def unscale_and_count_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, threshold: float) -> Magnitudes:
    """Multiply gradients in place and return `count_magnitudes` of the products.

    For loops that count in every step: ``loss_scale`` counts once in `telemetry_every` steps, by `count_magnitudes`.

    Args:
        grads: Floating point, any shapes, at least one, all on one device and of one dtype.
        found_inf: float32 ``[1]``, set to 1 where an element is not finite before, else left.
        inv_scale: float32 ``[1]``.
        threshold: What is nonzero and below it counts as small; a normal float32, > 0.

    Raises:
        ValueError: If the threshold is not such a number.

    Example:
        >>> grad, found_inf = torch.tensor([0.0, 2.0, -8.0]), torch.zeros(1)
        >>> counts = unscale_and_count_([grad], found_inf, torch.tensor([0.25]), 1.0)
        >>> counts.zeros.item(), counts.small.item(), counts.amax.item(), grad
        (1, 1, 2.0, tensor([ 0.0000,  0.5000, -2.0000]))
    """
    bound = bits_of_threshold(threshold)
    if _runs_in_one_launch(grads, found_inf, inv_scale):
        return as_magnitudes(*unscale_and_scan_(list(grads), found_inf, inv_scale, bound))
    return as_magnitudes(*_unscale_and_scan(list(grads), found_inf, inv_scale, bound))


def _runs_in_one_launch(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> bool:
    return runs_in_one_launch(grads, [found_inf, inv_scale]) and all(grad.dtype in _DTYPES for grad in grads)


@torch.library.custom_op("eff_kernels::unscale_and_scan_", mutates_args={"grads", "found_inf"})
def unscale_and_scan_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Unscale and count as one operator; a bound of 0: only the bits of the largest before, infinity for NaN."""
    if not grads[0].is_cuda:
        return _unscale_and_scan(grads, found_inf, inv_scale, bound)
    from eff_kernels.loss_scaling_triton import scan_triton_

    with torch.cuda.device(grads[0].device):
        return scan_triton_(grads, bound, found_inf, inv_scale)


@unscale_and_scan_.register_fake
def _(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    histogram = found_inf.new_empty(len(grads), NUM_BINS, dtype=torch.int64)
    return histogram, histogram.new_empty(len(grads), 3)


def _unscale_and_scan(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    histogram = torch.zeros(len(grads), NUM_BINS, dtype=torch.int64, device=found_inf.device)
    rest = histogram.new_zeros(len(grads), 3)
    if not bound:
        for row, grad in zip(rest, grads, strict=True):
            row[2] = (grad.float().view(torch.int32) & MAGNITUDE).max().clamp(max=INFINITY) if grad.numel() else 0
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    return count_magnitudes_of(grads, bound) if bound else (histogram, rest)
