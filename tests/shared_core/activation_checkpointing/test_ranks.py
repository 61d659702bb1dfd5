"""Two processes: under DDP and FSDP2 gradients are those without checkpointing, to the bit."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core.activation_checkpointing import apply_policy

POLICIES = ("sqrt", "selective")
WRAPPERS = ("ddp", "unused", "static", "fsdp2 bf16", "fsdp2 inside", "fsdp2 first")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.second(self.drop(torch.relu(self.first(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head, self.unused = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 2), nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped(net, wrapper):
    if not wrapper.startswith("fsdp2"):
        options = {"ddp": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
        if wrapper == "ddp":
            net.unused = None
        return DistributedDataParallel(net, **options[wrapper])
    policy = MixedPrecisionPolicy(torch.bfloat16) if wrapper.endswith("bf16") else MixedPrecisionPolicy()
    for layer in net.layers:
        for part in (layer.first, layer.second) if wrapper.endswith("inside") else ():
            fully_shard(part, mp_policy=policy)
        fully_shard(layer, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


def gradients(wrapper, policy, rank):
    torch.manual_seed(0)
    net, handle = Net(), None
    if policy and not wrapper.endswith("first"):
        handle = apply_policy(net, policy)
    model = wrapped(net, wrapper)
    if policy and handle is None:
        handle = apply_policy(net, policy)
    torch.manual_seed(rank)
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
    found = {n: getattr(p.grad, "_local_tensor", p.grad) for n, p in net.named_parameters() if p.grad is not None}
    return found, handle.tally.recomputations if handle else 0


def work(rank, folder):
    told = {}
    for wrapper in WRAPPERS:
        plain, _ = gradients(wrapper, None, rank)
        for policy in POLICIES:
            found, recomputations = gradients(wrapper, policy, rank)
            different = [n for n, value in plain.items() if n not in found or not torch.equal(value, found[n])]
            told[f"{wrapper} {policy}"] = len(plain), recomputations, different
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return saved_by_two_ranks(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_equal_to_the_bit(told, wrapper, policy):
    for rank in told:
        count, recomputations, different = rank[f"{wrapper} {policy}"]
        assert count >= 4 * 6 + 2
        assert recomputations == 3 * {"sqrt": 2, "selective": 4}[policy]
        assert not different


if __name__ == "__main__":
    be_a_rank(work)
