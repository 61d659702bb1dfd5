"""Factorised layers in a run: at two places of the model, and beneath other techniques where a run is resumed."""

import copy

import torch
from plain_loop import plain_step
from torch import nn

from shared_core.engine.session import Session


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.relu(self.again(torch.relu(self.first(x)))))


def started(recipe, state=None):
    torch.manual_seed(0)
    model = Twice()
    session = Session(recipe)
    session.attach(model, resumed=state["session"]["techniques"] if state else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if state:
        model.load_state_dict(state["model"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=4)
    return model, session, optimizer


def train(model, session, optimizer, to):
    while session.step < to:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(session.step))
        plain_step(session, optimizer, model(x).square().mean())


def test_a_module_at_two_places_is_baked_under_both_names():
    model, session, optimizer = started({"low_rank": {"rank": 2, "merge": True, "min_size": 0}})
    train(model, session, optimizer, 2)
    baked = session.bake(model.state_dict())
    session.finish()
    assert baked.keys() == Twice().state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, baked[name]) for name, value in model.state_dict().items())


def test_scales_are_learned_of_factors_that_a_resume_has_yet_to_load(monkeypatch):
    # NaN in what was never written: torch.empty alone gives whatever lay there
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        recipe = {"low_rank": {"rank": 2, "min_size": 0}, "qat": {"scheme": "int8", "range": "lsq"}}
        whole = started(recipe)
        train(*whole, 2)
        parts = {"model": whole[0], "session": whole[1]}
        again = started(recipe, copy.deepcopy({name: part.state_dict() for name, part in parts.items()}))
        for run in (whole, again):
            train(*run, 4)
            run[1].finish()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(value, again[0].state_dict()[name]) for name, value in whole[0].state_dict().items())
