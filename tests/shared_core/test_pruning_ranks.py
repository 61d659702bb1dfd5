"""Two processes with different batches decide on the same masks, whatever the criterion gathers."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import leave, run_two_ranks

from shared_core.recipe import Recipe
from shared_core.session import Session

GROWING = {"sparsity": 0.5, "begin": 1, "end": 5, "every": 2}
RECIPES = {
    "taylor": {"criterion": "taylor", **GROWING},
    "fisher": {"criterion": "fisher", "cost": "flops", **GROWING},
    "wanda": {"criterion": "wanda", **GROWING},
    "random": {"criterion": "random", **GROWING},
    "rigl": {"dynamic": "rigl", "criterion": "random", **GROWING, "schedule": "one_shot"},
    "movement": {"criterion": "movement", **GROWING},
    "neuron": {"granularity": "neuron", "criterion": "neuron_taylor", **GROWING},
    "shapley": {"granularity": "neuron", "criterion": "shapley", "permutations": 2, **GROWING},
    "bn_scale": {"granularity": "channel", "criterion": "bn_scale", "regularizer": "bn_l1", **GROWING},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        return self.out(torch.relu(self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))))


def train(options, rank):
    torch.manual_seed(0)
    model = Net()
    session = Session(Recipe.from_dict({"prune": options}), seed=1)
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.begin([optimizer], total_steps=8)
    network = nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(8):
        x, y = torch.randn(4, 1, 6, 6, generator=generator), torch.randint(3, (4,), generator=generator)
        session.loss(nn.functional.cross_entropy(network(x), y)).backward()
        session.before_optimizer_step()
        optimizer.step()
        session.after_optimizer_step()
        optimizer.zero_grad()
    state = session.techniques["prune"].state_dict()
    return {"weights": dict(model.named_parameters()), "masks": state["masks"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(__file__, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("name", RECIPES)
def test_masks_and_weights_are_the_same_on_both(found, name):
    first, second = (ranks[name] for ranks in found)
    for kind in ("masks", "weights"):
        assert first[kind].keys() == second[kind].keys()
        assert all(torch.equal(value, second[kind][key]) for key, value in first[kind].items())
    assert any(not value.all() for value in first["weights"].values())


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save({name: train(options, rank) for name, options in RECIPES.items()}, folder / f"{rank}.pt")
    leave()
