"""The product of int8 codes: exact sums on each kernel, odd shapes, and a fake that says the same of its output."""

import pytest
import torch
import torch.nn.functional as F
from codes import WIDEST
from eff_kernels.quantization import integer_linear as product
from eff_kernels.quantization.integer_linear import PackedLinear, integer_linear, pack

SHAPES = [(1, 1, 1), (4, 7, 3), (41, 401, 33), (64, 128, 32)]


def operands(rows, inputs, outputs, extreme=False):
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(255 if extreme else 0, 256, (rows, inputs), dtype=torch.uint8, generator=generator)
    low = -(2 ** (WIDEST["linear"] - 1))
    weight = torch.randint(low, low + 1 if extreme else -low, (outputs, inputs), dtype=torch.int8, generator=generator)
    return codes, weight, torch.rand(outputs, generator=generator) + 0.1, torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", [integer_linear, torch.ops.eff_kernels.integer_linear])
def test_sums_are_exact(call, shape, extreme):
    codes, weight, scale, bias = operands(*shape, extreme)
    for zero_point, added in ((5, bias), (128, None), (0, None)):
        expected = F.linear(codes.double() - zero_point, weight.double()) * 0.25 * scale.double()
        expected = expected if added is None else expected + added
        found = call(codes, 0.25, zero_point, pack(weight), scale, added)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("call", [integer_linear, torch.ops.eff_kernels.integer_linear])
def test_rows_may_have_a_scale_each(call):
    codes, weight, scale, bias = operands(5, 12, 3)
    rows = torch.tensor([0.5, 2.0, 0.0, torch.nan, 1.0])[:, None]
    sums = F.linear(codes.double() - 128, weight.double()) * 0.25 * scale.double() * rows
    for added, expected in ((bias, sums + bias), (None, sums)):
        found = call(codes, 0.25, 128, pack(weight), scale, added, rows)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("fbgemm_seconds", [0.5, 2.0], ids=["fbgemm", "onednn"])
@pytest.mark.parametrize("outputs", [1, 33, 256])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_few_rows_are_exact_on_the_faster_kernel_and_equal_to_the_bit_on_both(
    rows, outputs, fbgemm_seconds, monkeypatch
):
    monkeypatch.setattr(product, "_FBGEMM_IS_FASTER", {})
    times = iter([fbgemm_seconds, 1.0] * 4)
    monkeypatch.setattr(product, "_seconds", lambda kernel: next(times))
    codes, weight, scale, bias = operands(rows, 129, outputs)
    row_scale = torch.linspace(0.1, 2, rows)[:, None]
    for added in (bias, None):
        layer = PackedLinear(weight, scale, added)
        for arguments in ((0.25, 5), (1.0, 128, row_scale)):
            expected = F.linear(codes.double() - arguments[1], weight.double()) * arguments[0] * scale.double()
            expected = expected * row_scale if len(arguments) == 3 else expected
            expected = expected if added is None else expected + added
            y = layer.few(codes.float() - arguments[1], *arguments)
            torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-5)
            assert added is not None or torch.equal(y, layer(codes, *arguments))


def test_rows_may_have_several_dimensions_or_be_none():
    codes, weight, scale, bias = operands(24, 16, 5)
    y = integer_linear(codes, 0.5, 3, pack(weight), scale, bias)
    assert torch.equal(integer_linear(codes.view(2, 3, 4, 16), 0.5, 3, pack(weight), scale, bias), y.view(2, 3, 4, 5))
    assert integer_linear(codes[:0], 0.5, 3, pack(weight), scale, bias).shape == (0, 5)
    layer, few = PackedLinear(weight, scale, bias), codes[:12].float() - 3
    assert torch.equal(layer.few(few.view(2, 3, 2, 16), 0.5, 3), layer.few(few, 0.5, 3).view(2, 3, 2, 5))
    assert torch.equal(layer.few(few[0], 0.5, 3), layer.few(few[:1], 0.5, 3)[0])
    for some, are_few in ((codes, True), (codes[0], True), (codes[:0], False), (codes.repeat(2, 1), False)):
        assert PackedLinear.are_few(some) == are_few


def test_the_fake_says_what_comes_out():
    # `torch.library.opcheck` reads the storage of all arguments, and oneDNN's layout has none
    codes, weight, scale, bias = operands(4, 7, 3)
    found = torch.ops.eff_kernels.integer_linear(codes, 0.25, 5, pack(weight), scale, bias)
    tensors = (tensor.to("meta") for tensor in (weight, scale, bias))
    told = torch.ops.eff_kernels.integer_linear(codes.to("meta"), 0.25, 5, *tensors)
    assert (told.shape, told.dtype, told.stride()) == (found.shape, found.dtype, found.stride())
