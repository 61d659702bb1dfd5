"""Learned grids against float64 references written from the papers, and how far optimizers move them."""

import math

import numpy as np
import pytest
import torch
from eff_kernels.quantization.learned import SMALLEST_SCALE
from plain_loop import begun_session, plain_step
from torch import nn

from shared_core import Session
from shared_core.errors import ConfigError
from shared_core.quantization import (
    choose_qparams_affine,
    fake_quantize,
    learned_range_fake_quantize,
    lsq_fake_quantize,
    lsq_grad_scale,
    lsq_init_scale,
    pact,
)


def lsq_reference(x, s, z, qmin, qmax, grad, rounded=False):
    """Value and gradients of LSQ's equations 1 to 5, one element after the other in Python floats."""
    z = min(max(float(np.rint(z)), qmin), qmax)
    y, dx, ds, dz = np.zeros_like(x), np.zeros_like(x), 0.0, 0.0
    for i, (v, g) in enumerate(zip(x / s, grad, strict=True)):
        place = float(np.rint(v)) + z if rounded else v + z
        y[i] = s * (min(max(float(np.rint(v)) + z, qmin), qmax) - z)
        if place < qmin:
            ds, dz = ds + g * (qmin - z), dz - g * s
        elif place > qmax:
            ds, dz = ds + g * (qmax - z), dz - g * s
        else:
            dx[i] = g
            ds += g * (float(np.rint(v)) - v)
    return y, dx, ds, dz


def leaf(*values, dtype=torch.float64):
    return torch.tensor(values if len(values) > 1 else values[0], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("gate", ["unrounded", "rounded"])
@pytest.mark.parametrize(("scale", "zero_point", "qmin", "qmax"), [
    (0.37, 0.0, -8, 7), (0.37, 2.4, -8, 7), (0.05, -1.6, -128, 127), (0.9, 3.5, 0, 15), (1.7, 0.0, -2, 1),
    (0.37, 40.0, -8, 7), (0.5, 0.0, -8, 7),
])  # fmt: skip
def test_lsq_equals_the_closed_form(scale, zero_point, qmin, qmax, gate):
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(600, generator=generator) * 4, torch.arange(-20, 20) * scale / 2]).double()
    grad = torch.randn(len(x), generator=generator).double()
    value, dx, ds, dz = lsq_reference(x.numpy(), scale, zero_point, qmin, qmax, grad.numpy(), gate == "rounded")
    x.requires_grad_()
    s, z = leaf(scale), leaf(zero_point)
    y = lsq_fake_quantize(x, s, qmin, qmax, zero_point=z, gate=gate, grad_scale=0.125)
    y.backward(grad)
    np.testing.assert_allclose(y.detach().numpy(), value, rtol=1e-12, atol=0)
    assert np.array_equal(x.grad.numpy(), dx)
    assert s.grad.item() == pytest.approx(0.125 * ds, rel=1e-10)
    assert z.grad.item() == pytest.approx(0.125 * dz, rel=1e-10)
    if zero_point == 0:
        s.grad = None
        lsq_fake_quantize(x, s, qmin, qmax, gate=gate, grad_scale=0.125).backward(grad)
        assert s.grad.item() == pytest.approx(0.125 * ds, rel=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float16, 1e-6),
])  # fmt: skip
def test_lsq_in_narrow_types_sums_in_float32(dtype, tolerance):
    torch.manual_seed(1)
    x = (torch.randn(4096) * 3).to(dtype)
    grad = torch.rand(4096).to(dtype)
    s = leaf(0.25, dtype=torch.float32)
    y = lsq_fake_quantize(x, s, -8, 7, grad_scale=1.0)
    y.backward(grad)
    value, _, ds, _ = lsq_reference(x.double().numpy(), 0.25, 0, -8, 7, grad.double().numpy())
    assert y.dtype == dtype
    assert torch.equal(y.detach(), torch.from_numpy(value).to(dtype))
    assert s.grad.dtype == torch.float32
    assert s.grad.item() == pytest.approx(ds, rel=tolerance)


