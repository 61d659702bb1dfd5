"""Whether many tensors are finite, asked at once."""

import math

import pytest
import torch

from shared_core.distributed.collectives import all_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_one_element_of_one_tensor_decides(dtype, odd):
    largest = torch.finfo(dtype).max
    fine = [torch.full((3, 2), largest, dtype=dtype), torch.zeros(0, dtype=dtype), torch.tensor(-1.0)]
    assert all_finite(fine)
    assert not all_finite([*fine, torch.tensor([1.0, odd, 0.0], dtype=dtype).expand(2, 3)])


def test_nothing_is_finite():
    assert all_finite([])
    assert all_finite([torch.zeros(0)])
