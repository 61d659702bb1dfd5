"""MX and NVFP4 against loops over their definitions in float64, and bit for bit against torchao's tensors."""

import math
import struct

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.prototype.mx_formats.mx_tensor import DTYPE_FP6_E2M3, MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

from shared_core.errors import ConfigError
from shared_core.numerics import decode, mx_encode, mx_round_to, nvfp4_encode, nvfp4_round_to, nvfp4_tensor_scale
from shared_core.numerics.block_formats import nvfp4_binary_scale

# element → exponent bits, mantissa bits, bias, largest value, torch's type
ELEMENTS = {
    "fp4_e2m1": (2, 1, 1, 6.0, torch.float4_e2m1fn_x2),
    "fp6_e2m3": (2, 3, 1, 7.5, DTYPE_FP6_E2M3),
    "fp8_e4m3": (4, 3, 7, 448.0, torch.float8_e4m3fn),
    "fp8_e5m2": (5, 2, 15, 57344.0, torch.float8_e5m2),
}
EMAX = {"fp4_e2m1": 2, "fp6_e2m3": 2, "fp8_e4m3": 8, "fp8_e5m2": 15}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def table(element):
    exponent_bits, mantissa_bits, bias, largest, _ = ELEMENTS[element]
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, fraction = code >> mantissa_bits, (code % 2**mantissa_bits) / 2**mantissa_bits
        value = 2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        if value <= largest:
            values.append(value)
    return values


def nearest(value, element):
    """The nearest value of the table, of two the one with an even code; what is too large saturates."""
    values = table(element)
    code = min(range(len(values)), key=lambda code: (abs(values[code] - abs(value)), code % 2))
    return math.copysign(values[code], value)


def mx_reference(row, element, group_size):
    out = []
    for start in range(0, len(row), group_size):
        block = row[start : start + group_size]
        amax = max(abs(value) for value in block)
        exponent = max(math.frexp(amax)[1] - 1 - EMAX[element], -126) if amax else -126
        out += [nearest(value / 2.0**exponent, element) * 2.0**exponent for value in block]
    return out


def nvfp4_reference(row, tensor_scale):
    out = []
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        relative = max(abs(value) for value in block) / (6.0 * tensor_scale)
        scale = nearest(min(max(relative, 2.0**-6), 448.0), "fp8_e4m3") * tensor_scale
        out += [nearest(value / scale, "fp4_e2m1") * scale for value in block]
    return out


def spread(shape, dtype, seed=0, low=-12, high=12):
    """Magnitudes over many binades, each row in its own."""
    x = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    rows = torch.randint(low, high, (shape[0], 1), generator=generator(seed + 1)).double()
    return (x * rows.exp2()).to(dtype)


