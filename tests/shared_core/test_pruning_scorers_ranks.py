"""Scores under two processes: those of one process on the joined batches, the same on both ranks, and resumed."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import leave, run_two_ranks

from shared_core.pruning.scorers import SCORERS, make_scorer

CRITERIA = sorted(SCORERS)
STEPS = 3


def make():
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


def train(scorers, model, wrapped, data, after=lambda step: None, accumulate=2):
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


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, states = make(), {}
    scorers = scorers_of(model)
    shards = [batch.chunk(2)[rank] for batch in batches()]

    def save(step):
        if step == 1:  # in the middle, without a word between the ranks
            states.update({name: scorer.state_dict() for name, scorer in scorers.items()}, model=model.state_dict())
            torch.save(states, f"{folder}/state{rank}.pt")

    train(scorers, model, DistributedDataParallel, shards, save)
    found = scores(scorers, model)

    dist.barrier()
    states = torch.load(f"{folder}/state0.pt", weights_only=True)  # the main process's, on both ranks
    model = make()
    model.load_state_dict(states["model"])
    scorers = scorers_of(model, generator_seed=9)
    for name, scorer in scorers.items():
        scorer.load_state_dict(states[name])
    train(scorers, model, DistributedDataParallel, shards[2:])
    resumed = scores(scorers, model)

    # one rank has all of the data, the other none
    model = make()
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

    torch.save({"scores": found, "resumed": resumed, "calibrated": calibrated}, f"{folder}/{rank}.pt")
    leave()


def test_two_processes_score_as_one(tmp_path):
    run_two_ranks(__file__, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    model = make()
    scorers = scorers_of(model)
    train(scorers, model, lambda module: module, batches(), accumulate=1)
    assert len(first["scores"]) == 2 * len(CRITERIA)
    for name, expected in scores(scorers, model).items():
        assert torch.equal(first["scores"][name], second["scores"][name]), name
        torch.testing.assert_close(first["scores"][name], expected, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(first["resumed"][name], first["scores"][name]), name
        assert torch.equal(second["resumed"][name], first["scores"][name]), name

    model = make()
    wanda = make_scorer("wanda", modules_of(model))
    with wanda.calibrating(), torch.no_grad():
        model(batches()[0])
    wanda.reduce()
    for name, module in modules_of(model).items():
        for rank in (first, second):
            assert torch.equal(rank["calibrated"][f"wanda/{name}"], wanda.scores(name, module.weight))


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
