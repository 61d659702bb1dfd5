"""Two processes with different batches: equal masks, and scores that are those of one process on the joined ones."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plain_loop import plain_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import leave, run_two_ranks

from shared_core import Session
from shared_core.pruning.scorers import SCORERS, make_scorer

GROWING = {"sparsity": 0.5, "begin": 1, "end": 5, "every": 2}
RECIPES = {
    "taylor": {"criterion": "taylor", **GROWING},
    "fisher": {"criterion": "fisher", "cost": "flops", **GROWING},
    "flops": {"cost": "flops", **GROWING},
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
    session = Session({"prune": options}, seed=1)
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.begin([optimizer], total_steps=8)
    network = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(8):
        x, y = torch.randn(4, 1, 6, 6 + 4 * rank, generator=generator), torch.randint(3, (4,), generator=generator)
        plain_step(session, optimizer, nn.functional.cross_entropy(network(x), y))
    state = session.techniques["prune"].state_dict()
    return {"weights": dict(model.named_parameters()), "masks": state["masks"]}


CRITERIA = sorted(SCORERS)
STEPS = 3


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def modules_of(model):
    return {"0.weight": model[0], "3.weight": model[3]}


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 2, 6, generator=generator) * (1 + step) for step in range(STEPS)]


def scorers_of(model, generator_seed=0):
    return {
        name: make_scorer(name, modules_of(model), generator=torch.Generator().manual_seed(generator_seed))
        for name in CRITERIA
    }


def observe(scorers, model, wrapped, data, after=lambda step: None, accumulate=2):
    module = wrapped(model)
    for scorer in scorers.values():
        scorer.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(data):
        for part in batch.chunk(accumulate):
            (module(part).logsumexp(1).mean() / accumulate).backward()
        weights = {name: m.weight for name, m in modules_of(model).items()}
        for scorer in scorers.values():
            scorer.observe_step(weights, {name: weight.grad for name, weight in weights.items()})
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    for scorer in scorers.values():
        scorer.reduce()
        scorer.detach()


def scores(scorers, model):
    return {
        f"{name}/{weight}": scorer.scores(weight, module.weight)
        for name, scorer in scorers.items()
        for weight, module in modules_of(model).items()
    }


def score(rank, folder):
    model, states = small(), {}
    scorers = scorers_of(model)
    shards = [batch.chunk(2)[rank] for batch in batches()]

    def save(step):
        if step == 1:  # in the middle, without a word between the ranks
            states.update({name: scorer.state_dict() for name, scorer in scorers.items()}, model=model.state_dict())
            torch.save(states, f"{folder}/state{rank}.pt")

    observe(scorers, model, DistributedDataParallel, shards, save)
    found = scores(scorers, model)

    dist.barrier()
    states = torch.load(f"{folder}/state0.pt", weights_only=True)  # the main process's, on both ranks
    model = small()
    model.load_state_dict(states["model"])
    scorers = scorers_of(model, generator_seed=9)
    for name, scorer in scorers.items():
        scorer.load_state_dict(states[name])
    observe(scorers, model, DistributedDataParallel, shards[2:])
    resumed = scores(scorers, model)

    # one rank has all of the data, the other none
    model = small()
    wanda = make_scorer("wanda", modules_of(model))
    with wanda.calibrating(), torch.no_grad():
        if rank == 1:
            model(batches()[0])
    assert not wanda.ready
    for _ in range(2):
        wanda.reduce()
    calibrated = {f"wanda/{name}": wanda.scores(name, module.weight) for name, module in modules_of(model).items()}

    # rank 1's own gradients never show infinity here: the complete ones do, on both ranks alike
    fisher = make_scorer("fisher", modules_of(model))
    fisher.attach()
    model(shards[0]).logsumexp(1).mean().backward()
    fisher.observe_step({}, {"0.weight": torch.full((1,), torch.inf)})
    assert (fisher.num_left_out, fisher.ready) == (1, False)

    return {"scores": found, "resumed": resumed, "calibrated": calibrated}


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


def test_two_processes_score_as_one(found):
    first, second = (ranks["scorers"] for ranks in found)
    model = small()
    scorers = scorers_of(model)
    observe(scorers, model, lambda module: module, batches(), accumulate=1)
    assert len(first["scores"]) == 2 * len(CRITERIA)
    for name, expected in scores(scorers, model).items():
        assert torch.equal(first["scores"][name], second["scores"][name]), name
        torch.testing.assert_close(first["scores"][name], expected, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(first["resumed"][name], first["scores"][name]), name
        assert torch.equal(second["resumed"][name], first["scores"][name]), name

    model = small()
    wanda = make_scorer("wanda", modules_of(model))
    with wanda.calibrating(), torch.no_grad():
        model(batches()[0])
    wanda.reduce()
    for name, module in modules_of(model).items():
        for rank in (first, second):
            assert torch.equal(rank["calibrated"][f"wanda/{name}"], wanda.scores(name, module.weight))


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    trained = {name: train(options, rank) for name, options in RECIPES.items()}
    torch.save({**trained, "scorers": score(rank, folder)}, folder / f"{rank}.pt")
    leave()
