"""Buffers with `persistent=False`: a resumed run has those that training changed."""

import torch
from plain_loop import plain_step
from torch import nn

from shared_core import Session


class Centered(nn.Module):
    """Reads a running mean, and counts in a table that grows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)
        self.register_buffer("seen", None, persistent=False)

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        self.seen = torch.cat([x.new_zeros(0) if self.seen is None else self.seen, x[:1, 0]])
        return self.layer(x - self.mean) * self.frequencies.sum() + self.seen.sum()


def run(steps, state=None, weights=None):
    torch.manual_seed(0)
    model = Centered()
    if weights is not None:
        model.load_state_dict(weights)
    session = Session({"prune": {"sparsity": 0.5, "begin": 1, "end": 2}})
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if state is not None:
        session.load_state_dict(state)
    session.begin([optimizer], total_steps=9)
    for step in range(session.step, steps):
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        plain_step(session, optimizer)
    return model, session.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}


def test_a_run_that_is_stopped_twice_goes_on_with_them():
    whole, _, _ = run(9)
    _, state, weights = run(3)
    assert set(state["buffers"]) == {"mean", "seen"}
    again, untouched, _ = run(3, state, weights)
    assert set(untouched["buffers"]) == {"mean", "seen"}
    _, state, weights = run(6, untouched, again.state_dict())
    resumed, _, _ = run(9, state, weights)
    for name, value in dict(whole.named_buffers()).items():
        assert torch.equal(value, resumed.get_buffer(name)), name
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


def test_a_state_of_other_buffers_is_taken():
    _, state, weights = run(3)
    run(4, {**state, "buffers": {"gone": torch.zeros(1)}}, weights)
    del state["buffers"]  # saved before they were kept
    run(4, state, weights)
