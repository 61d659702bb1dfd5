"""Loops of Fabric whose ``parallelize_fn`` shards the model, by each process: ``fabric_sharded.py FOLDER``.

`train` without a layout shards nothing, for comparison.
"""

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from two_ranks import leave

from lightning_eff import setup
from shared_core.distributed.collectives import rank, world_size
from shared_core.distributed.sharded_tensors import is_sharded, whole
from shared_core.errors import CompatibilityError

STEPS, BATCH = 6, 8
GROWING = {"sparsity": 0.5, "begin": 1, "end": 5, "every": 2}
RECIPES = {
    "prune average": {"prune": {"criterion": "taylor", **GROWING}, "average": {"kind": "ema", "decay": 0.5}},
    "qat": {"qat": {"scheme": "int8", "begin": 2}},
    "low_rank": {"low_rank": {"rank": 6, "min_size": 0}, "loss_scale": {"kind": "dynamic", "init_scale": 8.0}},
    "fp8": {"fp8": {"recipe": "rowwise", "skip": ["head"]}},
    "lora": {"lora": {"base": "none", "rank": 3, "skip": ["first"], "train": ["head"]}},
    "comm": {"comm": {"hook": "bf16"}},
}
SHARDED_ONLY = ("low_rank", "fp8", "lora", "comm")
LAYOUTS = {"fsdp2": (2, 1), "tp": (1, 2), "fsdp2+tp": (2, 2)}
"""How many processes see other examples, and how many hold parts of the same layers."""
REFUSED = {
    "low_rank": RECIPES["low_rank"],
    "fp8": {"fp8": {"recipe": "delayed"}},
    "wanda": {"prune": {"criterion": "wanda", **GROWING}},
}


class Net(nn.Module):
    """Layers of which no process holds as much as the other, the last in no plan."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def cut(net, mesh):
    return parallelize_module(net, mesh["tensor_parallel"], {"first": ColwiseParallel(), "second": RowwiseParallel()})


def sharding(layout, distributed=False):
    """Return the options of a Fabric."""

    def shard(net, mesh):
        if "tp" in layout:
            cut(net, mesh)
        for module in (net.first, net) if "fsdp2" in layout else ():
            fully_shard(module, mesh=mesh["data_parallel"])
        return net

    data, tensor = LAYOUTS[layout]
    strategy = ModelParallelStrategy(shard, data, tensor, save_distributed_checkpoint=distributed)
    return {"strategy": strategy, "devices": data * tensor}


def micro_batch(number, part):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(BATCH, 16, generator=generator).double(), torch.randint(5, (BATCH,), generator=generator)
    return x[part], y[part]


def begin(recipe, before_setup=lambda net: None, **options):
    """Return a Fabric, and the model and the optimizer that it has set up."""
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    net = Net().double()  # no rounding of a sum over processes tips a code over
    before_setup(net)
    before = weakref.ref(net.head.bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, foreach=False)
    data = [micro_batch(0, slice(None))]
    parts = setup(fabric, net, optimizer, recipe=recipe, total_steps=STEPS, accumulate=2, calibration=data)
    gc.collect()
    assert (before() is None) == is_sharded(net.head.bias)  # nobody keeps whole weights beside the parts
    return fabric, *parts


def train(folder, recipe, layout=None, *, saved_at=5, distributed=False, resume=False):
    """Return the weights that are left at the end, whole; a checkpoint is saved behind a number of micro-batches.

    Two of these make a step; at its end alone gradients are summed over processes if it is saved there.
    """
    data, tensor = LAYOUTS.get(layout, (1, 1))
    fabric, model, optimizer = begin(recipe, **(sharding(layout, distributed) if layout else {"devices": 1}))
    number = rank() // tensor if layout else 0
    part = slice(number * BATCH // data, (number + 1) * BATCH // data)
    state = {"model": model, "optimizer": optimizer, "seen": 0}
    if resume:
        fabric.load(folder / "middle.ckpt", state)
    model.train()
    for seen in range(state["seen"] + 1, 2 * STEPS + 1):
        x, y = micro_batch(seen, part)
        with fabric.no_backward_sync(model, enabled=bool(seen % 2) and not saved_at % 2):
            fabric.backward(F.cross_entropy(model(x), y) / 2)
        if seen % 2 == 0:
            if layout == "fsdp2":  # torch takes one mesh alone
                fabric.clip_gradients(model, optimizer, max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
        if seen == saved_at and not resume:
            fabric.save(folder / "middle.ckpt", state | {"seen": seen})
    fabric.save(folder / "end.ckpt", {"model": model})
    return {name: whole(value).detach().clone() for name, value in model.module.state_dict().items()}


def why_not(recipe, **options):
    try:
        begin(recipe, **options)
    except CompatibilityError as error:
        return str(error)


def main(folder):
    torch.set_num_threads(1)
    found = {}
    for layout in (name for name, sizes in LAYOUTS.items() if sizes[0] * sizes[1] == int(os.environ["WORLD_SIZE"])):
        for name, recipe in RECIPES.items():
            if name not in SHARDED_ONLY or layout == "fsdp2":
                where = folder / layout / name
                where.mkdir(parents=True, exist_ok=True)
                options = {"distributed": name == "prune average", "saved_at": 4 if name == "low_rank" else 5}
                found[f"{layout} {name}"] = train(where, recipe, layout, **options)
                found[f"{layout} {name} resumed"] = train(where, recipe, layout, **options, resume=True)
    told = {name: why_not(recipe, **sharding(layout)) for name, recipe in REFUSED.items()}  # in parts of layers
    mesh = init_device_mesh("cpu", (world_size(),), mesh_dim_names=("tensor_parallel",))
    more = {"before_setup": lambda net: cut(net, mesh), "devices": world_size(), "strategy": "ddp"}
    told["ddp"] = why_not(RECIPES["qat"], **more)
    told["meta"] = why_not(RECIPES["qat"], before_setup=lambda net: net.to("meta"), **sharding(layout))
    torch.save(found, folder / f"{rank()}.pt")
    (folder / f"{rank()}.json").write_text(json.dumps(told))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
