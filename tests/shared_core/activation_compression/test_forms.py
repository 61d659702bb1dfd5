"""Forms of saved tensors: exact ones bit for bit, rounded ones without bias."""

import math

import numpy as np
import pytest
import torch

from shared_core.activation_compression.encodings import exact_form, int8_form, narrow_form, sign_form


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def back(form):
    return form.rebuild(form.parts)


def same_bits(a, b):
    return a.dtype == b.dtype and np.array_equal(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy())


def with_zeros(share, dtype, count=4096):
    x = torch.randn(count, generator=torch.Generator().manual_seed(1))
    x[torch.rand(count, generator=torch.Generator().manual_seed(2)) < share] = 0.0
    x[5], x[6], x[7] = -0.0, math.nan, -math.inf
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("share", "kind"), [(0.5, "bitmap"), (0.99, "index"), (0.2, "bitmap")])
def test_zeros_are_left_out_and_every_bit_comes_back(share, kind, dtype):
    x = with_zeros(share, dtype)
    form = exact_form(x, sparse=True)
    assert form.kind == kind
    assert same_bits(back(form), x)
    others = int((x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]) != 0).sum())
    assert form.nbytes == others * x.element_size() + (len(x) // 8 if kind == "bitmap" else 4 * others)
    assert exact_form(x, sparse=False) is None


def test_few_zeros_are_not_worth_it():
    assert exact_form(with_zeros(0.0, torch.float32), sparse=True) is None
    assert exact_form(with_zeros(0.05, torch.float32), sparse=True) is None


@pytest.mark.parametrize("values", [(0.0, 1 / 0.7), (-0.0, 0.0), (1.5, 1.5), (math.nan, 0.0)])
def test_two_values_are_one_bit_each(values):
    x = torch.tensor(values)[torch.randint(2, (801,))]
    form = exact_form(x, sparse=True)
    assert form.kind == "two_values"
    assert form.nbytes == 101 + 8
    assert same_bits(back(form), x)


def test_a_third_value_that_a_sample_misses_is_kept():
    x = torch.zeros(10_000)
    x[::2] = 2.0
    x[7777] = 3.0
    assert same_bits(back(exact_form(x, sparse=True)), x)


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0, 255, torch.uint8), (-1, 127, torch.int8), (0, 256, torch.int16), (-(2**31), 2**31 - 1, torch.int32)],
)
def test_integers_take_the_narrowest_type_that_holds_them(low, high, dtype):
    x = torch.randint(low, high + 1, (500,))
    x[0], x[1] = low, high
    form = exact_form(x, sparse=False)
    assert form.parts[0].dtype == dtype
    assert torch.equal(back(form), x)
    assert back(form).dtype == torch.int64


def test_what_no_exact_form_makes_smaller():
    assert exact_form(torch.tensor([2**40, 1]), sparse=True) is None
    for dtype in (torch.complex64, torch.uint8, torch.uint32, torch.float8_e4m3fn):
        assert exact_form(torch.ones(64).to(dtype), sparse=True) is None
    assert exact_form(torch.ones(1), sparse=True) is None  # two values and a bit are more than one value


def test_a_sign_is_all_that_the_backward_of_relu_needs():
    x = torch.tensor([0.0, 3.0, -0.0, math.nan, math.inf, 1e-45])
    grad = torch.arange(1.0, 7.0)
    theirs = torch.ops.aten.threshold_backward(grad, x, 0.0)
    assert torch.equal(torch.ops.aten.threshold_backward(grad, back(sign_form(x)), 0.0), theirs)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_16_bits_round_to_nearest(dtype, bound):
    x = torch.randn(1000) + 3
    error = ((back(narrow_form(x, dtype)).double() - x.double()) / x.double()).abs().max()
    assert bound / 2 < error <= bound * 1.01
    odd = back(narrow_form(torch.tensor([math.nan, math.inf, -1e30]), dtype))
    assert odd[0].isnan()
    assert odd[1] == math.inf
    assert odd[2].isfinite()


def test_int8_is_the_reference_for_the_same_draws_and_stays_within_a_step():
    x, size = torch.randn(1000) * 5, 64
    form = int8_form(x, size, torch.Generator().manual_seed(4))
    u = torch.rand(16, size, generator=torch.Generator().manual_seed(4)).double().view(-1)
    rounded = back(form).double()
    for start in range(0, 1000, size):
        group = x[start : start + size].double()
        low, scale = group.min(), (group.max() - group.min()) / 255
        codes = ((group - low) / scale + u[start : start + len(group)]).floor().clamp(0, 255)
        wrong = (rounded[start : start + size] - (codes * scale + low)).abs() > 1e-5
        assert wrong.sum() <= 1  # float32 may fall on the other side of a whole number
        assert ((rounded[start : start + size] - group).abs() <= scale * 1.001).all()
    assert form.nbytes == 1000 + 2 * 4 * 16


def test_int8_has_no_bias_and_the_variance_of_its_formula():
    x, draws, generator = torch.randn(96) * 3, 4000, torch.Generator().manual_seed(0)
    values = torch.stack([back(int8_form(x, 32, generator)) for _ in range(draws)]).double()
    scale = ((x.view(3, 32).amax(1) - x.view(3, 32).amin(1)) / 255).double().repeat_interleave(32)
    place = (x.double() - x.view(3, 32).amin(1).double().repeat_interleave(32)) / scale % 1
    variance = place * (1 - place) * scale**2
    assert ((values.mean(0) - x.double()).abs() <= 5 * (variance / draws).sqrt() + 1e-5).all()
    torch.testing.assert_close(values.var(0).sum(), variance.sum(), rtol=0.05, atol=0)
    assert not torch.equal(values[0], values[1])


def test_int8_of_hostile_groups():
    constant = torch.full((40,), 3.25)
    assert torch.equal(back(int8_form(constant, 16)), constant)
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(32)
        x[3] = bad
        y = back(int8_form(x, 16))
        assert not y[:16].isfinite().any()
        assert torch.equal(y[16:], x[16:])
    half = torch.randn(100, dtype=torch.bfloat16)
    assert back(int8_form(half, 16)).dtype == torch.bfloat16


def test_take_and_put_go_over_the_edges_of_chunks(monkeypatch):
    monkeypatch.setattr("shared_core.activation_compression.encodings._CHUNK", 100)
    x = with_zeros(0.5, torch.float32, 1024)
    form = exact_form(x, sparse=True)
    assert form.kind == "bitmap"
    assert same_bits(back(form), x)