def test_a_scale_of_a_narrow_type_gets_its_gradient_in_it():
    s = leaf(0.25, dtype=torch.bfloat16)
    lsq_fake_quantize(torch.ones(8, dtype=torch.bfloat16) * 9, s, -8, 7, grad_scale=1.0).sum().backward()
    assert s.grad.dtype == torch.bfloat16
    assert s.grad.item() == 56.0


# Not below zero: there the per-tensor op's backward takes another zero point than its forward (torch 2.13, -2 becomes
# -1); the per-channel op does not.
@pytest.mark.parametrize(
    ("axis", "point"), [*((None, point) for point in (0.0, 3.0, 2.4, 5.6)), (0, 0), (1, 0), (-1, 0)]
)
def test_lsq_equals_torchs_learnable_op(axis, point):
    torch.manual_seed(2)
    shape = (3000,) if axis is None else (4, 6, 8)
    start, grad = torch.randn(shape) * 6, torch.randn(shape)
    channels = torch.arange(1 if axis is None else shape[axis])
    results = []
    for ours in (True, False):
        x, s = start.clone().requires_grad_(), (2.0 ** -(1 + channels % 4)).requires_grad_()
        z = (torch.full((1,), point) if axis is None else channels % 5 - 2.4).requires_grad_()
        if ours:
            y = lsq_fake_quantize(x, s, -8, 7, axis=axis, zero_point=z, gate="rounded", grad_scale=0.125)
        elif axis is None:
            y = torch._fake_quantize_learnable_per_tensor_affine(x, s, z, -8, 7, 0.125)
        else:
            y = torch._fake_quantize_learnable_per_channel_affine(x, s, z, axis % 3, -8, 7, 0.125)
        y.backward(grad)
        results.append((y.detach(), x.grad, s.grad, z.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradient_scale_counts_what_shares_a_scale():
    assert lsq_grad_scale((64, 32, 3, 3), 7) == pytest.approx((64 * 32 * 9 * 7) ** -0.5)
    assert lsq_grad_scale((64, 32, 3, 3), 7, 0) == pytest.approx((32 * 9 * 7) ** -0.5)
    assert lsq_grad_scale((64, 32, 3, 3), 7, 1) == pytest.approx((64 * 9 * 7) ** -0.5)
    assert lsq_grad_scale((128, 32, 10), 15, activation=True) == pytest.approx((320 * 15) ** -0.5)
    assert lsq_grad_scale((128, 32, 10), 15, 1, activation=True) == pytest.approx((10 * 15) ** -0.5)
    torch.manual_seed(4)
    x = torch.randn(8, 32)
    grads = []
    for factor in (None, 1.0):
        s = torch.full((8,), 0.3, requires_grad=True)
        lsq_fake_quantize(x, s, -8, 7, axis=0, grad_scale=factor).square().sum().backward()
        grads.append(s.grad)
    torch.testing.assert_close(grads[0], grads[1] * (32 * 7) ** -0.5)


def test_initial_scale():
    torch.manual_seed(5)
    x = torch.randn(6, 5, 3, 3)
    x[2] = 0
    expected = 2 * x.double().abs().mean((1, 2, 3)) / 7**0.5
    expected[2] = 1
    torch.testing.assert_close(lsq_init_scale(x, 7, 0).double(), expected, rtol=1e-6, atol=0)
    assert lsq_init_scale(x, 127).shape == ()
    assert torch.equal(lsq_init_scale(torch.tensor([1.0, -3.0]), 4, 0), torch.tensor([1.0, 3.0]))
    assert lsq_init_scale(torch.full((4,), 60000.0, dtype=torch.float16), 1).item() == 120000.0
    assert not lsq_init_scale(torch.ones(3, requires_grad=True), 7).requires_grad
    with pytest.raises(ConfigError, match="x must be finite"):
        lsq_init_scale(torch.tensor([1.0, float("nan")]), 7)


@pytest.mark.parametrize("bad", [0.0, -0.5])
def test_a_scale_that_a_step_made_negative_comes_back(bad):
    s = leaf(bad, dtype=torch.float32)
    optimizer = torch.optim.Adam([s], lr=0.05)
    torch.manual_seed(6)
    x = torch.randn(1000)
    x[0] = 0
    y = lsq_fake_quantize(x, s, -8, 7)
    assert y.isfinite().all()
    assert (y.abs() <= 8 * SMALLEST_SCALE).all()
    for _ in range(60):
        optimizer.zero_grad()
        (lsq_fake_quantize(x, s, -8, 7) - x).square().sum().backward()
        assert s.grad.isfinite()
        optimizer.step()
    assert 0.1 < s.item() < 1.0


def test_learning_the_scale_lowers_the_error_that_it_started_from():
    torch.manual_seed(7)
    x = torch.randn(16, 256)
    s = lsq_init_scale(x, 1, 0).requires_grad_()
    z = torch.zeros(16, requires_grad=True)

    def error():
        return (lsq_fake_quantize(x, s, -2, 1, axis=0, zero_point=z, grad_scale=1.0) - x).square().mean()

    before = error().item()
    optimizer = torch.optim.Adam([s, z], lr=0.02)
    for _ in range(100):
        optimizer.zero_grad()
        error().backward()
        optimizer.step()
    assert error().item() < 0.9 * before


def test_infinity_saturates_and_nan_is_not_swallowed():
    x = torch.tensor([float("inf"), -float("inf"), 0.2], requires_grad=True)
    s = leaf(0.5, dtype=torch.float32)
    y = lsq_fake_quantize(x, s, -8, 7, grad_scale=1.0)
    assert y.tolist() == [3.5, -4.0, 0.0]
    y.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 1.0]
    assert s.grad.item() == pytest.approx(7 - 8 - 0.4)
    nan = torch.tensor([float("nan"), 1.0])
    for op in (
        lambda v: lsq_fake_quantize(v, s, -8, 7),
        lambda v: learned_range_fake_quantize(v, torch.tensor(-1.0), torch.tensor(1.0), 0, 15),
        lambda v: pact(v, torch.tensor(2.0), 4),
    ):
        assert op(nan).isnan().tolist() == [True, False]
    for bad in (leaf(float("nan"), dtype=torch.float32), leaf(float("inf"), dtype=torch.float32)):
        assert lsq_fake_quantize(torch.ones(2), bad, -8, 7).isnan().any()
    lsq_fake_quantize(nan, s, -8, 7).sum().backward()
    assert s.grad.isnan()


@pytest.mark.parametrize(("minimum", "maximum"), [(-1.3, 2.1), (0.0, 3.0), (0.5, 3.0), (-2.0, -0.1), (0.0, 0.0)])
@pytest.mark.parametrize("gate", ["unrounded", "rounded"])
def test_learned_range_has_the_overflow_gradient(minimum, maximum, gate):
    torch.manual_seed(8)
    x, grad = (torch.randn(500) * 2).double(), torch.randn(500).double()
    low, high = min(minimum, 0.0), max(maximum, 0.0)
    s = (high - low) / 15 or 1.0
    z = float(np.clip(np.rint(-8 - low / s), -8, 7))
    place = x.numpy() / s + z if gate == "unrounded" else np.rint(x.numpy() / s) + z
    value = s * (np.clip(np.rint(x.numpy() / s) + z, -8, 7) - z)
    x.requires_grad_()
    lower, upper = leaf(minimum), leaf(maximum)
    y = learned_range_fake_quantize(x, lower, upper, -8, 7, gate=gate)
    y.backward(grad)
    np.testing.assert_allclose(y.detach().numpy(), value, rtol=1e-12, atol=1e-15)
    g = grad.numpy()
    assert np.array_equal(x.grad.numpy(), np.where((place >= -8) & (place <= 7), g, 0.0))
    assert lower.grad.item() == pytest.approx(g[place < -8].sum(), rel=1e-10, abs=1e-12)
    assert upper.grad.item() == pytest.approx(g[place > 7].sum(), rel=1e-10, abs=1e-12)


def test_learned_range_is_fake_quantize_over_that_range():
    torch.manual_seed(9)
    x = torch.randn(3, 40)
    low, high = torch.tensor([-1.0, -0.5, 0.0]), torch.tensor([1.0, 2.0, 3.0])
    scale, zero_point = choose_qparams_affine(low, high, -128, 127)
    ours = learned_range_fake_quantize(x, low, high, -128, 127, axis=0)
    assert torch.equal(ours, fake_quantize(x, scale, zero_point, -128, 127, axis=0))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pact_equals_its_equations(bits, dtype):
    torch.manual_seed(10)
    levels = 2**bits - 1
    alpha = levels / 64  # the step is a power of two, so that every type rounds alike
    x = torch.cat([torch.randn(500) * 3, torch.tensor([0.0, -0.0, alpha, -1e-3, 100.0, float("inf")])]).to(dtype)
    grad = torch.randn(len(x)).to(dtype)
    exact, g = x.double().numpy(), grad.double().numpy()
    y = 0.5 * (np.abs(exact[:-1]) - np.abs(exact[:-1] - alpha) + alpha)  # equation 1
    value = np.append(np.rint(y * levels / alpha) * alpha / levels, alpha)
    x.requires_grad_()
    a = torch.tensor(alpha, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True)
    out = pact(x, a, bits)
    out.backward(grad)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.detach().double().numpy(), value, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert np.array_equal(x.grad.double().numpy(), np.where((exact >= 0) & (exact < alpha), g, 0.0))
    assert a.grad.item() == pytest.approx(g[exact >= alpha].sum(), rel=1e-5)


def test_pact_bound_per_channel_and_back_from_below_zero():
    torch.manual_seed(11)
    x = torch.randn(4, 3, 5) * 2
    alpha = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    y = pact(x, alpha, 4, axis=1)
    y.sum().backward()
    for index in range(3):
        assert torch.equal(y[:, index], pact(x[:, index], alpha[index], 4))
    assert torch.equal(alpha.grad, (x >= alpha.detach()[:, None]).sum((0, 2)).float())
    low = torch.tensor(-1.0, requires_grad=True)
    out = pact(x, low, 8)
    assert (out.abs() <= 1e-30).all()
    (out - x.relu()).square().sum().backward()
    assert low.grad < 0  # descent raises it


@pytest.mark.parametrize("op", ["lsq", "range", "pact"])
def test_compiles_as_one_graph_and_batches(op):
    torch.manual_seed(12)
    a, b = torch.tensor([0.25, 0.5, 1.0]), torch.tensor([0.4, -1.0, 2.0])

    def apply(x, a, b):
        if op == "lsq":
            return lsq_fake_quantize(x, a, -8, 7, axis=0, zero_point=b, grad_scale=0.5)
        if op == "range":
            return learned_range_fake_quantize(x, -a, a + b.abs(), -8, 7, axis=0)
        return pact(x, a, 4, axis=0)

    def loss(x, a, b):
        return apply(x, a, b).square().sum()

    x = torch.randn(3, 50)
    grads = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [value.clone().requires_grad_() for value in (x, a, b)]
        run(*leaves).backward()
        grads.append([value.grad for value in leaves if value.grad is not None])
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(eager, compiled)
    examples = torch.stack([x, 2 * x])
    per_example = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None, None))(examples, a, b)
    for index in range(2):
        alone = torch.func.grad(loss, argnums=(0, 1))(examples[index], a, b)
        for batched, single in zip(per_example, alone, strict=True):
            torch.testing.assert_close(batched[index], single)
    one_x = torch.func.vmap(loss, in_dims=(None, 0, None))(x, torch.stack([a, 2 * a]), b)
    torch.testing.assert_close(one_x, torch.stack([loss(x, a, b), loss(x, 2 * a, b)]))


