"""Rounding at every midpoint and beside it, beyond the range, and for every 16-bit input."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import ConfigError
from shared_core.numerics import FORMATS, decode, encode, round_to

LINEAR = [n for n, row in FORMATS.items() if row.bits <= 16 and row.kind in ("float", "integer", "scale")]
SMALL = [name for name, row in FORMATS.items() if row.bits <= 16]
ML_FLOATS = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3_ieee": ml_dtypes.float8_e4m3,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def lattice(name, dtype=torch.float64):
    """Finite values in ascending order, one zero, with their codes."""
    row = FORMATS[name]
    codes = torch.arange(2**row.bits)
    values = decode(codes, name, dtype=dtype)
    keep = values.isfinite() & ~((values == 0) & values.signbit())
    values, codes = values[keep], codes[keep]
    order = values.argsort()
    return values[order], codes[order]


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_dtype=False)


def around(points):
    below, above = torch.tensor(-math.inf, dtype=points.dtype), torch.tensor(math.inf, dtype=points.dtype)
    return points.nextafter(below), points, points.nextafter(above)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LINEAR)
def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_near_one(name, dtype):
    values, codes = lattice(name, dtype)
    middle = values[:-1] / 2 + values[1:] / 2  # exact: one bit more than the values, and their sum could overflow
    below, at, above = around(middle)
    same(round_to(below, name), values[:-1])
    same(round_to(above, name), values[1:])
    # Parity of the magnitude's code: a negative integer is two's complement, of the same parity.
    lower_even = codes[:-1] % 2 == 0
    same(round_to(at, name), torch.where(lower_even, values[:-1], values[1:]))


WIDE = [("tf32", torch.float64), ("tf32", torch.float32), ("fp24", torch.float64), ("fp24", torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), [*WIDE, ("fp32", torch.float64)])
def test_midpoints_of_the_wide_formats(name, dtype):
    row = FORMATS[name]
    top = 255 << row.mantissa_bits
    first = torch.randint(0, top - 1, (20_000,), generator=torch.Generator().manual_seed(0))
    first = torch.cat([first, torch.arange(50), torch.arange(2 << row.mantissa_bits, (2 << row.mantissa_bits) + 50)])
    low, high = decode(first, name, dtype=dtype), decode(first + 1, name, dtype=dtype)
    below, at, above = around(low / 2 + high / 2)
    for sign in (1, -1):
        same(round_to(sign * below, name), sign * low)
        same(round_to(sign * above, name), sign * high)
        same(round_to(sign * at, name), sign * torch.where(first % 2 == 0, low, high))


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_nearest_equals_torch_s_own_cast(name, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=generator).mul_(torch.randint(-45, 39, (100_000,), generator=generator).exp2())
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65519.0, 65520.0, 3.4e38])])
    if name == "fp32":
        x = x.double() * (1 + 2.0**-30)
    got = round_to(x, name, saturate=False)
    same(got, x.to(dtype).to(got.dtype))
    assert torch.equal(got.signbit()[~got.isnan()], x.signbit()[~got.isnan()])


@pytest.mark.parametrize("name", ML_FLOATS)
def test_nearest_equals_ml_dtypes(name):
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1)).int()
    scale = torch.linspace(-1.5, 1.5, 100_000) * FORMATS[name].largest
    x = torch.cat([bits.view(torch.float32), scale, scale / 1000])
    x = x[x.isfinite()] if name == "fp4_e2m1" else x
    with np.errstate(over="ignore", invalid="ignore"):
        want = torch.from_numpy(x.numpy().astype(ML_FLOATS[name]).astype(np.float32))
    got = round_to(x, name, saturate=False)
    same(got, want)
    assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~got.isnan()])


def test_e4m3_equals_torch_s_saturating_cast():
    x = torch.cat([torch.linspace(-600, 600, 100_001), torch.linspace(-0.1, 0.1, 10_001)])
    got = encode(x, "fp8_e4m3")
    assert torch.equal(got, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_log8_rounds_the_logarithm():
    values, _ = lattice("log8")
    # x rounds up from 2^(k/8) if and only if x > 2^((2k + 1)/16), that is x^16 > 2^(2k + 1): decided in rationals.
    for code in range(128):
        edge = torch.tensor(2.0 ** ((2 * (code - 64) + 1) / 16), dtype=torch.float64)
        x = torch.stack([*around(edge), edge * 0.999, edge * 1.001])
        up = [Fraction(value) ** 16 > Fraction(2) ** (2 * (code - 64) + 1) for value in x.tolist()]
        want = [127 if code == 127 else code + step for step in up]
        assert encode(x, "log8").tolist() == want
    over = torch.tensor([250.0, -250.0, 234.0])
    assert encode(over, "log8", saturate=False).tolist() == [128, 128, 127]
    same(round_to(torch.tensor([0.004, -0.0, 1e-30]), "log8").abs(), torch.tensor([0.0, 0.0, 0.0]))
    assert len(values) == 255


def test_binary_and_ternary():
    x = torch.tensor([-3.0, -0.51, -0.5, -0.1, -0.0, 0.0, 0.1, 0.5, 0.51, 3.0, math.inf, -math.inf])
    assert round_to(x, "binary").tolist() == [-1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, -1]
    assert round_to(x, "ternary").tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 1, 1, 1, -1]
    assert not round_to(x, "ternary")[round_to(x, "ternary") == 0].signbit().any()


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"binary"}))
def test_toward_zero_gives_the_value_at_or_below(name):
    row = FORMATS[name]
    values, _ = lattice(name, torch.float32)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20_000, generator=generator) * 1.2 * min(row.largest, 1e38)
    x = torch.cat([x, x * x / x.max(), values, *around(values[values.isfinite()])])
    x = x[x.isfinite() & (x >= (2.0**-127 if name == "e8m0" else 0))]
    positive = values[values >= 0].contiguous()
    want = positive[torch.bucketize(x, positive, right=True) - 1]
    same(round_to(x, name, mode="toward_zero"), want)
    same(round_to(x, name, mode="toward_zero", saturate=False), want)
    if row.kind in ("float", "posit", "log"):
        same(round_to(-x, name, mode="toward_zero"), -want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_16_bit_input_rounds_as_its_float64_does(name, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for saturate in (True, False):
        got = round_to(x, name, saturate=saturate)
        want = round_to(x.double(), name, saturate=saturate)
        if name == "log8":
            want = want.float()
        same(got.double(), want.double())
        assert torch.equal(encode(x, name, saturate=saturate), encode(x.double(), name, saturate=saturate))


@pytest.mark.parametrize(
    ("name", "saturated", "not_saturated"),
    [
        # (beyond the range, infinity), twice
        ("fp16", (65504.0, math.inf), (math.inf, math.inf)),
        ("fp8_e5m2", (57344.0, math.inf), (math.inf, math.inf)),
        ("fp8_ibm", (15.0, math.inf), (math.inf, math.inf)),
        ("fp8_e4m3", (448.0, 448.0), (math.nan, math.nan)),
        ("log8", (2.0**7.875, 2.0**7.875), (math.nan, math.nan)),
        ("fp4_e2m1", (6.0, 6.0), (6.0, 6.0)),
        ("int8", (127.0, 127.0), (127.0, 127.0)),
        ("uint4", (15.0, 15.0), (15.0, 15.0)),
        ("posit8", (2.0**24, math.nan), (2.0**24, math.nan)),
        ("e8m0", (2.0**127, math.nan), (math.nan, math.nan)),
    ],
)
def test_what_lies_beyond_the_largest(name, saturated, not_saturated):
    x = torch.tensor([3.3e38, math.inf], dtype=torch.float64)
    for saturate, want in ((True, saturated), (False, not_saturated)):
        for mode in ("nearest_even", "stochastic"):
            got = round_to(x, name, mode=mode, saturate=saturate)
            same(got, torch.tensor(want, dtype=torch.float64))
            if name not in ("e8m0", "uint4", "int8"):
                same(round_to(-x, name, mode=mode, saturate=saturate), -torch.tensor(want, dtype=torch.float64))
    assert round_to(x, name, mode="toward_zero", saturate=False)[0] == saturated[0]
    nan = torch.tensor([math.nan])
    assert all(round_to(nan, name, mode=mode).isnan() for mode in ("nearest_even", "stochastic", "toward_zero"))


def test_the_edge_of_overflow_is_half_an_ulp_beyond_the_largest():
    x = torch.tensor([464.0, 464.0001, 480.0])
    same(round_to(x, "fp8_e4m3", saturate=False), torch.tensor([448.0, math.nan, math.nan]))
    x = torch.tensor([61439.9, 61440.0])
    same(round_to(x, "fp8_e5m2", saturate=False), torch.tensor([57344.0, math.inf]))


def test_signs_of_zero_and_negatives():
    x = torch.tensor([-0.0, 0.0, -1e-9])
    for name in ("fp16", "fp8_e4m3", "fp4_e2m1", "bf16"):
        assert round_to(x, name).signbit().tolist() == [True, False, True]
    for name in ("int8", "uint8", "ternary", "log8"):
        assert not round_to(x, name).signbit().any()
    assert round_to(torch.tensor([-5.0]), "uint8").item() == 0
    same(round_to(torch.tensor([-2.0, 0.0]), "e8m0"), torch.tensor([math.nan, 2.0**-127]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_result_s_dtype_holds_every_result(name, dtype):
    x = torch.tensor([3.0, 0.3], dtype=dtype)
    got = round_to(x, name)
    assert got.dtype in (dtype, torch.float32, torch.float64)
    assert got.data_ptr() != x.data_ptr()
    ends = torch.tensor([-6e4, 6e4, 1e-7], dtype=dtype)
    same(decode(encode(ends, name), name, dtype=torch.float64).to(got.dtype), round_to(ends, name))


def test_small_dtypes_stay_where_they_hold_the_format():
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert [round_to(x, name).dtype for name in ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8", "tf32")] == [x.dtype] * 5
    assert [round_to(x, name).dtype for name in ("fp16", "int16", "int32", "log8")] == [
        torch.float32, torch.float32, torch.float64, torch.float32,
    ]  # fmt: skip


def test_shapes_strides_empty_tensors_and_gradients():
    x = torch.randn(6, 4, requires_grad=True)
    y = round_to(x.t()[::2], "fp8_e4m3")
    assert y.shape == (2, 6)
    assert not y.requires_grad
    same(y, round_to(x.detach(), "fp8_e4m3").t()[::2])
    for name in FORMATS:
        assert encode(torch.zeros(0, 3), name).shape == (0, 3)
        assert decode(encode(torch.tensor(1.0), name), name).shape == ()


def test_double_rounding_is_avoided():
    # Through float32 the first becomes the tie 1 + 2^-8, which goes down to 1; the true answer is 1 + 2^-7.
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_to(x, "bf16").item() == 1 + 2.0**-7
    assert x.to(torch.float32).to(torch.bfloat16).item() == 1.0


def test_refusals():
    x = torch.ones(2)
    with pytest.raises(ConfigError, match=r"got 'nearest_evn'; did you mean 'nearest_even'\?"):
        round_to(x, "fp16", mode="nearest_evn")
    with pytest.raises(ConfigError, match=r"format must be a known name, got 'posit16'"):
        round_to(x, "posit16")
    with pytest.raises(ConfigError, match=r"x must be float64, .*got torch.int64"):
        round_to(torch.arange(3), "int8")
    with pytest.raises(ConfigError, match="mode must be a known one for binary"):
        round_to(x, "binary", mode="toward_zero")


NAMES = st.sampled_from(sorted(FORMATS))
NUMBERS = st.floats(allow_nan=False, width=64) | st.floats(-500, 500, width=64)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(NAMES, st.lists(NUMBERS, min_size=2, max_size=8), st.sampled_from([torch.float64, torch.float32]))
def test_rounding_is_idempotent_monotone_and_odd(name, numbers, dtype):
    x = torch.tensor(sorted(numbers), dtype=torch.float64).to(dtype)
    row = FORMATS[name]
    for mode in ("nearest_even",) if name == "binary" else ("nearest_even", "toward_zero"):
        y = round_to(x, name, mode=mode)
        same(round_to(y, name, mode=mode), y)
        same(decode(encode(x, name, mode=mode), name, dtype=torch.float64).to(y.dtype), y)
        known = y[~y.isnan()]
        assert bool((known[1:] >= known[:-1]).all())
        if row.kind in ("float", "posit", "log"):
            same(round_to(-x, name, mode=mode), -y)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_cuda_gives_the_same_bits(name):
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(2)).int()
    for x in (
        bits.view(torch.float32),
        bits.view(torch.float32).double() * (1 + 2.0**-30),
        torch.linspace(-9, 9, 9999),
    ):
        for mode in ("nearest_even",) if name == "binary" else ("nearest_even", "toward_zero"):
            for saturate in (True, False):
                want = encode(x, name, mode=mode, saturate=saturate)
                assert torch.equal(encode(x.cuda(), name, mode=mode, saturate=saturate).cpu(), want)
                same(decode(want.cuda(), name).cpu(), decode(want, name))
