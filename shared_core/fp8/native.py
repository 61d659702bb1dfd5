"""FP8 products in hardware, by torch's scaled matmuls, for every recipe with scales.

Each device and recipe is tested once: does its scaled matmul agree with the emulation?
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from eff_kernels import fp8 as kernels
from torch import Tensor
from torch.nn import functional

from shared_core.errors import in_short
from shared_core.fp8.scaling import inner_major, outer_major, whole_blocks

_TENSOR, _ROW, _MX = (0, 0), (1, 0), (1, 32)
# recipe → block of inputs and gradients, block of weights (both along the contracted axis), rounding of scales
BLOCKS: dict[str, tuple[kernels.Block, kernels.Block, kernels.Rounding]] = {
    "tensorwise": (_TENSOR, _TENSOR, "exact"),
    "delayed": (_TENSOR, _TENSOR, "exact"),
    "rowwise": (_ROW, _ROW, "power_of_two"),
    "blockwise": ((1, 128), (128, 128), "exact"),
    "mx": (_MX, _MX, "mx"),
}
_LAYOUTS = {(1, 128): outer_major, (128, 128): inner_major, _MX: kernels.swizzled_e8m0}
_functional: Any = functional  # not every version has scaled_mm and the types of scales


def native_mm(
    a: kernels.Scaled, b: kernels.Scaled, out_dtype: torch.dtype, fast: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Compute `eff_kernels.fp8.emulated_mm` with torch's scaled matmul for the blocks.

    Args:
        a: (M, K).
        b: (N, K).
        out_dtype: float32, bfloat16 or float16.
        fast: As in `eff_kernels.fp8.scaled_mm`. Smaller blocks are always summed in float32.
        bias: As there. With smaller blocks it is added to the rounded product.
    """
    if a.block in (_TENSOR, _ROW):
        return kernels.scaled_mm(a, b, out_dtype, fast, bias)
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
    product = product[: a.codes.shape[0], : b.codes.shape[0]]
    return product.contiguous() if bias is None else product + bias


def _kind(block: kernels.Block) -> Any:
    return getattr(_functional.ScalingType, f"BlockWise{block[0]}x{block[1]}")


# multiples of 16 but not of a block, and more than five blocks of 128 along K, to test every kind of padding
_M, _N, _K = 144, 272, 656
_OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
# FP8 tensor cores keep about 14 bits of a sum between additions in float32 (arXiv:2412.19437, section 3.3.2), or of the
# whole sum in the forward product, which uses the fast mode as in torchao ...
_ACCUMULATION, _FAST_ACCUMULATION = 2.0**-9, 2.0**-7
# ... and a result may be rounded to bfloat16, also float32 with a scale per row; float16 has a last bit of 2^-24
_ROUNDING, _SMALLEST = 2.0**-8, 2.0**-24


@functools.cache
def why_not_native(recipe: str, gradient_dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why products are emulated on a device, to follow the word "as"; None if its scaled matmul works.

    Only CUDA devices are tested, because torch's scaled matmul on CPUs is a slow reference.
    """
    if device.type != "cuda":
        return f"{device.type} does not multiply FP8"
    return disagreement(recipe, gradient_dtype, device)


@torch.no_grad()
def disagreement(recipe: str, gradient_dtype: torch.dtype, device: torch.device) -> str | None:
    """Return how a scaled matmul differs from the emulation; None if it agrees.

    Tests the three products of a layer, with bias where used, in every result type. Scales of neighboring blocks
    differ by a factor of 8 or more, so that a scale read from the wrong place causes an error of that size.
    """
    block, weight_block, _ = BLOCKS[recipe]
    inputs = torch.float8_e4m3fn
    products = {
        "forward": ((inputs, block), (inputs, weight_block)),
        "grad_input": ((gradient_dtype, block), (inputs, weight_block)),
        "grad_weight": ((gradient_dtype, block), (inputs, block)),
    }
    for product, (left, right) in products.items():
        a, b = _known(_M, recipe, *left, device), _known(_N, recipe, *right, device)
        # on the CPU in float64, which no setting of this device's products affects
        values, others = (kernels.dequantize(_on_cpu(matrix)).double() for matrix in (a, b))
        wanted, sizes = values @ others.t(), values.abs() @ others.abs().t()
        fast = product == "forward"
        bias = torch.exp2(sizes.amax(0).log2().floor())  # as large as a row, exact in 16 bits
        for dtype in _OUTPUTS:
            biased = fast and dtype.itemsize == 2
            whole = wanted + bias if biased else wanted
            allowed = (_FAST_ACCUMULATION if fast else _ACCUMULATION) * sizes + _ROUNDING * whole.abs() + _SMALLEST
            try:
                found = native_mm(a, b, dtype, fast, bias.to(device, dtype) if biased else None)
                apart = (found.double().cpu() - whole).abs()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # with any error, training can continue without this product
                return f"{device} refuses {_named(product, recipe, dtype)} ({in_short(error):.180})"
            if found.dtype != dtype or not bool((apart <= allowed).all()):  # NaN is not within bounds
                worst = (apart / sizes).max().item()
                return f"{device} computes {_named(product, recipe, dtype)} wrongly (off by {worst:.2g} of its terms)"
    return None


def known_matrix(rows: int, columns: int, block: kernels.Block) -> Tensor:
    """Return test values: eighths from -1 to 1, times 1.375 and a power of two per block.

    Example:
        >>> known_matrix(1, 64, (1, 32))[0, ::32].abs() * 2**10
        tensor([1.3750, 4.1250])
    """
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    down, along = i // (block[0] or rows), j // (block[1] or columns)
    exponent = (5 * down + 3 * along) % 13 - 10
    # 17 is prime to 32 and 128: no two rows or columns of a block are equal
    return ((7 * i + 3 * j) % 17 - 8) / 8 * 1.375 * torch.exp2(exponent.float())


def _known(rows: int, recipe: str, dtype: torch.dtype, block: kernels.Block, device: torch.device) -> kernels.Scaled:
    matrix = known_matrix(rows, _K, block).to(device)
    return kernels.cast(
        matrix, kernels.block_scale(kernels.block_amax(matrix, block), dtype, BLOCKS[recipe][2]), dtype, block
    )


def _on_cpu(matrix: kernels.Scaled) -> kernels.Scaled:
    return kernels.Scaled(matrix.codes.cpu(), matrix.scale.cpu(), matrix.block)


def _named(product: str, recipe: str, dtype: torch.dtype) -> str:
    return f"the {product} product of {recipe} in {str(dtype).removeprefix('torch.')}"
