"""Primary weights in a bare loop: against the same loop with float32 weights written out by hand."""

import pytest
import torch
from primary_weights_runs import KINDS, OPTIMIZERS, STEPS, begin, by_session, copies_of, loss_of, net, stepped
from torch import nn

from shared_core import Session

HALF = (torch.float16, torch.bfloat16)


def by_hand(model, make, *, accumulate=1, clip=None, gamma=1.0):
    """Train with float32 weights beside the model, whose 16-bit weights are theirs rounded."""
    trained = [p for p in model.parameters() if p.requires_grad]
    primary = [p.detach().float() for p in trained]
    optimizer = make(primary)
    # untied, so that both gradients of the tied weight can be added in float32
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    for step in range(STEPS):
        for p in primary:
            p.grad = None
        for micro in range(accumulate):
            loss = loss_of(model, step * accumulate + micro) / accumulate
            gradients = torch.autograd.grad(loss, [*trained, model.head.weight], allow_unused=True)
            *wide, of_head = [None if gradient is None else gradient.float() for gradient in gradients]
            for p, source, gradient in zip(primary, trained, wide, strict=True):
                if gradient is not None:
                    gradient = gradient + of_head if source is model.embed.weight else gradient
                    p.grad = gradient if p.grad is None else p.grad + gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(primary, clip)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= gamma
        with torch.no_grad():
            for p, wide in zip(trained, primary, strict=True):
                p.copy_(wide)
            model.head.weight.copy_(model.embed.weight)
    model.head.weight = model.embed.weight
    return primary


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_equals_the_one_by_hand(dtype, name):
    model, reference = net(dtype), net(dtype)
    session, optimizer = by_session(model, OPTIMIZERS[name], accumulate=2, clip=0.3, gamma=0.9)
    primary = by_hand(reference, OPTIMIZERS[name], accumulate=2, clip=0.3, gamma=0.9)
    assert same(model, reference)
    copies = copies_of(session)
    assert list(copies) == [key for key, p in reference.named_parameters() if p.requires_grad]
    for key, wide in zip(copies, primary, strict=True):
        assert torch.equal(copies[key], wide)
    assert any(not torch.equal(wide, wide.to(dtype).float()) for wide in primary)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert moments
    assert all(value.dtype == torch.float32 for value in moments)
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("clip_groups", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_clipping_either_tensors_and_zeroing_either_way_are_the_same(clip_groups, set_to_none):
    model, reference = net(torch.float16), net(torch.float16)
    by_session(model, OPTIMIZERS["adamw"], clip=0.1, clip_groups=clip_groups, set_to_none=set_to_none)
    by_hand(reference, OPTIMIZERS["adamw"], clip=0.1)
    assert same(model, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_through_the_optimizer_before_the_session_hears_of_the_step(kind):
    models = [net(torch.float16), net(torch.float16)]
    for model, early in zip(models, (True, False), strict=True):
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        session = begin(model, optimizer, kind)
        for step in range(4):
            loss_of(model, step).backward()
            session.before_step()
            optimizer.step()
            if early:
                optimizer.zero_grad()
            session.after_step()
            optimizer.zero_grad()
    assert same(*models)


def adamw64(weight, gradients, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01):
    weight, first, second = weight.double(), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        weight = weight * (1 - lr * decay)
        first, second = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
        weight = weight - lr * (first / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt() + eps)
    return weight


def test_the_copy_follows_a_float64_adamw():
    gradients = [torch.randn(64, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16) for i in range(50)]
    weight = nn.Parameter(torch.linspace(-2, 2, 64).to(torch.bfloat16))
    holder = nn.ParameterList([weight])
    start = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.01)
    session = begin(holder, optimizer)
    for gradient in gradients:
        weight.grad = gradient.float()
        stepped(session, optimizer)
    exact = adamw64(start, [gradient.double() for gradient in gradients])
    copy = copies_of(session)["0"]
    torch.testing.assert_close(copy.double(), exact, rtol=2e-6, atol=2e-6)
    assert torch.equal(weight, copy.to(torch.bfloat16))


def take_steps(weight, update, steps, kind):
    """Subtract a constant update as often as asked, with primary weights or, with kind None, without."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    session = begin(nn.ParameterList([weight]), optimizer, kind) if kind else None
    for _ in range(steps):
        weight.grad = torch.full_like(weight, update, dtype=torch.float32 if kind else weight.dtype)
        stepped(session, optimizer) if session else optimizer.step()
    return session


@pytest.mark.parametrize("dtype", HALF)
def test_updates_below_half_an_ulp_vanish_without_a_copy_and_add_up_with_it(dtype):
    # Micikevicius et al. 2018, section 3.1: a weight at least 2048 times its update does not move in fp16.
    plain, kept = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    take_steps(plain, 1e-4, 100, None)
    session = take_steps(kept, 1e-4, 100, "fp32_copy")
    assert plain.tolist() == [1.0] * 3
    copy = copies_of(session)["0"]
    torch.testing.assert_close(copy, torch.full((3,), 0.99), rtol=0, atol=100 * 2.0**-24)  # half an ulp a step
    assert torch.equal(kept, copy.to(dtype))
    figures = session.figures()
    assert figures == {"primary_weights/small_updates": 1.0}  # counted at the first step


@pytest.mark.parametrize("dtype", HALF)
def test_stochastic_rounding_moves_in_the_mean(dtype):
    count, steps = 40_000, 20
    weight = nn.Parameter(torch.ones(count, dtype=dtype))
    session = take_steps(weight, 1e-4, steps, "stochastic_rounding")
    ulp = torch.finfo(dtype).eps / 2  # below 1.0
    # every step adds the variance ulp²·f·(1-f) of a Bernoulli of f = update / ulp
    fraction = 1e-4 / ulp
    deviation = ulp * (fraction * (1 - fraction) * steps / count) ** 0.5
    assert abs(weight.double().mean().item() - (1 - steps * 1e-4)) < 5 * deviation
    assert set(weight.unique().tolist()) <= {1 - k * ulp for k in range(steps + 1)}
    assert copies_of(session) == {}


def test_the_draws_come_from_the_runs_own_generator():
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))
        weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        session = Session({"primary_weights": {"kind": "stochastic_rounding"}}, seed=seed)
        session.attach(nn.ParameterList([weight]))
        session.begin([optimizer], total_steps=1)
        before = torch.get_rng_state()
        weight.grad = torch.full((1000,), 1e-3)
        stepped(session, optimizer)
        assert torch.equal(torch.get_rng_state(), before)
        runs.append(weight.detach())
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_eight_bit_optimizer_updates_float32_values():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=1e-4, weight_decay=0.0)
    session = begin(nn.ParameterList([weight]), optimizer)
    for _ in range(40):
        weight.grad = torch.ones(64, 128)
        stepped(session, optimizer)
    copy = copies_of(session)["0"]
    torch.testing.assert_close(copy, torch.full((64, 128), 1 - 40e-4), rtol=0, atol=1e-5)
    assert optimizer.state[weight]["state1"].dtype == torch.uint8
