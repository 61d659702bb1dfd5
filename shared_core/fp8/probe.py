"""Whether a device's scaled matmul computes what the emulation computes: measured, once for each device and recipe."""

from __future__ import annotations

import functools

import torch
from eff_kernels import fp8 as kernels
from torch import Tensor

from shared_core.fp8.native import BLOCKS, native_mm

# multiples of 16 but not of a block, five and a bit blocks of 128 along K: every kind of padding is needed
_M, _N, _K = 144, 272, 656
_OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
# FP8 tensor cores keep about 14 bits of a sum between two additions in float32 (arXiv:2412.19437, section 3.3.2) ...
_ACCUMULATION = 2.0**-9
# ... and a result may be rounded to bfloat16, a float32 one with a scale a row too; the last of float16 is 2^-24
_ROUNDING, _SMALLEST = 2.0**-8, 2.0**-24
_LONGEST = 160


@functools.cache
def why_not_native(recipe: str, gradient_dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why products are emulated on a device, to follow the word "as"; None if its scaled matmul does them.

    Only CUDA devices are tried: torch's scaled matmul of a CPU is a slow reference.

    Args:
        recipe: One with scales.
        gradient_dtype: The FP8 type of gradients.
        device: Where the operands are.

    Example:
        >>> why_not_native("mx", torch.float8_e4m3fn, torch.device("cpu"))
        'cpu does not multiply FP8'
    """
    if device.type != "cuda":
        return f"{device.type} does not multiply FP8"
    return disagreement(recipe, gradient_dtype, device)


@torch.no_grad()
def disagreement(recipe: str, gradient_dtype: torch.dtype, device: torch.device) -> str | None:
    """Return how a scaled matmul fails to give the emulation's numbers; None if it gives them.

    The three products of a layer, in every type of result, of matrices whose neighbouring blocks have scales that
    differ by a factor of 8 and more: what reads a scale in the wrong place is off by as much.

    Args:
        recipe: One with scales.
        gradient_dtype: The FP8 type of gradients.
        device: Any; not only one that counts as native.

    Raises:
        torch.OutOfMemoryError: If the device is full, which says nothing about its products.
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
        # on the CPU in float64, where no setting of this device's own products reaches
        values, others = (kernels.dequantize(_on_cpu(matrix)).double() for matrix in (a, b))
        wanted, sizes = values @ others.t(), values.abs() @ others.abs().t()
        allowed = _ACCUMULATION * sizes + _ROUNDING * wanted.abs() + _SMALLEST
        for dtype in _OUTPUTS:
            try:
                found = native_mm(a, b, dtype)
                apart = (found.double().cpu() - wanted).abs()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever it is, training can go on without this product
                line = next(iter(str(error).splitlines()), "")[:_LONGEST]
                return f"{device} refuses {_named(product, recipe, dtype)} ({type(error).__name__}: {line})"
            if found.dtype != dtype or not bool((apart <= allowed).all()):  # NaN is not within bounds
                worst = (apart / sizes).max().item()
                return f"{device} computes {_named(product, recipe, dtype)} otherwise (off by {worst:.2g} of its terms)"
    return None


def known_matrix(rows: int, columns: int, block: kernels.Block) -> Tensor:
    """Return the values that are multiplied: eighths from -1 to 1, times 1.375 and a power of two for each block.

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
