"""Rounding to any float format of up to 22 mantissa bits as one operator, for CUDA outside compiled graphs.

`shared_core.numerics` calls it and holds the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
