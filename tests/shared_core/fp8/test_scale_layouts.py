"""Where scales lie for block-scaled matmuls: by the documented index formulas, and as torchao's swizzle has them."""

import math

import pytest
import torch
from eff_kernels import fp8 as kernels
from eff_kernels.fp8 import swizzled_e8m0
from fp8_values import memory, quantized
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from shared_core.fp8.native import BLOCKS
from shared_core.fp8.scaling import inner_major, outer_major, whole_blocks

E8M0 = torch.float8_e8m0fnu
SHAPES = [(1, 1), (32, 4), (128, 4), (129, 5), (300, 9), (127, 3), (256, 16)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_swizzled_scales_are_torchaos_and_lie_where_the_formula_says(rows, columns):
    exponents = torch.randint(-126, 128, (rows, columns), generator=torch.Generator().manual_seed(rows))
    scale = torch.exp2(exponents.double()).float()
    scale[rows // 2, columns // 2] = math.nan
    ours = swizzled_e8m0(scale)
    assert ours.dtype == E8M0
    wide = -(-columns // 4)
    assert ours.shape == (512 * -(-rows // 128) * wide,)
    codes = torch.where(scale.isnan(), 255, exponents + 127).to(torch.uint8)
    assert torch.equal(ours.view(torch.uint8), to_blocked(codes))
    assert torch.equal(from_blocked(ours.view(torch.uint8), rows, columns), codes)
    for r in range(rows):
        for c in range(columns):
            place = (r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert ours.view(torch.uint8)[place] == codes[r, c]
    # what CPUs and torch convert it to is the same number
    assert torch.equal(scale.to(E8M0).view(torch.uint8), codes)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_scales_of_128_lie_where_the_formula_says(rows, columns, transposed):
    scale = torch.arange(rows * columns).float().view(rows, columns) + 1
    given = scale.t().contiguous().t() if transposed else scale
    outer, inner, padded = outer_major(given), inner_major(given), -(-columns // 4) * 4
    assert (outer.shape, outer.stride()) == ((rows, columns), (1, rows))
    assert (inner.shape, inner.stride()) == ((padded, rows), (1, padded))
    for r in range(rows):
        for c in range(columns):
            assert memory(outer)[r + c * rows] == memory(inner)[c + r * padded] == scale[r, c]
    assert torch.isfinite(memory(inner)).all()
    assert outer_major(scale[:, :1]).stride() == (1, rows)  # one block along K, of whatever stride


@pytest.mark.parametrize("recipe", ["blockwise", "mx"])
def test_whole_blocks_append_zeros_and_keep_every_value(recipe):
    for side, block in enumerate(BLOCKS[recipe][:2]):
        matrix = quantized(144, 160, block, BLOCKS[recipe][2], side)
        padded = whole_blocks(matrix, block[1])
        assert not any(size % block[1] for size in padded.codes.shape)
        wanted = torch.zeros(padded.codes.shape)
        wanted[:144, :160] = kernels.dequantize(matrix)
        assert torch.equal(kernels.dequantize(padded), wanted)
        assert whole_blocks(padded, block[1]) is padded
