"""Stochastic rounding: only to the two neighbours, and right on average."""

import math

import pytest
import torch

from shared_core.errors import ConfigError
from shared_core.numerics import FORMATS, round_to, stochastic_round_

DRAWS = 40_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("binary", "fp64", "fp32", "e8m0")])
def test_mean_is_the_input_and_only_neighbours_occur(name, sign):
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


def test_refusals():
    weight = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"must hold every value of fp16, got torch.bfloat16"):
        stochastic_round_(weight, torch.zeros(3), format="fp16")
    with pytest.raises(ConfigError, match=r"shape \(3,\), got \(1,\)"):
        stochastic_round_(weight, torch.zeros(1))
    with pytest.raises(ConfigError, match=r"target must have a float dtype, got torch.int8"):
        stochastic_round_(torch.zeros(3, dtype=torch.int8), torch.zeros(3))
    with pytest.raises(ConfigError, match="x must be float64"):
        stochastic_round_(weight, torch.zeros(3, dtype=torch.int32))
