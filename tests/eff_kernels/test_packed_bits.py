"""Signs packed into bits, and their product, against numpy's product of integers."""

import numpy as np
import pytest
import torch
from eff_kernels.quantization import packed_bits
from eff_kernels.quantization.packed_bits import pack_signs, product_words, unpack_signs, xnor_product


@pytest.mark.parametrize("counts", [True, False])  # without: numpy before 2.0
@pytest.mark.parametrize("width", [1, 7, 8, 63, 64, 65, 200, 1000])
def test_products_equal_those_of_integers(width, counts, monkeypatch):
    if not counts:
        monkeypatch.delattr(np, "bitwise_count", raising=False)
    monkeypatch.setattr(packed_bits, "_PART", 64)  # several parts
    generator = torch.Generator().manual_seed(width)
    many, few = (torch.randn(rows, width, generator=generator) for rows in (33, 11))
    for x, weight in ((many, few), (few, many)):
        found = xnor_product(pack_signs(x), product_words(pack_signs(weight)), width)
        signs = [np.where(value.numpy() >= 0, 1, -1) for value in (x, weight)]
        assert found.dtype == torch.int32
        np.testing.assert_array_equal(found.numpy(), signs[0] @ signs[1].T)
        assert pack_signs(x).shape == (len(x), -(-width // 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bits_hold_signs_and_both_zeros_are_positive(dtype):
    x = torch.tensor([[-0.0, 0.0, -1.0, 2.0], [-torch.inf, torch.inf, -1e-3, 0.5]], dtype=dtype)
    assert unpack_signs(pack_signs(x), 4).tolist() == [[1, 1, -1, 1], [-1, 1, -1, 1]]
    many = torch.randn(2, 3, 4, 21).to(dtype)
    assert torch.equal(unpack_signs(pack_signs(many), 21) < 0, many < 0)


def test_no_rows_and_no_outputs_give_empty_products():
    bits = pack_signs(torch.ones(3, 5))
    assert xnor_product(bits[:0], product_words(bits), 5).shape == (0, 3)
    assert xnor_product(bits, product_words(bits[:0]), 5).shape == (3, 0)
