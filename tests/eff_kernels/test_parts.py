"""Passes over a few rows at a time give what they give over the whole tensor."""

import pytest
import torch
from eff_kernels.parts import by_parts
from eff_kernels.quantization.group import fake_quantize_fp8
from eff_kernels.quantization.low_bit import binarize, ternarize

from shared_core.numerics import mx_round_to, nvfp4_round_to
from shared_core.quantization.low_bit import half_fake_quantize

LARGE = (300, 1024)


def weight(dtype=torch.float32):
    x = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, LARGE[0])[:, None]
    x[::7, ::5] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize(
    "by_row",
    [
        lambda x: mx_round_to(x, "fp4_e2m1"),
        lambda x: mx_round_to(x[:, :1000], "fp8_e4m3"),
        lambda x: nvfp4_round_to(x, per_tensor_scale=torch.tensor(0.01)),
        lambda x: fake_quantize_fp8(x, torch.float8_e4m3fn, 0),
        lambda x: fake_quantize_fp8(x, torch.float8_e5m2, 0),
        lambda x: half_fake_quantize(x.float() * 1e4, "fp16"),
        lambda x: ternarize(x, 0),
        lambda x: binarize(x, 0, True),
        lambda x: binarize(x, None, False),
    ],
    ids=["mxfp4", "mxfp8", "nvfp4", "e4m3", "e5m2", "fp16", "ternary", "binary", "signs"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_large_weight_is_its_rows(by_row, dtype):
    x = weight(dtype)
    x[3, 2] = torch.nan
    rows = torch.cat([by_row(row[None]) for row in x])
    torch.testing.assert_close(by_row(x), rows, rtol=0, atol=0, equal_nan=True)
    columns = x.t().contiguous().t()  # laid out by column
    torch.testing.assert_close(by_row(columns), rows, rtol=1e-6, atol=0, equal_nan=True)  # sums in another order


def test_scales_of_a_whole_tensor_see_all_parts():
    x = weight()
    for whole in (
        lambda x: fake_quantize_fp8(x, torch.float8_e4m3fn),
        lambda x: nvfp4_round_to(x, per_tensor_scale=None, binary=True),
    ):
        assert torch.equal(whole(x)[-10:], whole(torch.cat([x[-10:]])))  # the largest value is in the last row


def test_small_tensors_and_those_of_one_row_go_through_whole():
    calls = []
    for shape, count in (((4, 8), 1), ((1, 1 << 19), 1), (LARGE, 3)):
        calls.clear()
        result = by_parts(lambda rows: calls.append(rows) or rows + 1, torch.zeros(shape))
        assert (len(calls), bool((result == 1).all())) == (count, True)
