"""Values for the tests of FP8: skewed ones, block-quantized ones, and what lies in memory."""

import torch
from eff_kernels import fp8 as kernels

E4M3 = torch.float8_e4m3fn


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def skewed(count, dtype=torch.float32, seed=0, exponent=-20):
    x = torch.randn(count, generator=generator(seed), dtype=torch.float64)
    return (x.sign() * x.abs() ** 3 * 2.0**exponent).to(dtype)


def memory(x):
    """The values in the order in which they lie in memory, as a kernel sees them."""
    return torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def quantized(rows, columns, block, rounding, seed=0):
    x = torch.randn(rows, columns, generator=generator(seed)) * torch.logspace(-3, 2, columns)
    return kernels.cast(x, kernels.block_scale(kernels.block_amax(x, block), E4M3, rounding), E4M3, block)
