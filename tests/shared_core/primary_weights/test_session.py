"""Primary weights beside loss scaling, pruning and two processes, and resumed from other runs."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_loop import backward, update
from primary_weights_runs import copies_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import be_a_rank, run_two_ranks

from shared_core import Session, training
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError

STEPS = 12
KINDS = ("fp32_copy", "stochastic_rounding", "kahan")


def net(dtype=torch.float16, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(index, dtype):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(6, 5, generator=generator).to(dtype), torch.randint(3, (6,), generator=generator)


def loss_of(model, index):
    x, y = batch(index, next(model.parameters()).dtype)
    return F.cross_entropy(model(x), y)


def recipe(kind, scaled, **more):
    scale = {"loss_scale": {"kind": "dynamic", "init_scale": 2.0**14, "growth_interval": 3}} if scaled else {}
    return Recipe.from_dict({"primary_weights": {"kind": kind, "telemetry_every": 3}, **scale, **more})


def train(model, optimizer, session, steps, bad=(3, 7)):
    """Train, with an overflow in the bad steps where a scaler looks out for them."""
    for index in steps:
        backward(session, loss_of(model, index))
        if index in bad and "loss_scale" in session.techniques:
            next(model.parameters()).grad[0] = float("inf")
        update(session, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def by_hand(model, steps, bad=(3, 7)):
    """Scale, unscale, clip, skip and step in float32, with the 16-bit model as the rounded weights."""
    weights = list(model.parameters())
    primary = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(primary, lr=1e-3)
    scale, good = 2.0**14, 0
    for index in steps:
        gradients = torch.autograd.grad(loss_of(model, index) * scale, weights)
        if index in bad:
            gradients[0][0] = float("inf")
        gradients = [gradient.float() * (1.0 / scale) for gradient in gradients]
        if not all(gradient.isfinite().all() for gradient in gradients):
            scale, good = scale / 2, 0
            continue
        good += 1
        scale, good = (scale * 2, 0) if good == 3 else (scale, good)
        for wide, gradient in zip(primary, gradients, strict=True):
            wide.grad = gradient
        nn.utils.clip_grad_norm_(primary, 0.5)
        optimizer.step()
        with torch.no_grad():
            for weight, wide in zip(weights, primary, strict=True):
                weight.copy_(wide)
    return primary, scale


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def start(model, optimizer, recipe, state=None):
    session = Session(recipe)
    session.attach(model)
    if state is not None:
        session.load_state_dict(state)
    session.begin([optimizer], total_steps=STEPS)
    return session


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_weights_with_a_dynamic_scale_equal_the_loop_by_hand(fused):
    model, reference = net(), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    session = start(model, optimizer, recipe("fp32_copy", True))
    train(model, optimizer, session, range(STEPS))
    primary, scale = by_hand(reference, range(STEPS))
    copies = copies_of(session)
    if fused:  # another order of the same operations
        for key, wide in zip(copies, primary, strict=True):
            torch.testing.assert_close(copies[key], wide, rtol=1e-5, atol=1e-6)
    else:
        assert same(model, reference)
        assert all(torch.equal(copies[key], wide) for key, wide in zip(copies, primary, strict=True))
    assert session.techniques["loss_scale"].scaler.get_scale() == scale
    assert session.step == STEPS - 2
    assert session.skipped == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_nothing(kind):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = start(model, optimizer, recipe(kind, True))
    train(model, optimizer, session, range(2))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], session.state_dict()))
    train(model, optimizer, session, [2], bad=[2])
    weights, moments, state = before
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    for key, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(moments[key][name], value) for name, value in values.items())
    now = session.state_dict()
    assert torch.equal(now["generator"], state["generator"])
    old, new = (s["techniques"]["primary_weights"]["copies"] for s in (state, now))
    assert all(torch.equal(old[key], new[key]) for key in new)
    assert session.skipped == 1


def test_moments_that_were_loaded_in_16_bit_are_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    session = start(model, optimizer, recipe("fp32_copy", False))
    train(model, optimizer, session, range(2))
    again = net()
    fresh = torch.optim.AdamW(again.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(CheckpointError, match="exp_avg in float16; call session"):
        start(again, fresh, recipe("fp32_copy", False), session.state_dict())
    assert list(again.parameters()) == fresh.param_groups[0]["params"]


@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_a_run_without_primary_weights_are_widened(kind):
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    session = start(model, optimizer, recipe(kind, False))
    train(model, optimizer, session, range(1, 3))
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())


def test_a_run_can_go_on_with_the_other_kind():
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    session = start(model, optimizer, recipe("fp32_copy", False))
    train(model, optimizer, session, range(2))
    state = session.state_dict()
    session.detach()
    for kind in reversed(KINDS):
        other = start(model, optimizer, recipe(kind, False), state)
        train(model, optimizer, other, range(2, 4))
        state = other.state_dict()
        other.detach()
    assert len(state["techniques"]["primary_weights"]["copies"]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_pruned_weights_are_exact_zeros_after_every_step(kind):
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruned = recipe(kind, False, prune={"sparsity": 0.5, "begin": 2, "end": 6, "every": 2})
    assert list(Session(pruned).techniques) == ["primary_weights", "prune"]
    session = start(model, optimizer, pruned)
    share = []
    for index in range(STEPS):
        train(model, optimizer, session, [index])
        zeros = torch.cat([(model[i].weight == 0).flatten() for i in (0, 2)])
        share.append(zeros.float().mean().item())
        reported = session.techniques["prune"].report()
        assert reported["sparsity"] == pytest.approx(share[-1])
    assert share[0] == 0
    assert share[-1] == 0.5
    assert share == sorted(share)
    masks = [model[i].weight == 0 for i in (0, 2)]
    session.finish()
    assert all(torch.equal(model[i].weight == 0, mask) for i, mask in zip((0, 2), masks, strict=True))


# -- two processes


def ddp_by_hand(rank, view):
    """The same reduction in 16 bit, then float32 weights: what DDP and primary weights must come to together."""
    model = net()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    primary = [weight.detach().float() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(primary, lr=1e-3)
    for index in range(6):
        ddp.zero_grad()
        (loss_of(ddp, 2 * index + rank) * 1024.0).backward()
        for weight, wide in zip(model.parameters(), primary, strict=True):
            wide.grad = weight.grad.float() * (1.0 / 1024.0)
        nn.utils.clip_grad_norm_(primary, 0.5)
        optimizer.step()
        with torch.no_grad():
            for weight, wide in zip(model.parameters(), primary, strict=True):
                weight.copy_(wide)
    return model


def ddp_by_session(rank, view, kind="fp32_copy", set_to_none=True, scaled=True):
    model = net()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = {"loss_scale": {"kind": "static", "init_scale": 1024.0}} if scaled else {}
    session = Session({"primary_weights": {"kind": kind}, **scale})
    session.attach(model)
    session.begin([optimizer], total_steps=6)
    for index in range(6):
        loss = loss_of(ddp, 2 * index + rank) * (1 if scaled else 1024.0)
        if scaled:
            scaler = session.techniques["loss_scale"].scaler
            loss = scaler.scale(loss)
        loss.backward()
        reduced = [weight.grad.data_ptr() for weight in model.parameters()]
        if scaled:
            scaler.unscale_(optimizer)
        session.before_step()
        assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())
        if not scaled:
            for weight in model.parameters():
                weight.grad *= 1.0 / 1024.0
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        session.after_step()
        # the buckets again, with the gradients that were used
        assert [weight.grad.data_ptr() for weight in model.parameters()] == reduced
        assert sum(weight.grad.double().square().sum() for weight in model.parameters()) < 0.51**2
        optimizer.zero_grad(set_to_none)
    assert session.techniques["primary_weights"].report()["gradients"] == "reduced in 16 bit"
    return model


def two_processes(rank, folder):
    for view in (False, True):
        reference = ddp_by_hand(rank, view)
        for set_to_none in (False, True):
            for scaled in (False, True):
                model = ddp_by_session(rank, view, set_to_none=set_to_none, scaled=scaled)
                assert same(model, reference), (view, set_to_none, scaled)
        assert not same(reference, net())
    drawn = ddp_by_session(rank, True, "stochastic_rounding")
    assert not same(drawn, reference)
    flat = torch.cat([weight.detach().flatten().float() for weight in drawn.parameters()])
    ranks = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(ranks, flat)
    assert torch.equal(*ranks)


@pytest.mark.slow
def test_two_processes(tmp_path):
    run_two_ranks(__file__, tmp_path)


if __name__ == "__main__":
    be_a_rank(two_processes)


class HalfMomentum(torch.optim.Optimizer):
    """Stores its momentum in bfloat16 and its second moments in float32, and loads both as they are."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            momentum = state.setdefault("momentum", torch.zeros_like(weight, dtype=torch.bfloat16))
            second = state.setdefault("second", torch.zeros_like(weight, dtype=torch.float32))
            momentum.lerp_(weight.grad.bfloat16(), 0.1)
            second.lerp_(weight.grad.float().square(), 0.1)
            weight.sub_(0.01 * momentum / (second.sqrt() + 1e-3))

    def load_state_dict(self, state):
        held = self.param_groups[0]["params"]
        self.state.clear()
        self.state.update({held[index]: dict(values) for index, values in state["state"].items()})


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_stores_one_moment_in_16_bit_resumes(kind):
    def trained(steps, resumed=None):
        model = net(torch.bfloat16)
        optimizer = HalfMomentum(model.parameters())
        session = Session(recipe(kind, False))
        session.attach(model)
        if resumed:
            weights, state, own = resumed
            model.load_state_dict(weights)
            session.load_state_dict(own)
            session.prepare_optimizers([optimizer])
            optimizer.load_state_dict(state)
        session.begin([optimizer], total_steps=8)
        train(model, optimizer, session, steps)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))

    whole, half = trained(range(8)), trained(range(4))
    resumed = trained(range(4, 8), half)
    assert all(torch.equal(value, whole[0][name]) for name, value in resumed[0].items())
    assert resumed[1]["state"][0]["momentum"].dtype == torch.bfloat16


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_loads_its_optimizer_in_the_block_resumes(kind, optimizer):
    """As docs/resume.md shows."""

    def trained(steps, resumed=None):
        model = net(torch.bfloat16)
        more = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        own = optimizer(model.parameters(), lr=0.01, **more)
        state = resumed or {"session": None}
        if resumed:
            model.load_state_dict(resumed["model"])
        given = {"primary_weights": {"kind": kind}}
        with training(given, model, own, total_steps=8, resumed=state["session"]) as loop:
            if resumed:
                own.load_state_dict(resumed["optimizer"])
            for index in steps:
                with loop.forward():
                    loss = loss_of(model, index)
                loop.backward(loss)
                loop.step()
                loop.zero_grad()
            kept = {"model": model.state_dict(), "optimizer": own.state_dict(), "session": loop.session.state_dict()}
            return copy.deepcopy(kept)

    whole, resumed = trained(range(8)), trained(range(4, 8), trained(range(4)))
    assert all(torch.equal(value, whole["model"][name]) for name, value in resumed["model"].items())
    for place, state in resumed["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, whole["optimizer"]["state"][place][name]), name
            assert value.dtype == torch.float32
