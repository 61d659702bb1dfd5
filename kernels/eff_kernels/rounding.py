"""Rounding to narrow float formats in few passes, and operators for CUDA outside compiled graphs.

The operators round to float formats of up to 22 mantissa bits and to block formats. `shared_core.numerics` calls them
and holds the references, which block formats equal bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nearest_float(x: Tensor, largest: float, smallest_normal: float, mantissa_bits: int) -> Tensor:
    """Return `x` rounded to the nearest values of a narrow float format, ties to even. Values beyond saturate.

    Keeps NaN and the sign of zero.

    Args:
        x: float32 or float64.
        largest: Largest value of the format, below 2^100.
        smallest_normal: Smallest normal value.
        mantissa_bits: Bits of the stored fraction.

    Example:
        >>> nearest_float(torch.tensor([1.2, 1.25, -0.1, 9.0]), 6.0, 1.0, 1).tolist()  # fp4_e2m1
        [1.0, 1.0, -0.0, 6.0]
    """
    y = x.clamp(-largest, largest)
    # 1.5 * 2^23 ulps (of float64: 2^52): the sum is a whole number of ulps, and an even one at ties.
    ulps = power_below(y, smallest_normal).mul_(1.5 / torch.finfo(x.dtype).eps * 2.0**-mantissa_bits)
    return y.add_(ulps).sub_(ulps).copysign_(x)


def power_below(x: Tensor, least: float) -> Tensor:
    """Return the power of two at or below ``|x|``, at least `least`; infinity for what is not finite.

    Args:
        x: float32 or float64.
        least: A power of two, normal in the type of `x`.

    Example:
        >>> power_below(torch.tensor([0.0, -5.0, 8.0]), 0.5).tolist()
        [0.5, 4.0, 8.0]
    """
    # The exponent field alone, as a float, is that power. A logarithm could be off by one.
    integer, mask = (torch.int64, 0x7FF0000000000000) if x.dtype == torch.float64 else (torch.int32, 0x7F800000)
    return (x.view(integer) & mask).view(x.dtype).clamp_(min=least)


@torch.library.custom_op("eff_kernels::round_float_", mutates_args={"out"})
def round_float_(
    out: Tensor,
    x: Tensor,
    rounding: str,
    mantissa: int,
    bias: int,
    largest: float,
    beyond: float,
    infinite: float,
    seed: Tensor | None = None,
    noise: Tensor | None = None,
) -> None:
    """Write `x`, rounded to a float format, into `out`, by Triton. NaN stays NaN.

    ``"stochastic"`` rounds the magnitude up if a random number in [0, 1) is below the fraction of an ulp by which x
    exceeds the next lower value. With 47 - `mantissa` bits of both, the mean is x within 2^(`mantissa` - 47) ulp.

    Args:
        out: Contiguous, in the shape of `x`; float32, bfloat16, float16 or FP8, which must hold the format.
        x: float32, bfloat16 or float16; may be `out` itself.
        rounding: "nearest_even", "toward_zero" or "stochastic".
        mantissa: Bits of the stored fraction, 1 to 22.
        bias: Bias of the exponent, 1 to 70 or 127.
        largest: Largest finite value of the format.
        beyond: Result for larger finite magnitudes.
        infinite: Result for infinite magnitudes.
        seed: One int64 on x's device, the seed of Philox; only "stochastic" reads it.
        noise: int64 in the shape of `x`. The first of its lower 62 bits replace random ones.

    Source: Gupta et al. 2015, arXiv:1502.02551; Salmon et al. 2011, *Parallel Random Numbers: As Easy as 1, 2, 3*.
    """
    from eff_kernels._triton.rounding import round_triton_

    round_triton_(out, x, rounding, mantissa, bias, largest, beyond, infinite, seed, noise)


@round_float_.register_fake
def _(
    out: Tensor,
    x: Tensor,
    rounding: str,
    mantissa: int,
    bias: int,
    largest: float,
    beyond: float,
    infinite: float,
    seed: Tensor | None = None,
    noise: Tensor | None = None,
) -> None:
    return None


GROUP_SIZES = (8, 16, 32, 64, 128)
"""Block sizes that `mx_round` supports."""


@torch.library.custom_op("eff_kernels::mx_round", mutates_args=())
def mx_round(x: Tensor, element: str, group_size: int) -> Tensor:
    """Return `x` rounded to a microscaling format along its last axis, to nearest, by Triton.

    Args:
        x: At least one axis, not empty; float32, bfloat16 or float16.
        element: "fp4_e2m1", "fp8_e4m3" or "fp8_e5m2".
        group_size: One of `GROUP_SIZES`.

    Source: OCP Microscaling Formats (MX) 1.0, 6.3; Rouhani et al. 2023, arXiv:2310.10537.
    """
    from eff_kernels._triton.rounding import mx_round_triton

    return mx_round_triton(x, element, group_size)


@mx_round.register_fake
def _(x: Tensor, element: str, group_size: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("eff_kernels::nvfp4_round", mutates_args=())
def nvfp4_round(x: Tensor, per_tensor_scale: Tensor | None, dtype: torch.dtype, binary: bool = False) -> Tensor:
    """Return `x` rounded to NVFP4 along its last axis, in `dtype`, by Triton.

    Args:
        x: At least one axis, not empty; float32, bfloat16 or float16.
        per_tensor_scale: One value on x's device; None: computed from x's largest magnitude.
        dtype: float32, bfloat16 or float16.
        binary: Round x's own scale up to a power of two.

    Source: NVIDIA 2025, *Pretraining Large Language Models with NVFP4*, arXiv:2509.25149.
    """
    from eff_kernels._triton.rounding import nvfp4_round_triton

    return nvfp4_round_triton(x, per_tensor_scale, dtype, binary)


@nvfp4_round.register_fake
def _(x: Tensor, per_tensor_scale: Tensor | None, dtype: torch.dtype, binary: bool = False) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)