def same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    codes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    return torch.equal(a.contiguous().view(codes), b.contiguous().view(codes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_is_its_definition(element, dtype):
    for group_size, columns in ((32, 41), (4, 10), (7, 7), (32, 1)):
        x = spread((6, columns), dtype, low=-8, high=8)
        expected = torch.tensor([mx_reference(row, element, group_size) for row in x.double().tolist()])
        y = mx_round_to(x, element, group_size=group_size)
        assert y.dtype == dtype, "every result is a value of the input's type"
        assert torch.equal(y.double(), expected.double())
        assert torch.equal(mx_round_to(x.t(), element, group_size=group_size, axis=0), y.t())


@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_of_tiny_blocks_is_its_definition(element):
    x = spread((40, 32), torch.float32, low=-149, high=-110)
    expected = torch.tensor([mx_reference(row, element, 32) for row in x.double().tolist()])
    assert torch.equal(mx_round_to(x, element), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_has_the_bits_of_torchao(element, dtype):
    grid = torch.linspace(-8, 8, 2049).reshape(-1)[:2048].reshape(-1, 64)  # ties of fp4 and the saturating range
    wide = spread((200, 64), dtype, low=-90, high=110)
    x = torch.cat([wide, grid.to(dtype), grid.to(dtype) * 64]).contiguous()
    x[0, :32], x[1, 3], x[1, 4] = 0.0, -0.0, math.nan
    theirs = MXTensor.to_mx(x, ELEMENTS[element][4], 32)
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[:2] = False
    assert same_bits(mx_round_to(x, element)[kept], theirs.dequantize(dtype)[kept])
    zeros_and_nan = theirs.dequantize(dtype)[:2]
    assert torch.equal(mx_round_to(x, element)[:2].nan_to_num(7.0), zeros_and_nan.nan_to_num(7.0))
    codes, scale, _ = mx_encode(x, element)
    qdata = theirs.qdata.view(torch.uint8)
    if element == "fp4_e2m1":
        qdata = torch.stack([qdata & 15, qdata >> 4], -1).flatten(-2)
    assert torch.equal(codes[kept], qdata[kept])
    assert torch.equal(scale[kept], theirs.scale.view(torch.uint8)[kept])
    assert scale[1].tolist() == theirs.scale.view(torch.uint8)[1].tolist()
    assert scale[1, 0] == 255


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_has_the_bits_of_torchao(dtype):
    within = spread((64, 1), torch.float32, seed=5, low=-10, high=3)
    for seed, size in enumerate((1.0, 1e-20, 1e20, 3e38)):
        x = (torch.randn(64, 96, generator=generator(seed)).clamp(-3, 3) * within / 30 * size).to(dtype)
        x[3, 16:32] = 0.0
        for tensor_scale in (per_tensor_amax_to_scale(x.abs().max()), torch.tensor(size / 999), torch.tensor(size)):
            theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensor_scale)
            ours = nvfp4_round_to(x, per_tensor_scale=tensor_scale)
            assert ours.isfinite().all()
            assert same_bits(ours, theirs.dequantize(torch.float32))
            assert same_bits(ours.to(dtype), theirs.dequantize(dtype))
            codes, scale, same_scale = nvfp4_encode(x, per_tensor_scale=tensor_scale)
            qdata = theirs.qdata.view(torch.uint8)
            assert torch.equal(codes, torch.stack([qdata & 15, qdata >> 4], -1).flatten(-2))
            assert torch.equal(scale, theirs.scale.view(torch.uint8))
            assert torch.equal(same_scale, tensor_scale)
        assert torch.equal(nvfp4_tensor_scale(x.abs().max()), per_tensor_amax_to_scale(x.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_is_its_definition(dtype):
    # float64 carries every quotient: with it the reference meets no other roundings than the formats'
    x = spread((6, 41), dtype, seed=3, low=-6, high=4).double()
    amax = torch.tensor(x.abs().max().item(), dtype=torch.float32)
    tensor_scale = struct.unpack("f", struct.pack("f", amax.item() / 2688))[0]
    expected = torch.tensor([nvfp4_reference(row, tensor_scale) for row in x.tolist()], dtype=torch.float64)
    y = nvfp4_round_to(x, per_tensor_scale=None)
    assert torch.allclose(y, expected, rtol=1e-12, atol=0.0)
    narrow = nvfp4_round_to(x.to(dtype), per_tensor_scale=None)
    assert narrow.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # float32 quotients may take the other side of a tie, no more than one in some thousand
    assert (~torch.isclose(narrow.double(), expected, rtol=1e-6, atol=0.0)).sum() <= 1
    assert torch.equal(nvfp4_round_to(x.t(), per_tensor_scale=None, axis=0), y.t())


@pytest.mark.parametrize("element", ELEMENTS)
def test_codes_and_scales_stand_for_the_values(element):
    x = spread((5, 41), torch.float32)
    codes, scale, nothing = mx_encode(x, element, axis=0, group_size=2)
    assert codes.shape == (5, 41)
    assert scale.shape == (3, 41)
    assert nothing is None
    wide = decode(scale, "e8m0").repeat_interleave(2, 0)[:5]
    assert same_bits(decode(codes, element) * wide, mx_round_to(x, element, axis=0, group_size=2))
    codes, scale, tensor_scale = nvfp4_encode(x, per_tensor_scale=None)
    wide = (decode(scale, "fp8_e4m3") * tensor_scale).repeat_interleave(16, 1)[:, :41]
    assert same_bits(decode(codes, "fp4_e2m1") * wide, nvfp4_round_to(x, per_tensor_scale=None))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_swallowed(bad):
    x = torch.ones(2, 64)
    x[0, 40] = bad
    for element in ELEMENTS:
        y = mx_round_to(x, element)
        assert y[0, 32:].isnan().all()
        assert torch.equal(y[0, :32], x[0, :32])
        assert torch.equal(y[1], x[1])
        assert mx_encode(x, element).scale.tolist() == [[127 - EMAX[element], 255], [127 - EMAX[element]] * 2]
    given = nvfp4_round_to(x, per_tensor_scale=torch.tensor(1 / 6))
    assert given.isnan().sum() == 16
    assert given[0, 32:48].isnan().all()
    assert nvfp4_encode(x, per_tensor_scale=torch.tensor(1 / 6)).scale[0, 2].item() == 127
    assert nvfp4_round_to(x, per_tensor_scale=None).isnan().all()
    assert nvfp4_round_to(torch.ones(1, 16), per_tensor_scale=torch.tensor(bad)).isnan().all()


@pytest.mark.parametrize("scale", [None, torch.tensor(0.0), torch.tensor(1e-45), torch.tensor(1.0)])
def test_zeros_stay_zero(scale):
    zeros = torch.zeros(3, 41)
    assert torch.equal(nvfp4_round_to(zeros, per_tensor_scale=scale), zeros)
    assert all(torch.equal(mx_round_to(zeros, element), zeros) for element in ELEMENTS)
    one = zeros.clone()
    one[0, 0] = 1e-44
    assert nvfp4_round_to(one, per_tensor_scale=scale).isfinite().all()
    assert all(mx_round_to(one, element)[1:].abs().max() == 0 for element in ELEMENTS)


@pytest.mark.parametrize("element", ELEMENTS)
def test_mx_properties(element):
    for dtype in DTYPES:
        x = spread((20, 96), dtype)
        y = mx_round_to(x, element)
        assert same_bits(mx_round_to(y, element), y), "idempotent"
        assert same_bits(mx_round_to(-x, element), -y), "odd"
        order = x[0, :32].argsort()
        assert (y[0, order].diff() >= 0).all(), "monotone within a block"
    x = spread((20, 96), torch.float32)
    assert same_bits(mx_round_to(x * 2.0**-60, element), mx_round_to(x, element) * 2.0**-60)
    worst = (mx_round_to(x, element) - x).abs().amax(1) / x.abs().amax(1)
    assert worst.max() <= 0.25
    assert worst.max() > 2.0 ** -(ELEMENTS[element][1] + 2)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (1, 1), (1,), (2, 3, 41)])
def test_degenerate_shapes(shape):
    x = torch.randn(shape, generator=generator())
    before = x.clone()
    for y in (mx_round_to(x), nvfp4_round_to(x, per_tensor_scale=None)):
        assert y.shape == x.shape
    assert mx_encode(x).scale.shape == (*shape[:-1], -(-shape[-1] // 32))
    assert nvfp4_encode(x, per_tensor_scale=None).scale.shape == (*shape[:-1], -(-shape[-1] // 16))
    assert torch.equal(x, before)


def test_stochastic_elements_are_unbiased_and_repeatable():
    x = torch.tensor([4.0, 0.3, -1.2, 2.2]).repeat(10_000, 1)
    y = mx_round_to(x, mode="stochastic", generator=generator())
    assert torch.equal(y, mx_round_to(x, mode="stochastic", generator=generator()))
    assert [sorted(set(column.tolist())) for column in y.t()] == [[4.0], [0.0, 0.5], [-1.5, -1.0], [2.0, 3.0]]
    spreads = [math.sqrt((value - low) * (high - value)) for value, low, high in ((0.3, 0, 0.5), (1.2, 1, 1.5))]
    assert abs(y[:, 1].mean() - 0.3) < 5 * spreads[0] / 100
    assert abs(y[:, 2].mean() + 1.2) < 5 * spreads[1] / 100


def test_no_value_is_read_on_the_host():
    with FakeTensorMode():
        x = torch.randn(4, 41)
        for element in ELEMENTS:
            assert mx_round_to(x, element).shape == (4, 41)
            assert mx_encode(x, element).scale.shape == (4, 2)
        assert nvfp4_round_to(x, per_tensor_scale=None).shape == (4, 41)
        assert nvfp4_encode(x, per_tensor_scale=torch.tensor(1.0)).scale.shape == (4, 3)


X = torch.ones(2, 32)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: mx_round_to(X, "fp4_e2m2"), r"element must be one of .*fp4_e2m1"),
    (lambda: mx_encode(X, "fp16"), "element must be one of"),
    (lambda: mx_round_to(X, group_size=0), "group_size must be at least 1, got 0"),
    (lambda: mx_round_to(X, axis=2), "axis must be one of x's 2 axes, got 2"),
    (lambda: nvfp4_round_to(torch.tensor(1.0), per_tensor_scale=None), "axis must be one of x's 0 axes"),
    (lambda: mx_round_to(X.long()), r"x must be float64.*int64; cast it first"),
    (lambda: nvfp4_round_to(X, per_tensor_scale=torch.ones(2)), r"scale must be one value, got shape \(2,\)"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_binary_tensor_scale_gives_the_same_values_as_larger_ones():
    torch.manual_seed(0)
    x = torch.randn(64, 64) * torch.rand(64, 1)
    exact = nvfp4_tensor_scale(x.abs().max())
    scale = nvfp4_binary_scale(x.abs().max())
    assert exact <= scale < 2 * exact
    assert math.frexp(scale.item())[0] == 0.5
    rounded = nvfp4_round_to(x, per_tensor_scale=scale)
    for factor in (1, 2, 8):
        assert torch.equal(nvfp4_round_to(x, per_tensor_scale=scale * factor), rounded)
        # rounded again, and at the scale of what it is now, nothing moves
        assert torch.equal(nvfp4_round_to(rounded, per_tensor_scale=scale * factor), rounded)
    again = nvfp4_binary_scale(rounded.abs().max())
    assert torch.equal(nvfp4_round_to(rounded, per_tensor_scale=again), rounded)
    assert nvfp4_binary_scale(torch.tensor(float("inf"))).isnan()
    powers = torch.tensor([1.0, 2.0**-100, 2.0**60]) * 2688
    assert torch.equal(nvfp4_binary_scale(powers), powers / 2688)
