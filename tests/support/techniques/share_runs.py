"""A small net whose weights a Session shares, for the tests of weight sharing."""

import torch
from torch import nn

from shared_core import Session

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def make_net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 20), nn.Tanh(),
                         nn.Linear(20, 4)).to(dtype)  # fmt: skip


def make_session(model, optimizer="adamw", total_steps=40, state=None, prune=None, clips=False, **options):
    recipe = {"cluster": {"bits": 3, "begin": 10, "min_size": 100, **options}}
    session = Session(recipe | ({"prune": prune} if prune else {}))
    session.attach(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=total_steps, clips_gradients=clips)
    return session, optimizer


def batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 12, generator=generator).to(dtype), torch.randn(16, 4, generator=generator).to(dtype)


def train(session, optimizer, model, steps, check=None, clip=None, parts=1):
    for step in steps:
        x, y = batch(step, next(model.parameters()).dtype)
        for inputs, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (session.loss((model(inputs) - labels).square().mean()) / parts).backward()
        session.before_step()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()
        if check is not None:
            check(step + 1)


def values_of(weight):
    weight = weight.detach()
    return weight[weight != 0].unique()
