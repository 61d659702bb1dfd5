"""How far optimizers move what is learned of a grid: as the papers' SGD does, and with Adam no more than weights."""

import math

import pytest
import torch
from plain_loop import begun_session, plain_step
from torch import nn

from shared_core.engine.session import Session


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
    return session.deployment()["qat"]["ranges"]["0"]


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
    session.verify(None, "the model")
