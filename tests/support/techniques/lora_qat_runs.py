"""A training run of adapters over a base that qat quantizes, which the tests of both share."""

import torch
from lora_runs import X
from plain_loop import plain_step

from shared_core import Session


def session(lora=None, **qat):
    lora = {"rank": 2, "alpha": 6.0, "save": "merged", **(lora or {})}
    return Session({"qat": {"scheme": "int8", **qat}, "lora": lora}, seed=1)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(ours, model, optimizer, stop, x=X):
    model.train()
    for _ in range(ours.step, stop):
        plain_step(ours, optimizer, model(x.to(next(model.parameters()).dtype)).square().mean())


def run(model, steps=4, lora=None, **qat):
    ours = session(lora, **qat)
    ours.attach(model)
    optimizer = make_optimizer(model)
    ours.begin([optimizer], total_steps=steps)
    train(ours, model, optimizer, steps)
    return ours


def grid(weight, bits=8):
    """Symmetric codes of each row: s = max|w|/(2^(b-1) - 1), q = ne(w/s)."""
    scale = weight.double().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight.double() / scale).round() * scale
