"""A small net and a training run that the tests of primary weights share."""

import torch
import torch.nn.functional as F
from torch import nn

from shared_core import Session

KINDS = ("fp32_copy", "stochastic_rounding", "kahan")
STEPS = 8


class Net(nn.Module):
    """A tied weight, one that is never used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embed(x) * self.frozen)))


def net(dtype, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randint(12, (8,), generator=generator), torch.randint(12, (8,), generator=generator)


def loss_of(model, index):
    x, y = batch(index)
    return F.cross_entropy(model(x).float(), y)


def begin(model, optimizer, options="fp32_copy", state=None, total_steps=STEPS, **more):
    """Begin with a kind or other options, behind the states of an optimizer and a session."""
    options = {"kind": options} if isinstance(options, str) else options
    session = Session({**({"primary_weights": options} if options else {}), **more})
    session.attach(model)
    if state is not None:
        session.prepare_optimizers([optimizer])
        optimizer.load_state_dict(state[0])
        session.load_state_dict(state[1])
    session.begin([optimizer], total_steps=total_steps)
    return session


def stepped(session, optimizer):
    session.before_step()
    optimizer.step()
    return session.after_step()


def copies_of(session):
    return session.state_dict()["techniques"]["primary_weights"]["copies"]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
}


def by_session(model, make, *, accumulate=1, clip=None, gamma=1.0, clip_groups=False, set_to_none=True):
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    session = begin(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for step in range(STEPS):
        for micro in range(accumulate):
            (loss_of(model, step * accumulate + micro) / accumulate).backward()
        session.before_step()
        if clip is not None:
            in_groups = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(in_groups if clip_groups else model.parameters(), clip)
        optimizer.step()
        session.after_step()
        scheduler.step()
        optimizer.zero_grad(set_to_none)
    return session, optimizer
