"""The products of FP8 matrices that hardware does: every recipe with scales, by torch's scaled matmuls."""

from __future__ import annotations

from typing import Any

import torch
from eff_kernels import fp8 as kernels
from torch import Tensor
from torch.nn import functional

from shared_core.fp8.scale_layouts import inner_major, outer_major, swizzled_e8m0, whole_blocks

_TENSOR, _ROW, _MX = (0, 0), (1, 0), (1, 32)
# recipe → block of inputs and gradients, block of weights (both along the contracted axis), rounding of scales
BLOCKS: dict[str, tuple[kernels.Block, kernels.Block, kernels.Rounding]] = {
    "tensorwise": (_TENSOR, _TENSOR, "exact"),
    "delayed": (_TENSOR, _TENSOR, "exact"),
    "rowwise": (_ROW, _ROW, "power_of_two"),
    "blockwise": ((1, 128), (128, 128), "exact"),
    "mx": (_MX, _MX, "mx"),
}
_LAYOUTS = {(1, 128): outer_major, (128, 128): inner_major, _MX: swizzled_e8m0}
_functional: Any = functional  # its scaled_mm and the types of scales are not in every version


def native_mm(a: kernels.Scaled, b: kernels.Scaled, out_dtype: torch.dtype) -> Tensor:
    """Return what `eff_kernels.fp8.emulated_mm` returns, by the scaled matmul that torch has for the blocks.

    Args:
        a: (M, K).
        b: (N, K).
        out_dtype: float32, bfloat16 or float16.

    Raises:
        Exception: Whatever torch raises for a device, a version or a shape that it cannot do.
    """
    if a.block in (_TENSOR, _ROW):
        return kernels.scaled_mm(a, b, out_dtype)
    left, right = (whole_blocks(matrix, a.block[1]) for matrix in (a, b))
    swizzle = _functional.SwizzleType.SWIZZLE_32_4_4 if a.block == _MX else None
    product: Tensor = _functional.scaled_mm(
        left.codes,
        right.codes.t(),
        scale_a=_LAYOUTS[left.block](left.scale),
        scale_recipe_a=_kind(left.block),
        scale_b=_LAYOUTS[right.block](right.scale),
        scale_recipe_b=_kind(right.block),
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=out_dtype,
        use_fast_accum=False,
    )
    return product[: a.codes.shape[0], : b.codes.shape[0]].contiguous()


def _kind(block: kernels.Block) -> Any:
    return getattr(_functional.ScalingType, f"BlockWise{block[0]}x{block[1]}")
