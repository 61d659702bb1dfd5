"""Clipped GELU outputs under two processes that see different branches: both ranks clip the layers of both."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from two_ranks import leave, run_two_ranks

from shared_core.quantization import QatConfig, QuantizationAwareTraining
from shared_core.technique import Context


class Branches(nn.Module):
    """A layer for each rank: what a router may do."""

    def __init__(self):
        super().__init__()
        self.up, self.experts = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        nn.init.constant_(self.up.bias, 20.0)

    def forward(self, x, branch):
        return self.experts[branch](F.gelu(self.up(x)))


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Branches()
    technique = QuantizationAwareTraining(QatConfig(scheme="int8", clip_gelu=10))
    context = Context(model=model, total_steps=2)
    technique.attach(model, context)
    technique.begin(context)
    for _ in range(2):
        model(torch.randn(8, 4), rank).sum().backward()
        technique.before_optimizer_step(context)
        context.step += 1
        technique.after_optimizer_step(context)
    torch.save({"ranges": technique.ranges(), "gelu": technique.gelu_inputs.state_dict()}, f"{folder}/{rank}.pt")
    leave()


def test_two_processes_agree(tmp_path):
    run_two_ranks(__file__, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first == second
    assert first["gelu"] == {
        "judged": ["experts.0", "experts.1", "up"],
        "clipped": ["experts.0", "experts.1"],
    }
    assert [first["ranges"][f"experts.{rank}"]["max"] for rank in range(2)] == [10.0, 10.0]
    assert first["ranges"]["up"]["max"] < 10


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
