"""Two processes whose batches take other paths: each reaches another expert, with sequences of another length."""

import pytest
import torch
from plain_loop import plain_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core import Session
from shared_core.errors import CompatibilityError

GROWING = {"sparsity": 0.5, "begin": 1, "end": 5, "every": 1}
RECIPES = {
    "costs": {"prune": {**GROWING, "cost": "energy"}},
    "costs of gradients": {"prune": {**GROWING, "criterion": "taylor", "cost": "flops"}},
    "peers": {"distill": {"teacher": "mutual", "peers": 2}},
}
NEURONS = {"prune": {**GROWING, "granularity": "neuron", "criterion": "l2_norm"}}


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.last = nn.Linear(16, 4)

    def forward(self, x, expert):
        x = torch.relu(self.first(x))
        logits = self.last((x + self.experts[expert](x)).mean(1))
        return {"logits": logits, "loss": logits.square().mean()}


def train(recipe, rank):
    torch.manual_seed(0)
    model = Mixture()
    session = Session(recipe, seed=1)
    session.attach(model)
    network = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.begin([optimizer], total_steps=6)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        x = torch.randn(4, 3 + 9 * rank, 8, generator=generator)
        plain_step(session, optimizer, network(x, rank)["loss"])
    peers = session.state_dict()["techniques"].get("distill", {}).get("teachers", {}).get("peers", [])
    return {"weights": dict(model.state_dict()), "peers": peers}


def refused(rank):
    try:
        train(NEURONS, rank)
    except CompatibilityError as error:
        return str(error)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return saved_by_two_ranks(__file__, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_the_same_on_both(found, name):
    first, second = (rank[name] for rank in found)
    for key, value in first["weights"].items():
        assert torch.equal(value, second["weights"][key]), key
    assert bool(first["peers"]) == (name == "peers")
    for one, other in zip(first["peers"], second["peers"], strict=True):
        for key, value in one["weights"].items():
            assert torch.equal(value, other["weights"][key]), key


def test_units_that_processes_trace_otherwise_are_refused_on_both(found):
    for rank in found:
        assert "every process must find the same neurons" in rank["refused"]


def work(rank, folder):
    trained = {name: train(recipe, rank) for name, recipe in RECIPES.items()}
    return {**trained, "refused": refused(rank)}


if __name__ == "__main__":
    be_a_rank(work)
