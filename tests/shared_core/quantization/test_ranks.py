"""Two processes: ranges are those of one on the joined batch, and layers of branches that one alone sees clipped."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from two_ranks import leave, saved_by_two_ranks

from shared_core.engine.technique import Context
from shared_core.quantization import QatConfig, QuantizationAwareTraining


def run(model, wrapped, batches):
    technique = QuantizationAwareTraining(QatConfig(scheme="int8"))
    context = Context(model=model, total_steps=len(batches))
    technique.attach(context)
    technique.begin(context, None)
    module = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        technique.before_step(context)
        optimizer.step()
        context.step += 1
        technique.after_step(context, True)
    counts = [(entry["clipped"], entry["values"]) for entry in technique.report()["per_layer"]]
    return technique.ranges(), counts, [parameter.detach().clone() for parameter in model.parameters()]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) * (1 + step) for step in range(4)]


class Branches(nn.Module):
    """A layer for each rank: what a router may do."""

    def __init__(self):
        super().__init__()
        self.up, self.experts = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        nn.init.constant_(self.up.bias, 20.0)

    def forward(self, x, branch):
        return self.experts[branch](F.gelu(self.up(x)))


def clipped_branches(rank):
    torch.manual_seed(0)
    model = Branches()
    technique = QuantizationAwareTraining(QatConfig(scheme="int8", clip_gelu=10))
    context = Context(model=model, total_steps=2)
    technique.attach(context)
    technique.begin(context, None)
    for _ in range(2):
        model(torch.randn(8, 4), rank).sum().backward()
        technique.before_step(context)
        context.step += 1
        technique.after_step(context, True)
    return {"ranges": technique.ranges(), "gelu": technique.policy.gelu_inputs.state_dict()}


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    shards = [batch.chunk(2)[rank] for batch in data()]
    ranges, counts, parameters = run(make(), DistributedDataParallel, shards)
    branches = clipped_branches(rank)
    found = {"ranges": ranges, "counts": counts, "parameters": parameters, "branches": branches}
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return saved_by_two_ranks(__file__, folder)


def test_two_processes_have_the_ranges_of_one(ranks):
    first, second = ranks
    ranges, counts, parameters = run(make(), lambda model: model, data())
    assert first["ranges"] == second["ranges"]
    assert first["ranges"]["0"] == ranges["0"]
    assert first["counts"][0] == second["counts"][0] == counts[0]
    assert counts[0][0] > 0
    assert abs(first["ranges"]["2"]["max"] - ranges["2"]["max"]) < 1e-5
    for a, b, c in zip(first["parameters"], second["parameters"], parameters, strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c, atol=1e-3)


def test_both_clip_the_layers_of_both(ranks):
    first, second = (rank["branches"] for rank in ranks)
    assert first == second
    assert first["gelu"] == {
        "judged": ["experts.0", "experts.1", "up"],
        "clipped": ["experts.0", "experts.1"],
    }
    assert [first["ranges"][f"experts.{rank}"]["max"] for rank in range(2)] == [10.0, 10.0]
    assert first["ranges"]["up"]["max"] < 10


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
