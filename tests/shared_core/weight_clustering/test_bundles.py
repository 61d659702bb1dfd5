"""Clusters of many weights in few operations: to the bit what they are weight by weight."""

import pytest
import torch
from plain_loop import plain_step
from torch import nn

import shared_core.weight_clustering.clustering as bundles
from shared_core import Session


class Net(nn.Module):
    """A convolution in channels_last, two alike layers, one of them used in every other step, and a 16-bit one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 10)
        self.last = nn.Linear(10, 3, dtype=torch.bfloat16)

    def forward(self, x, both):
        hidden = self.first(self.conv(x).amax((2, 3))).relu()
        return self.last((self.second(hidden) if both else hidden).bfloat16()).float()


def trained(average):
    model = Net()
    session = Session({"cluster": {"bits": 3, "begin": 2, "min_size": 1}} | average)
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.begin([optimizer], total_steps=12)
    for step in range(12):
        model(torch.randn(8, 4, 5, 5), both=step % 2 == 0).square().mean().backward()
        plain_step(session, optimizer)
    session.finish()
    return model.state_dict()


@pytest.mark.parametrize("average", [{}, {"average": {"kind": "ema", "decay": 0.5, "begin": 3}}])
def test_bundled_weights_are_those_that_are_shared_one_by_one(average, monkeypatch):
    together = trained(average)
    monkeypatch.setattr(bundles, "CACHED", 1)
    alone = trained(average)
    for name, weight in alone.items():
        assert torch.equal(weight, together[name]), name
    assert len(alone["conv.weight"].unique()) <= 8


def test_small_weights_are_bundled_by_dtype_up_to_a_size(monkeypatch):
    weights = {str(i): nn.Parameter(torch.zeros(4, dtype=torch.float64 if i == 2 else torch.float32)) for i in range(5)}
    one = torch.ones(4, dtype=torch.uint8), torch.tensor([0]), torch.tensor([0])
    monkeypatch.setattr(bundles, "CACHED", 12)
    made = bundles.Bundles([bundles.Bundle((name,), *one, 1) for name in weights], weights)
    found = list(made.of(weights))
    assert [bundle.names for bundle in found] == [("0", "1", "3"), ("4",), ("2",)]
    assert found[0].codes.tolist() == [1] * 4 + [2] * 4 + [3] * 4
    assert (found[0].first.tolist(), made.num_values) == ([0, 4, 8], 5)
    del weights["1"]
    assert [bundle.names for bundle in made.of(weights)] == [("0",), ("3",), ("4",), ("2",)]
