"""Rounding to block formats, one operator each, for CUDA outside compiled graphs.

`shared_core.numerics` calls them and holds the reference, which they equal bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    from eff_kernels._triton.block_formats import mx_round_triton

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
    from eff_kernels._triton.block_formats import nvfp4_round_triton

    return nvfp4_round_triton(x, per_tensor_scale, dtype, binary)


@nvfp4_round.register_fake
def _(x: Tensor, per_tensor_scale: Tensor | None, dtype: torch.dtype, binary: bool = False) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)
