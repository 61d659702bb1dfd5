"""How much of the library one step of training runs through: what a reader must follow, and what each step costs."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import efftrain
from shared_core import Recipe, Session

ROOT = Path(efftrain.__file__).parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("efftrain", "hf_eff", "kernels", "lightning_eff", "shared_core"))
RECIPE = {
    "prune": {"sparsity": 0.5, "begin": 1, "end": 9, "every": 4},
    "distill": {"teacher": "ema"},
    "qat": {"scheme": "int8"},
}


def calls_of(function):
    """Return how often each file of the library was entered by a call."""
    files = Counter()

    def seen(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            files[frame.f_code.co_filename] += 1

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


def calls_of_step(recipe, step):
    """Return the calls of one step of a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    session = Session(Recipe.from_dict(recipe))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.begin([optimizer], total_steps=9)

    def train():
        with session.forward():
            loss = session.loss(F.cross_entropy(model(torch.randn(4, 8)), torch.arange(4)))
        loss.backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()

    for _ in range(step - 1):
        train()
    entered = calls_of(train)
    session.finish()
    return entered


@pytest.mark.parametrize(("step", "calls", "files"), [(3, 450, 40), (5, 700, 45)], ids=["masks_stay", "new_masks"])
def test_a_step_of_three_techniques_stays_short(step, calls, files):
    entered = calls_of_step(RECIPE, step)
    # other sessions of this process look at each optimizer's steps too
    without = calls_of_step({}, step)
    assert 0 < entered.total() - without.total() <= calls
    assert len(entered) <= files
