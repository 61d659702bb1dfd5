"""The casts of the emulated recipes against loops over the papers' formulas in float64, and what they promise."""

import math

import pytest
import torch
from fp8_values import generator, skewed
from torch._subclasses.fake_tensor import FakeTensorMode

from shared_core.errors import ConfigError
from shared_core.fp8.arithmetic import CAST_RECIPES, cast_for
from shared_core.fp8.recipes import (
    SharedExponentBank,
    cast_16bit,
    hfp8_cast,
    round_update_,
    round_weights_,
    s2fp8_cast,
    squeeze,
    unsqueeze,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROLES = ["input", "weight", "gradient"]
CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def values_of(mantissa_bits, bias, largest):
    """Values of a float format without sign, by code."""
    values = []
    for code in range(2**7):
        exponent, fraction = code >> mantissa_bits, (code % 2**mantissa_bits) / 2**mantissa_bits
        value = 2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        values.append(value)
        if value == largest:
            return values
    raise AssertionError(largest)


E5M2, IBM = values_of(2, 15, 57344.0), values_of(3, 11, 15.0)


def nearest(value, values):
    code = min(range(len(values)), key=lambda code: (abs(values[code] - abs(value)), code % 2))
    return math.copysign(values[code], value)


# every recipe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", CAST_RECIPES)
def test_every_cast_keeps_its_promises(recipe, dtype):
    for role in ROLES:
        cast = cast_for(recipe, 0, SharedExponentBank(1))
        x = skewed(5 * 41, dtype, exponent=-3).reshape(5, 41)
        before = x.clone()
        y = cast(x.requires_grad_(), role, record=False)
        assert y.shape == (5, 41)
        assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not y.requires_grad
        assert torch.equal(x, before)
        assert torch.equal(cast(-x, role, False), -y), "odd"
        assert (y.double() - x.double()).abs().max() <= 0.26 * x.abs().max(), "near"
        assert (y * x >= 0).all(), "no sign flips"
        zeros = torch.zeros(3, 16, dtype=dtype)
        assert torch.equal(cast(zeros, role, False), zeros.to(y.dtype))
        for shape in ((0, 16), (1, 1), (3, 0)):
            same = torch.full(shape, -0.75, dtype=dtype)
            assert torch.allclose(cast(same, role, False), same.to(y.dtype), rtol=1e-7)  # nvfp4: a float32 scale


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("recipe", CAST_RECIPES)
def test_no_cast_swallows_what_is_not_finite(recipe, role, bad):
    x = skewed(2 * 64, exponent=0).reshape(2, 64)
    x[1, 40] = bad
    y = cast_for(recipe, 0, SharedExponentBank(1))(x, role, record=True)
    assert not y[1, 40].isfinite()
    if recipe in ("s2fp8", "hfp8", "int16"):
        assert torch.equal(y[1, 40].nan_to_num(), torch.tensor(bad).nan_to_num())
        assert (~y.isfinite()).sum() == 1
        x[1, 40] = 0.0  # and the others are cast as if it were not there
        y[1, 40] = 0.0
        assert torch.equal(y, cast_for(recipe, 0, SharedExponentBank(1))(x, role, record=True))


@pytest.mark.parametrize("recipe", ["s2fp8", "hfp8", "int16"])
def test_scalar_formats_are_monotone_and_hfp8_and_int16_idempotent(recipe):
    for role in ROLES:
        cast = cast_for(recipe, 0, SharedExponentBank(1))
        x = skewed(500).sort().values.reshape(1, -1)
        y = cast(x, role, False)
        assert (y.diff() >= 0).all()
        if recipe != "s2fp8":  # which takes a new mean
            assert torch.equal(cast(y, role, False), y)


@pytest.mark.parametrize("recipe", CAST_RECIPES)
def test_no_value_is_read_on_the_host(recipe):
    with FakeTensorMode():
        cast = cast_for(recipe, 0, SharedExponentBank(1))
        for role in ROLES:
            assert cast(torch.randn(5, 41, dtype=torch.bfloat16), role, record=True).shape == (5, 41)


# S2FP8


def s2fp8_reference(values):
    logs = [math.log2(abs(value)) for value in values if value]
    mean, largest = sum(logs) / len(logs), max(logs)
    alpha, beta = (15 / (largest - mean), -15 / (largest - mean) * mean) if largest > mean else (1.0, 15 - largest)
    out = []
    for value in values:
        y = nearest(2.0 ** (alpha * math.log2(abs(value)) + beta), E5M2) if value else 0.0
        out.append(math.copysign((2.0 ** ((math.log2(y) - beta) / alpha)) if y else 0.0, value))
    return out, alpha, beta


@pytest.mark.parametrize("exponent", [-100, -20, 0, 60])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_s2fp8_is_the_papers_formula(dtype, exponent):
    x = skewed(500, dtype, exponent=exponent)
    x[3:9] = 0.0
    expected, alpha, beta = s2fp8_reference(x.tolist())
    squeezed = squeeze(x)
    assert squeezed.alpha.item() == pytest.approx(alpha, rel=1e-12)
    assert squeezed.beta.item() == pytest.approx(beta, rel=1e-12)
    assert torch.allclose(unsqueeze(squeezed), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0.0)
    y = s2fp8_cast(x.reshape(5, 100), "gradient", True).flatten()
    assert torch.allclose(y.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0.0)
    assert set(squeezed.values.abs().tolist()) <= set(E5M2)
    logs = squeezed.alpha * x[x != 0].double().abs().log2() + squeezed.beta
    assert abs(logs.mean().item()) < 1e-9
    assert logs.max().item() == pytest.approx(15.0)


def test_s2fp8_needs_no_loss_scaling():
    # gradients too small for e5m2, whose smallest value is 2^-16, lose nothing to a factor that no one has to choose
    x = skewed(1000, torch.float64, exponent=-50)
    assert hfp8_cast(x[None], "gradient", False).abs().max() == 0
    y = s2fp8_cast(x[None], "gradient", False)[0]
    large = x.abs() > x.abs().median()
    assert ((y - x)[large].abs() / x[large].abs()).max() < 0.2
    for power in (-30, 30):
        assert torch.allclose(s2fp8_cast(x[None] * 2.0**power, "gradient", False)[0], y * 2.0**power, rtol=1e-9)


@pytest.mark.parametrize("value", [1.0, 0.3, 3e38, 1e-38, 1e-45, 65504.0])
def test_s2fp8_of_equal_magnitudes_is_exact(value):
    x = torch.tensor([[value, -value, 0.0, value]])
    squeezed = squeeze(x)
    assert squeezed.alpha.item() == 1.0
    assert squeezed.beta.item() == pytest.approx(15 - math.log2(torch.tensor(value).item()), abs=1e-12)
    assert squeezed.values.tolist() == [[32768.0, -32768.0, 0.0, 32768.0]]
    assert torch.equal(s2fp8_cast(x, "input", False), x)
    for count in (3, 7, 1001, 4099):  # whose mean is not always their value
        many = torch.full((1, count), value)
        assert squeeze(many).alpha.item() == 1.0
        assert torch.equal(s2fp8_cast(many, "input", False), many)
    alone = torch.zeros(1, 41)
    alone[0, 7] = -value
    assert torch.equal(s2fp8_cast(alone, "input", False), alone)


def test_s2fp8_at_the_edges():
    last = torch.full((1000,), 0.3)
    last[0] = torch.nextafter(last[0], torch.tensor(1.0))  # the narrowest spread that float32 has
    assert torch.allclose(s2fp8_cast(last[None], "input", False)[0], last, rtol=2.0**-22)
    pair = torch.tensor([[1.0, 1 + 2.0**-18]])  # log2|y|: -15 and 15, both values of e5m2
    assert torch.equal(s2fp8_cast(pair, "input", False), pair)
    tiny = torch.tensor([[1e-45, 3e-45, 1e-40, 1e-38]])
    assert torch.allclose(s2fp8_cast(tiny, "input", False), tiny, rtol=0.1)
    ends = torch.tensor([[torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, 1.0]])
    y = s2fp8_cast(ends, "input", False)
    assert y.isfinite().all()
    assert y[0, 0] == pytest.approx(ends[0, 0].item(), rel=1e-6)
    assert torch.equal(s2fp8_cast(torch.tensor([[NAN, INF, 0.0]]), "input", False)[0, 1:], torch.tensor([INF, 0]))


# HFP8


def test_hfp8_formats_by_role():
    x = torch.cat([skewed(2000, exponent=0), skewed(2000, exponent=-10), torch.tensor(IBM), torch.tensor([15.5, 1e6])])
    forward = torch.tensor([nearest(value, IBM) for value in x.tolist()])
    for role in ("input", "weight"):
        assert torch.equal(hfp8_cast(x[None], role, True)[0], forward)
    small = x[x.abs() < 57344]
    assert torch.equal(
        hfp8_cast(small[None], "gradient", True)[0],
        torch.tensor([nearest(value, E5M2) for value in small.tolist()]),
    )


def test_hfp8_gradients_overflow_aloud_and_the_ends_have_16_bits():
    x = torch.tensor([[61439.0, 61440.0, -1e6, 1e-5]])
    assert hfp8_cast(x, "gradient", True).tolist() == [[57344.0, INF, -INF, 2.0**-16]]
    assert cast_16bit(x, "gradient", True).tolist() == [[61440.0, 61440.0, -INF, x[0, 3].half().item()]]
    assert cast_16bit(x, "weight", True).tolist() == [[61440.0, 61440.0, -65504.0, x[0, 3].half().item()]]
    y = skewed(1000, exponent=0)
    assert torch.equal(cast_16bit(y, "input"), y.half().float())


def test_weight_updates_are_unbiased_and_stay_on_the_grid():
    start = torch.tensor([1.0, -0.7, 3e-6, 100.0])
    round_weights_([start])
    assert torch.equal(start, start.half().float())
    weight = start.repeat(20_000, 1)
    round_update_([weight], generator())
    assert torch.equal(weight, start.repeat(20_000, 1)), "what no step has moved stays"
    weight += 0.125 * torch.tensor([2.0**-10, 2.0**-11, 2.0**-24, 2.0**-4])
    target = weight[0].clone()
    assert torch.equal(target.half().float(), start), "to nearest, the update would be lost"
    round_update_([weight], generator())
    assert torch.equal(weight, weight.half().float())
    ulp = torch.tensor([2.0**-10, 2.0**-11, 2.0**-24, 2.0**-4])
    deviation = ulp * math.sqrt(0.125 * 0.875 / len(weight))
    assert ((weight.double().mean(0) - target).abs() <= 5 * deviation).all()
    assert ((weight - start).unique(dim=0).abs() <= ulp).all()


def test_many_small_updates_arrive():
    weight = torch.ones(4000)
    random = generator(3)
    for _ in range(64):
        weight += 2.0**-14  # a sixteenth of an ulp
        round_update_([weight], random)
    assert abs(weight.double().mean().item() - (1 + 64 * 2.0**-14)) < 5 * 2.0**-10 * math.sqrt(64 / 16 / 4000)


def test_weight_updates_are_equal_on_ranks_and_resume():
    def run(random, steps, weights):
        for step in range(steps):
            for weight in weights:
                weight += 1e-4 * (step % 3 - 1.3)
            round_update_(weights, random)
        return weights

    def fresh():
        return [torch.full((300,), 0.5), torch.full((7, 9), -2.0)]

    first, second = run(generator(1), 6, fresh()), run(generator(1), 6, fresh())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    random = generator(1)
    halfway = run(random, 3, fresh())
    again = torch.Generator()
    again.set_state(random.get_state())
    assert all(torch.equal(a, b) for a, b in zip(run(again, 3, halfway), first, strict=True))


def test_weight_updates_pass_what_is_not_finite_and_refuse_16_bits():
    weight = torch.nn.Parameter(torch.tensor([NAN, INF, -INF, 1e6, 1.0]))
    round_update_([weight], generator())
    assert weight[0].isnan()
    assert weight[1:].tolist() == [INF, -INF, 65504.0, 1.0]
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(
            ConfigError, match=r"weights must be float32 or float64, got torch\..*load the model in float32"
        ):
            round_update_([torch.ones(2, dtype=dtype)], generator())
        with pytest.raises(ConfigError, match="weights must be float32"):
            round_weights_([torch.ones(2, dtype=dtype)])
