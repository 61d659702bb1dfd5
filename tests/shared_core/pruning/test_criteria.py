"""A mask by absolute threshold."""

import pytest
import torch
from torch import nn

from shared_core.errors import ConfigError
from shared_core.pruning.scorers.scorer import below_threshold_mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_threshold_is_that_of_the_definition(dtype):
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = weight.double().abs() >= 0.5
    assert torch.equal(below_threshold_mask(weight, 0.5), expected)
    assert 0 < int(expected.sum()) < expected.numel()


def test_threshold_edges():
    weight = torch.tensor([0.1, -0.1, 0.0, float("inf"), float("nan")])
    assert below_threshold_mask(weight, 0.1).tolist() == [True, True, False, True, True]
    assert below_threshold_mask(weight, 0).all()
    assert below_threshold_mask(torch.tensor(0.2), 0.3).tolist() is False
    assert below_threshold_mask(torch.empty(0, 3), 0.3).shape == (0, 3)
    assert below_threshold_mask(nn.Parameter(torch.ones(2)), 2.0).tolist() == [False, False]
    for eps in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="eps must be at least 0"):
            below_threshold_mask(weight, eps)
