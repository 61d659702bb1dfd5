"""Optimizers with 8-bit state: pruned, clustered and quantised weights stay what they are, and runs are resumed."""

import copy

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from plain_loop import plain_step
from torch import nn

from shared_core.engine.session import Session

STEPS = 10
OPTIMIZERS = {
    "bitsandbytes": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-2, weight_decay=0.1, min_8bit_size=64),
}
RECIPES = {
    "prune": {"prune": {"sparsity": 0.75, "begin": 2, "end": 6, "every": 2}},
    "cluster": {"cluster": {"bits": 3, "begin": 2, "min_size": 1}},
    "qat": {"qat": {"scheme": "int4_weight", "group_size": 64, "begin": 2, "skip": ["0"]}},
}
IN_16_BIT = {"primary_weights": {"kind": "stochastic_rounding", "state_dtype": "bfloat16"}}


def net(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(dtype)


def steps(model, optimizer, session, indices):
    for index in indices:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, 16, generator=generator).to(model[0].weight.dtype)
        with session.forward():
            loss = F.cross_entropy(model(x).float(), torch.randint(8, (8,), generator=generator))
        plain_step(session, optimizer, loss)


def begin(model, make, recipe, state=None):
    session = Session(recipe)
    session.attach(model)
    optimizer = make(model.parameters())
    if state is not None:
        session.prepare_optimizers([optimizer])
        optimizer.load_state_dict(state[0])
        session.load_state_dict(state[1])
    session.begin([optimizer], total_steps=STEPS)
    return optimizer, session


def check(name, weight, session):
    if name == "prune":
        masks = session.techniques["prune"].report()["tensors"]
        assert sum(entry["pruned"] for entry in masks) >= 0.74 * sum(entry["numel"] for entry in masks)
        assert (weight == 0).float().mean() > 0.6
    elif name == "cluster":
        assert len(weight.unique()) <= 8
    else:
        assert max(len(row.unique()) for row in weight) <= 16  # of 64, on a grid of their own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("library", OPTIMIZERS)
def test_weights_stay_what_they_are_and_a_stopped_run_goes_on(library, name, dtype):
    recipe = {**RECIPES[name], **(IN_16_BIT if dtype == torch.bfloat16 else {})}
    model = net(dtype)
    optimizer, session = begin(model, OPTIMIZERS[library], recipe)
    steps(model, optimizer, session, range(5))
    state = copy.deepcopy((optimizer.state_dict(), session.state_dict()))
    again = net(dtype, seed=1)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    other, resumed = begin(again, OPTIMIZERS[library], recipe, state)
    for one in ((model, optimizer, session), (again, other, resumed)):
        steps(*one, range(5, STEPS))
        one[2].finish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    check(name, model[2].weight.detach(), session)
