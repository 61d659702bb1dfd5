"""Rounding at every midpoint and beside it, beyond the range, for every 16-bit input, and stochastically."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import ConfigError
from shared_core.numerics import FORMATS, decode, encode, round_to, stochastic_round_

LINEAR = [n for n, row in FORMATS.items() if row.bits <= 16 and row.kind in ("float", "integer", "scale")]
SMALL = [name for name, row in FORMATS.items() if row.bits <= 16]
ML_FLOATS = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3_ieee": ml_dtypes.float8_e4m3,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
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
def test_every_midpoint_goes_to_the_even_code_and_its_neighbors_to_the_near_one(name, dtype):
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
    x = x[x.isfinite()] if name in ("fp4_e2m1", "fp6_e2m3") else x
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
        ("fp6_e2m3", (7.5, 7.5), (7.5, 7.5)),
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


@pytest.mark.parametrize(("x", "name", "mode", "message"), [
    (torch.ones(2), "fp16", "nearest_evn", r"got 'nearest_evn'; did you mean 'nearest_even'\?"),
    (torch.ones(2), "posit16", "nearest_even", "format must be .*'posit16'"),
    (torch.arange(3), "int8", "nearest_even", r"x must be float64, .*got torch.int64"),
    (torch.ones(2), "binary", "toward_zero", "mode must be a known one for binary"),
])  # fmt: skip
def test_refusals(x, name, mode, message):
    with pytest.raises(ConfigError, match=message):
        round_to(x, name, mode=mode)


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


DRAWS = 40_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("binary", "fp64", "fp32", "e8m0")])
def test_mean_is_the_input_and_only_neighbors_occur(name, sign):
    if sign < 0 and name.startswith("uint"):
        return
    row = FORMATS[name]
    smallest = row.smallest
    inputs = [0.9 * row.largest, 1.3, 0.3 * smallest] if row.largest < 1e30 else [1.3, 1.003, 0.3 * smallest]
    inputs = [value for value in inputs if value < row.largest]
    for value in inputs:
        x = torch.full((DRAWS,), sign * value, dtype=torch.float64)
        y = round_to(x, name, mode="stochastic", generator=generator()).double()
        low, high = y.abs().min().item(), y.abs().max().item()
        assert low <= value <= high
        between = torch.tensor([(low * 2 + high) / 3, (low + high * 2) / 3], dtype=torch.float64)
        assert set(round_to(between, name, mode="toward_zero").tolist()) <= {low}, "a value was jumped over"
        assert len(set(y.tolist())) <= 2
        deviation = math.sqrt(max((value - low) * (high - value), 0.0) / DRAWS)
        assert abs(y.mean().item() - sign * value) <= 5 * deviation + 1e-12 * value


def test_e8m0_is_unbiased_too():
    x = torch.full((DRAWS,), 1.3)
    y = round_to(x, "e8m0", mode="stochastic", generator=generator())
    assert set(y.tolist()) == {1.0, 2.0}
    assert abs(y.mean().item() - 1.3) < 5 * math.sqrt(0.3 * 0.7 / DRAWS)


def test_binary_has_the_mean_of_the_clamped_input():
    for value, mean in ((0.4, 0.4), (-0.9, -0.9), (3.0, 1.0), (-math.inf, -1.0)):
        y = round_to(torch.full((DRAWS,), value), "binary", mode="stochastic", generator=generator())
        assert set(y.tolist()) <= {1.0, -1.0}
        assert abs(y.mean().item() - mean) <= 5 * math.sqrt((1 - mean**2) / DRAWS)


def test_values_of_the_format_never_move():
    for name in FORMATS:
        x = round_to(torch.randn(2000, generator=generator()).abs_() * 3 + 1e-6, name)
        x = x if name == "e8m0" else torch.cat([x, round_to(-x, name)])
        for seed in range(5):
            assert torch.equal(round_to(x, name, mode="stochastic", generator=generator(seed)), x)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "posit8"])
def test_the_smallest_random_numbers(name, monkeypatch):
    # With 24-bit random numbers 0 would come once in 2^24 draws, and lift a value of 2^-34 ulps 1000 times too often.
    asked = []

    def smallest(*args, dtype=None, **kwargs):
        asked.append(dtype)
        return torch.zeros(*args, dtype=dtype)

    monkeypatch.setattr(torch, "rand", smallest)
    smallest_value = FORMATS[name].smallest
    x = torch.tensor([0.0, smallest_value, 1.0, smallest_value * 2.0**-34])
    assert round_to(x, name, mode="stochastic").tolist() == [0.0, smallest_value, 1.0, smallest_value]
    assert asked == [torch.float64]


@pytest.mark.parametrize("value", [1 + 2.0**-9, -(1 + 3 * 2.0**-10), 3.0e-39, 2.0**-135, 1.7e20])
def test_bf16_weights_are_unbiased(value):
    source = torch.full((DRAWS,), value)
    weight = torch.zeros(DRAWS, dtype=torch.bfloat16)
    assert stochastic_round_(weight, source, generator=generator()) is weight
    exact = source[0].double().item()
    y = weight.double()
    low, high = y.min().item(), y.max().item()
    ulp = 2.0 ** max(math.floor(math.log2(abs(exact))) - 7, -133)
    assert set(y.tolist()) == {low, high}
    assert high - low == ulp
    assert low < exact < high
    assert abs(y.mean().item() - exact) <= 5 * math.sqrt((exact - low) * (high - exact) / DRAWS)


def test_bf16_shortcut_has_the_probabilities_of_round_to():
    # For each of 256 lower halves the share rounded up, over many draws, is that lower half / 2^16, on both paths.
    lower = torch.arange(0, 1 << 16, 256, dtype=torch.int32)
    source = (0x3F800000 + lower).view(torch.float32).repeat(2000, 1)
    share = lower / 65536
    bound = 5.5 * (share * (1 - share) / 2000).sqrt() + 1e-9
    weight = torch.empty(2000, 256, dtype=torch.bfloat16)
    for rounded in (
        stochastic_round_(weight, source, generator=generator()),
        round_to(source, "bf16", mode="stochastic", generator=generator()),
    ):
        assert bool((((rounded > 1).double().mean(0) - share).abs() <= bound).all())


def test_nan_and_infinity_pass_and_the_largest_saturates():
    largest = torch.finfo(torch.bfloat16).max
    odd_nan = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    source = torch.cat([torch.tensor([math.inf, -math.inf, 0.0, -0.0, 3.4e38, -3.4e38]), odd_nan]).repeat(500, 1)
    weight = torch.zeros(source.shape, dtype=torch.bfloat16)
    stochastic_round_(weight, source, generator=generator())
    assert bool((weight[:, 0] == math.inf).all())
    assert bool((weight[:, 1] == -math.inf).all())
    assert bool((weight[:, 2:4] == 0).all())
    assert bool((weight[:, 3].signbit() & ~weight[:, 2].signbit()).all())
    assert bool((weight[:, 4] == largest).all())
    assert bool((weight[:, 5] == -largest).all())
    assert bool(weight[:, 6:].isnan().all())
    stochastic_round_(weight, source, saturate=False, generator=generator())
    assert set(weight[:, 4].tolist()) == {largest, math.inf}


def test_a_generator_s_state_repeats_the_draws_and_none_uses_the_global_one():
    source = torch.randn(1000, generator=generator())
    mine = generator(5)
    state = mine.get_state()
    first = stochastic_round_(torch.empty(1000, dtype=torch.bfloat16), source, generator=mine)
    second = stochastic_round_(torch.empty(1000, dtype=torch.bfloat16), source, generator=mine)
    mine.set_state(state)
    again = stochastic_round_(torch.empty(1000, dtype=torch.bfloat16), source, generator=mine)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    stochastic_round_(torch.empty(1000, dtype=torch.bfloat16), source, generator=mine)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_other_targets(dtype):
    source = torch.full((DRAWS,), 1.03, dtype=torch.float64)
    target = torch.zeros(DRAWS).to(dtype)
    y = stochastic_round_(target, source, generator=generator()).double()
    low, high = y.min().item(), y.max().item()
    assert abs(y.mean().item() - 1.03) <= 5 * math.sqrt((1.03 - low) * (high - 1.03) / DRAWS)
    assert set(y.tolist()) == {low, high}


def test_weights_kept_in_a_wider_dtype_and_strided():
    weight = torch.nn.Parameter(torch.zeros(8, 500).t())
    stochastic_round_(weight, torch.full((500, 8), 1.03), format="fp8_ibm", generator=generator())
    assert set(weight.flatten().tolist()) == {1.0, 1.125}
    stochastic_round_(weight, weight, format="fp4_e2m1", generator=generator())
    assert set(weight.flatten().tolist()) == {1.0, 1.5}
    assert weight.requires_grad
    half = torch.zeros(500, 8, dtype=torch.bfloat16).t()
    stochastic_round_(half, torch.full((500, 8), 1.003).t(), generator=generator())
    assert set(half.flatten().tolist()) == {1.0, 1.0078125}


def test_a_long_sum_of_small_updates_is_not_lost():
    weight = torch.ones(4000, dtype=torch.bfloat16)
    nearest = weight.clone()
    draws = generator()
    for _ in range(100):
        stochastic_round_(weight, weight.float() + 1e-3, generator=draws)
        nearest += 1e-3
    assert torch.equal(nearest, torch.ones_like(nearest))
    assert weight.double().mean().item() == pytest.approx(1.1, abs=0.005)


@pytest.mark.parametrize(("target", "source", "name", "message"), [
    (torch.bfloat16, torch.zeros(3), "fp16", r"must hold every value of fp16, got torch.bfloat16"),
    (torch.bfloat16, torch.zeros(1), None, r"shape \(3,\), got \(1,\)"),
    (torch.int8, torch.zeros(3), None, r"target must have a float dtype, got torch.int8"),
    (torch.bfloat16, torch.zeros(3, dtype=torch.int32), None, "x must be float64"),
])  # fmt: skip
def test_stochastic_refusals(target, source, name, message):
    with pytest.raises(ConfigError, match=message):
        stochastic_round_(torch.zeros(3, dtype=target), source, format=name)