@pytest.mark.parametrize("gate", ["unrounded", "rounded"])
def test_the_gradient_of_the_scale_has_one(gate):
    x = torch.tensor([0.31, -0.9, 2.5, -4.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    y = lsq_fake_quantize(x, scale, -8, 7, grad_scale=1.0, gate=gate)
    (slope,) = torch.autograd.grad(y.sum(), scale, create_graph=True)  # of ne(x/s) − x/s inside, of a constant outside
    by_x, by_scale = torch.autograd.grad(slope, (x, scale))
    assert torch.allclose(by_x, torch.tensor([-5.0, -5.0, 0.0, 0.0], dtype=torch.float64))
    assert by_scale.item() == pytest.approx((0.31 - 0.9) / 0.2**2)


def test_an_empty_batch_gives_an_empty_result_and_zero_gradients():
    s = torch.tensor(0.5, requires_grad=True)
    y = lsq_fake_quantize(torch.zeros(0, 4), s, -8, 7, grad_scale=lsq_grad_scale((0, 4), 7, activation=True))
    y.sum().backward()
    assert y.shape == (0, 4)
    assert s.grad == 0


X, S = torch.ones(2, 3), torch.tensor(0.5)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: lsq_fake_quantize(torch.ones(2, dtype=torch.int8), S, -8, 7), "x must be a floating-point tensor"),
    (lambda: lsq_fake_quantize(X, 0.5, -8, 7), "scale must be a floating-point tensor, got float"),
    (lambda: lsq_fake_quantize(X, torch.ones(3), -8, 7), "scale must be one number"),
    (lambda: lsq_fake_quantize(X, torch.ones(2), -8, 7, axis=1), "one value for each of the 3 channels"),
    (lambda: lsq_fake_quantize(X, torch.ones(3), -8, 7, axis=2), "axis must name one of the 2 axes"),
    (lambda: lsq_fake_quantize(X, S, -8, 7, zero_point=torch.ones(3)), "zero_point must be one number"),
    (lambda: lsq_fake_quantize(X, S, -1, 0), "qmax must be a whole number from 1"),
    (lambda: lsq_fake_quantize(X, S, 7, 7), "qmin must be below qmax"),
    (lambda: lsq_fake_quantize(X, S, -8, 7, gate="soft"), "gate must be"),
    (lambda: lsq_fake_quantize(X, S, -8, 7, grad_scale=float("nan")), "grad_scale must be 0 or more"),
    (lambda: lsq_grad_scale((3, 4), 0), "qmax must be a whole number"),
    (lambda: lsq_grad_scale((3, 4), 7, 0, activation=True), "axis 0 of an activation must hold its examples"),
    (lambda: lsq_init_scale(torch.zeros(0), 7), "x must be a floating-point tensor with elements"),
    (lambda: learned_range_fake_quantize(X, S, torch.ones(3), -8, 7), "maximum must be one number"),
    (lambda: pact(X, S, 9), "bits must be a whole number from 2 to 8"),
    (lambda: pact(X, torch.ones(3), 4), "alpha must be one number"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def start(make_optimizer, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8)).double()
    session = Session({"qat": {"scheme": "int8", **options}})
    session.attach(model)
    optimizer = make_optimizer(model.parameters())
    session.begin([optimizer], total_steps=12)
    return model, session, optimizer


def step(model, session, optimizer, x, target):
    plain_step(session, optimizer, (model(x) - target).square().mean())


def entry_of(session):
    return session.files.deployment()["qat"]["ranges"]["0"]


def quantized(x, scale, zero, qmin, qmax):
    """LSQ's and LSQ+'s forward with straight-through rounding, by autograd."""
    zero = zero + (zero.round().clamp(qmin, qmax) - zero).detach()
    codes = (x / scale + zero).clamp(qmin, qmax)
    codes = codes + (((x / scale).round() + zero).clamp(qmin, qmax) - codes).detach()
    return (codes - zero) * scale


@pytest.mark.parametrize("name", ["lsq", "lsq_plus"])
@pytest.mark.parametrize("bits", [4, 8])
def test_sgd_moves_scales_and_offsets_as_the_papers_do(name, bits):
    model, session, optimizer = start(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), range=name, weight_bits=bits, activation_bits=bits
    )
    x, target = torch.randn(16, 32).double() + 0.5, torch.randn(16, 8).double()
    step(model, session, optimizer, x, target)  # shows the input's range
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    entry = entry_of(session)
    weight, bias = (value.detach().clone().requires_grad_() for value in (model[0].weight, model[0].bias))
    scales = torch.tensor(entry["weight_scale"], dtype=torch.float64).requires_grad_()
    scale = torch.tensor(entry["scale"], dtype=torch.float64).requires_grad_()
    offset = (-scale * entry["zero_point"]).detach().requires_grad_()
    theirs = torch.optim.SGD([weight, bias, scales, scale, offset], lr=0.05, momentum=0.9)
    ours, buffers = [model[0].weight, model[0].bias], optimizer.state
    for mine, other in zip(ours, (weight, bias), strict=True):
        theirs.state[other]["momentum_buffer"] = buffers[mine]["momentum_buffer"].clone()
    # momentum is in the units of what is learned
    steps = {"lsq": math.sqrt(qmax) / 2, "lsq_plus": 2 ** (bits - 1) / 3}[name]
    found = dict(model[0].named_parameters())["weight_magnitude"]
    theirs.state[scales]["momentum_buffer"] = buffers[found]["momentum_buffer"] / steps
    for _ in range(6):
        zero = -offset / scale if name == "lsq_plus" else torch.zeros(())
        x_hat = quantized(x, scale, zero, qmin, qmax)
        w_hat = quantized(weight, scales.unsqueeze(1), torch.zeros(()), qmin, qmax)
        (nn.functional.linear(x_hat, w_hat, bias) - target).square().mean().backward()
        for value in (scales, scale, offset):
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad / math.sqrt(32 * qmax)
        theirs.step()
        theirs.zero_grad()
        step(model, session, optimizer, x, target)
    entry = entry_of(session)
    assert torch.tensor(entry["weight_scale"]).double().allclose(scales.detach(), rtol=1e-4)
    assert entry["scale"] == pytest.approx(scale.item(), rel=1e-4)
    if name == "lsq_plus":
        assert entry["zero_point"] == round((-offset / scale).item())
    assert model[0].weight.detach().allclose(weight.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["lsq", "lsq_plus"])
