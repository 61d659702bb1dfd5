"""Ranges under two processes: those of one process on the joined batch, on both ranks."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import leave, run_two_ranks

from shared_core.quantization import QatConfig, QuantizationAwareTraining
from shared_core.technique import Context


def run(model, wrapped, batches):
    technique = QuantizationAwareTraining(QatConfig(scheme="int8"))
    context = Context(model=model, total_steps=len(batches))
    technique.attach(model, context)
    technique.begin(context)
    module = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        technique.before_optimizer_step(context)
        optimizer.step()
        context.step += 1
        technique.after_optimizer_step(context)
    return technique.ranges(), [parameter.detach().clone() for parameter in model.parameters()]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) * (1 + step) for step in range(4)]


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    shards = [batch.chunk(2)[rank] for batch in data()]
    ranges, parameters = run(make(), DistributedDataParallel, shards)
    torch.save({"ranges": ranges, "parameters": parameters}, f"{folder}/{rank}.pt")
    leave()


def test_two_processes_have_the_ranges_of_one(tmp_path):
    run_two_ranks(__file__, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    ranges, parameters = run(make(), lambda model: model, data())
    assert first["ranges"] == second["ranges"]
    assert first["ranges"]["0"] == ranges["0"]
    assert abs(first["ranges"]["2"]["max"] - ranges["2"]["max"]) < 1e-5
    for a, b, c in zip(first["parameters"], second["parameters"], parameters, strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c, atol=1e-3)


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
