"""A small net and a training run that the tests of adapters share."""

import torch
from plain_loop import plain_step
from torch import nn

from shared_core import Session

BASES = ("nf4", "fp4", "int8", "none")
X = torch.randn(6, 40, generator=torch.Generator().manual_seed(5))


def net(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 18, bias=False), nn.Tanh(), nn.Linear(18, 3)
        return nn.Sequential(*layers).to(dtype)


def session(**options):
    return Session({"lora": {"rank": 2, "alpha": 6.0, "base": "nf4", "save": "merged", **options}}, seed=1)


def run(model, steps=3, state=None, optimizer_state=None, stop=None, **options):
    """A run, the states with which it could be resumed, and its optimizer."""
    ours = session(**options)
    ours.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if state is not None:
        ours.load_state_dict(state)
        optimizer.load_state_dict(optimizer_state)
    ours.begin([optimizer], total_steps=steps)
    for _ in range(ours.step, steps if stop is None else stop):
        plain_step(ours, optimizer, model(X.to(model[4].weight.dtype)).square().mean())
    return ours, optimizer