def test_adam_moves_scales_by_no_larger_a_share_than_weights(name):
    rate = 1e-3
    model, session, optimizer = start(lambda p: torch.optim.Adam(p, lr=rate), range=name)
    size = model[0].weight.detach().abs().mean(1)
    x, target = torch.randn(16, 32).double() + 0.5, torch.randn(16, 8).double()
    step(model, session, optimizer, x, target)
    before = entry_of(session)
    step(model, session, optimizer, x, target)
    after = entry_of(session)
    scales = [torch.tensor(entry["weight_scale"], dtype=torch.float64) for entry in (before, after)]
    moved = (scales[1] / scales[0] - 1).abs()
    assert (moved <= 1.2 * rate / size).all()
    assert moved.max() > 0.1 * rate / size.mean()
    assert abs(after["scale"] / before["scale"] - 1) < 2 * rate


def test_no_step_takes_a_scale_below_zero():
    model, session, optimizer = start(lambda p: torch.optim.Adam(p, lr=0.5), range="lsq")
    x, target = torch.randn(16, 32).double(), torch.randn(16, 8).double()
    for _ in range(8):
        step(model, session, optimizer, x, target)
        entry = entry_of(session)
        assert min(entry["weight_scale"]) > 0 < entry["scale"]
        learned = [value for name, value in model.named_parameters() if "magnitude" in name]
        assert min(value.min().item() for value in learned) > 0


def test_a_folded_weight_with_the_smallest_code_lies_on_the_grid_that_the_receipt_tells():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    session, optimizer = begun_session({"qat": {"scheme": "int8", "range": "lsq_plus"}}, model, 1, lr=0.0)
    with torch.no_grad():
        model[0].weight_magnitude.mul_(0.5)  # rows reach past both ends of the codes
    step(model, session, optimizer, torch.randn(8, 8), torch.randn(8, 4))
    session.finish()
    assert (model[0].weight.amax(1) < -model[0].weight.amin(1)).any()
    session.files.verify(None, "the model")
