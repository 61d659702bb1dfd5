"""Loss scaling and distillation in one session of a bare loop, saved and resumed through a file."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session
from shared_core.engine.state_file import load_state, save_state

STEPS = 12


def net(width, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def start(model, optimizer, teacher, state=None):
    session = Session(
        Recipe.from_dict(
            {
                "distill": {"teacher": teacher, "alpha": 0.4, "begin": 2, "end": 9},
                "loss_scale": {"kind": "dynamic", "init_scale": 4096, "growth_interval": 3},
            }
        )
    )
    session.attach(model)
    if state is not None:
        session.load_state_dict(state)
    session.begin([optimizer], total_steps=STEPS)
    return session


def train(model, optimizer, session, batches, bad=(3, 7)):
    scaler = session.techniques["loss_scale"].scaler
    for index in batches:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, 5, generator=generator)
        y = torch.randint(3, (6,), generator=generator)
        optimizer.zero_grad()
        loss = session.loss(F.cross_entropy(model(x), y))
        scaler.scale(loss).backward()
        if index in bad:
            model[0].bias.grad[0] = float("inf")
        scaler.unscale_(optimizer)
        session.before_optimizer_step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scaler.was_skipped(optimizer):
            session.skipped_optimizer_step()
        else:
            session.after_optimizer_step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 4, 8, 11])
def test_stop_and_resume_equals_uninterrupted(tmp_path, fused, stop):
    teacher = net(16, 1)
    whole = net(8, 0)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01, fused=fused)
    session = start(whole, optimizer, teacher)
    train(whole, optimizer, session, range(STEPS))

    first = net(8, 0)
    first_optimizer = torch.optim.AdamW(first.parameters(), lr=0.01, fused=fused)
    part = start(first, first_optimizer, teacher)
    train(first, first_optimizer, part, range(stop))
    save_state(tmp_path, part.state_dict())

    resumed = net(8, 5)
    resumed.load_state_dict(first.state_dict())
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.01, fused=fused)
    optimizer.load_state_dict(copy.deepcopy(first_optimizer.state_dict()))
    rest = start(resumed, optimizer, teacher, load_state(tmp_path))
    train(resumed, optimizer, rest, range(stop, STEPS))

    assert session.step == rest.step == STEPS - 2
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert {k: t.report() for k, t in session.techniques.items()} == {k: t.report() for k, t in rest.techniques.items()}
    assert session.techniques["distill"].report()["batches"] == 9  # steps 2..8, two of them tried twice
    session.finish()
    assert not whole._forward_hooks
    assert list(whole.state_dict()) == list(net(8, 0).state_dict())
