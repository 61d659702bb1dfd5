"""Adapters on transformers' Conv1D, GPT-2's linear layer: as on the linear layer that it is."""

import copy

import pytest
import torch
from plain_loop import plain_step
from torch import nn
from transformers.pytorch_utils import Conv1D

from shared_core import Session
from shared_core.quantization import convert

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

STEPS = 4
RECIPES = {
    "none": {"lora": {"base": "none", "rank": 3}},
    "nf4": {"lora": {"base": "nf4", "rank": 3}},
    "int8": {"lora": {"base": "int8", "rank": 3}},
    "requantize": {"lora": {"base": "nf4", "rank": 3, "requantize": True}},
    "qat": {"lora": {"base": "none", "rank": 3}, "qat": {"scheme": "int8", "begin": 1}},
}


def twins():
    """Return the same net of Conv1D and of Linear layers."""
    torch.manual_seed(0)
    ours = nn.Sequential(Conv1D(128, 64), nn.GELU(), Conv1D(64, 128), nn.Linear(64, 4))
    stock = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 4))
    for one, other in zip(ours[::2], stock[::2], strict=True):
        other.load_state_dict({"weight": one.weight.detach().t(), "bias": one.bias.detach()})
    stock[3].load_state_dict(ours[3].state_dict())
    return ours, stock


def session_of(net, recipe):
    session = Session(copy.deepcopy(recipe))
    session.attach(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    return session, optimizer


def train(session, optimizer, net, steps=range(STEPS)):
    session.begin([optimizer], total_steps=STEPS)
    assert not [note for note in session.notes if "left as they are" in note]
    batches = torch.randn(STEPS, 6, 64, generator=torch.Generator().manual_seed(1))
    for step in steps:
        with session.forward():
            session.loss(net(batches[step]).square().mean()).backward()
        plain_step(session, optimizer)


@pytest.mark.parametrize("key", RECIPES)
def test_it_trains_merges_and_is_left_as_the_linear_layer_that_it_is(key):
    ends, told = [], []
    for net in twins():
        torch.manual_seed(2)
        session, optimizer = session_of(net, RECIPES[key])
        train(session, optimizer, net)
        session.finish()
        ends.append(net)
        told.append(session.receipt().values["techniques"]["lora"])
    ours, stock = ends
    assert type(ours[0]) is type(ours[2]) is Conv1D
    assert told[0]["layers"] == told[1]["layers"] == 2
    assert told[0]["adapter_parameters"] == told[1]["adapter_parameters"]
    before, _ = twins()
    for index in (0, 2):
        assert not torch.equal(ours[index].weight, before[index].weight)
        torch.testing.assert_close(ours[index].weight.t(), stock[index].weight, atol=1e-5, rtol=1e-4)
    if key == "qat":
        x = torch.randn(5, 64)
        torch.testing.assert_close(convert(ours)(x), convert(stock)(x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("key", ["none", "nf4", "int8"])
def test_state_dicts_are_plain_and_a_resumed_run_is_the_one_that_never_stopped(key):
    net, _ = twins()
    session, optimizer = session_of(net, RECIPES[key])
    train(session, optimizer, net, range(2))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), session.state_dict()))
    plain, _ = twins()
    plain.load_state_dict(session.bake(saved[0]))
    x = torch.randn(5, 64)
    torch.testing.assert_close(plain(x), net(x), atol=1e-2, rtol=1e-2)
    for step in range(2, STEPS):
        train_on = torch.randn(STEPS, 6, 64, generator=torch.Generator().manual_seed(1))[step]
        plain_step(session, optimizer, net(train_on).square().mean())
    session.finish()
    again, _ = twins()
    session, optimizer = session_of(again, RECIPES[key])
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    session.load_state_dict(saved[2])
    train(session, optimizer, again, range(2, STEPS))
    session.finish()
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), again.parameters(), strict=True))
