"""A recipe trained by a plain loop, in one process that holds all, or in several that hold parts of each weight."""

import copy
import functools
import itertools
import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader
from two_ranks import be_a_rank

from shared_core import Session
from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.distributed.collectives import world_size
from shared_core.distributed.sharded_tensors import fill_, fill_parameters_, reshard_, whole
from shared_core.engine.services import SavedCheckpoint, Services
from shared_core.errors import CompatibilityError
from shared_core.quantization import quantize_with_report

LAYOUTS = {"fsdp2": (2, 1), "tp": (1, 2), "fsdp2+tp": (2, 2)}
"""How many processes see other examples, and how many hold parts of the same layers."""
LAYOUT = os.environ.get("LAYOUT", "fsdp2")
STEPS, BATCH, SAVED = 6, 8, 3
GROWING = {"sparsity": 0.5, "begin": 1, "end": 5, "every": 2}
LORA = {"save": "merged", "rank": 3, "skip": ["middle"], "train": ["last"]}  # not what is sharded by itself
RECIPES = {
    "qat": {"qat": {"scheme": "int8", "begin": 2, "freeze_observers": 5}},
    "qat-kl": {"qat": {"scheme": "int8", "range": "kl", "begin": 2}},
    "qat-group": {
        "qat": {"scheme": "int8_dynamic_int4_weight", "group_size": 8, "rounding": "stochastic", "skip": ["first"]}
    },
    "qat-minmax": {"qat": {"scheme": "int8", "range": "minmax"}},
    "qat-dynamic": {"qat": {"scheme": "int8_dynamic"}},
    "qat-fp8": {"qat": {"scheme": "fp8"}},
    "qat-static": {"qat": {"scheme": "fp8_static"}},
    "qat-block": {"qat": {"scheme": "fp8_block"}},
    "qat-ternary": {"qat": {"scheme": "ternary"}},
    "qat-kept": {"qat": {"init": "../kept", "recompute_weights": True}},  # of `write_kept`
    "qat-lsq": {"qat": {"scheme": "int8", "range": "lsq_plus", "weight_bits": 4, "begin": 2}},
    "taylor": {"prune": {"criterion": "taylor", "cost": "flops", "regularizer": "l1", **GROWING}},
    "movement": {"prune": {"criterion": "movement", "regularizer": "weight_decay", **GROWING}},
    "recompute": {
        "prune": {"dynamic": "recompute", "regularizer": "group_lasso", "max_layer_sparsity": 0.55, **GROWING}
    },
    "rigl": {"prune": {"dynamic": "rigl", "criterion": "random", **GROWING, "schedule": "one_shot"}},
    "2:4": {"prune": {"granularity": "n_m", "sr_ste": 2e-4, **GROWING, "schedule": "one_shot", "every": 1}},
    "wanda": {"prune": {"criterion": "wanda", "skip": ["last"], **GROWING}},
    "filter": {"prune": {"granularity": "filter", "criterion": "geometric_median", "scope": "global", **GROWING}},
    "filter-taylor": {"prune": {"granularity": "filter", "criterion": "taylor", "cost": "flops", **GROWING}},
    "layer": {"prune": {"granularity": "layer", "criterion": "l2_norm", **GROWING}},
    "units": {"prune": {"granularity": "filter", "criterion": "neuron_taylor", **GROWING}},
    "cluster": {"cluster": {"bits": 3, "begin": 2, "min_size": 64}, "prune": {**GROWING, "end": 2}},
    "average": {"average": {"kind": "ema", "decay": 0.5}},
    "swa": {"average": {"kind": "swa", "begin": 2}, "prune": GROWING},
    "block": {"checkpointing": {"policy": "block", "include": ["hidden", "middle"]}},
    "selective": {"checkpointing": {"policy": "selective", "include": ["hidden", "middle"]}},
    "matmul": {"matmul": {"precision": "high"}},
    "logits": {"distill": {"teacher": "other"}},
    "self": {"distill": {"teacher": "self", "alpha": 0.5}},
    "ema": {"distill": {"teacher": "ema", "ema_decay": 0.5}},
    "hidden": {"distill": {"teacher": "other", "hidden": ["middle=middle"]}},
    "relations": {"distill": {"teacher": "other", "hidden": ["hidden=hidden"], "hidden_loss": "cka"}},
    "lora-qat": {"lora": LORA, "qat": {"scheme": "int8", "begin": 2}},
    "lora-lsq": {"lora": LORA, "qat": {"scheme": "int8", "range": "lsq", "weight_bits": 4, "begin": 2}},
    "lora-soup": {"lora": LORA, "soup": {"kind": "greedy", "metric": "loss", "order": "newest"}},
    "low_rank-prune": {"low_rank": {"rank": 6, "min_size": 0}, "prune": GROWING},
    "qat-prune": {"qat": {"scheme": "int8", "begin": 2}, "prune": GROWING},
    # weights that stayed small become zeros of the grid too
    "int4-taylor": {
        "qat": {"scheme": "int4_weight", "group_size": 8, "begin": 2},
        "prune": {"criterion": "taylor", **GROWING},
    },
    "lottery": {"lottery": {"out": "ticket", "rewind_to": 2, "rate": 0.4}},
    "lottery-qat": {
        "lottery": {"out": "ticket-qat", "rewind_to": 2, "rate": 0.4},
        "qat": {"scheme": "int4_weight", "group_size": 8, "begin": 2},
    },
    "ticket-second": {"lottery": {"out": "second", "ticket": "../two/ticket/ticket.safetensors", "rewind_to": 2}},
    "ticket-rate": {"lottery": {"out": "rate", "rewind": "learning_rate", "scope": "global"}},
    "ticket-redrawn": {
        "lottery": {"out": "redrawn", "ticket": "../two/ticket/ticket.safetensors", "control": "random_reinit"}
    },
    "fp32_copy": {"primary_weights": {"kind": "fp32_copy", "telemetry_every": 1}, "prune": GROWING},
    "stochastic": {"primary_weights": {"kind": "stochastic_rounding"}},
    "stochastic-state": {"primary_weights": {"kind": "stochastic_rounding", "state_dtype": "bfloat16"}},
    "kahan": {"primary_weights": {"kind": "kahan", "state_dtype": "bfloat16"}},
    "dp": {"dp": {"noise_multiplier": 0.5, "max_grad_norm": 0.6, "seed": 1, "delta": 1e-3}, "prune": GROWING},
    "dp-functorch": {"dp": {"noise_multiplier": 0.5, "seed": 1, "delta": 1e-3, "grad_sample_mode": "functorch"}},
    "soup": {"soup": {"kind": "greedy", "metric": "loss", "order": "newest"}},
    "soup-qat-prune": {
        "soup": {"kind": "uniform", "last": 3},
        "qat": {"scheme": "int8"},
        "prune": {**GROWING, "schedule": "one_shot"},
    },
}
REFUSED_BY_LAYERS = {
    "lora": {"lora": {"base": "none", "rank": 3}},
    "low_rank": {"low_rank": {"rank": 6, "min_size": 0}},
    "fp8": {"fp8": {"recipe": "delayed"}},
    "dp": {"dp": {"noise_multiplier": 0.5, "delta": 1e-3}},
    "cluster": {"cluster": {"bits": 3, "begin": 2, "min_size": 64}},
    "activations": {"activations": {"pack": "exact"}},
    "loss_scale": {"loss_scale": {"kind": "dynamic"}},
    "comm": {"comm": {"hook": "bf16"}},
    "copies": {"primary_weights": {"kind": "fp32_copy"}},
    "budget": {"checkpointing": {"policy": "budget:0.5"}},
    **{name: RECIPES[name] for name in ("qat-kl", "wanda", "units", "hidden", "kahan")},
    "qat-lsq": {"qat": {"scheme": "int8", "range": "lsq"}},
    "gelu": {"qat": {"scheme": "int8", "clip_gelu": 10.0}},
    "self": {"distill": {"teacher": "self"}},
    "ema": {"distill": {"teacher": "ema"}},
    "shapley": {"prune": {"sparsity": 0.5, "granularity": "filter", "criterion": "shapley"}},
}
"""Those that tensor parallelism rules out."""
SHARDED_LATER = (
    "qat-lsq", "int4-taylor", "self", "ema", "lora-qat", "lora-lsq", "lora-soup", "low_rank-prune", "dp-functorch"
)  # fmt: skip
"""Those that must see the model before it is sharded, as the Hugging Face Trainer lets them; others come after it."""


class Net(nn.Module):
    """Layers of which no process holds as much as the other."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 16)
        self.hidden = nn.Linear(16, 24)
        self.middle = nn.Linear(24, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        features = torch.tanh(self.hidden(self.embedding(x)))
        return self.head(torch.tanh(self.middle(features)))


def write_kept(folder):
    """Write what `eff quantize` writes of the net, whose scales a run keeps."""
    quantized, report = quantize_with_report(Net(), {"scheme": "W4A16", "group_size": 8}, allow_partial=True)
    folder.mkdir()
    save_file(quantized.state_dict(), folder / "model.safetensors")
    write_deployment(folder, {"qat": {"ranges": report.ranges}})


@functools.cache
def mesh():
    return init_device_mesh("cpu", LAYOUTS[LAYOUT], mesh_dim_names=("data", "layer"))


def place():
    """Return the number of this process among those that see other examples, and how many there are."""
    return (0, 1) if world_size() == 1 else (mesh().get_local_rank("data"), LAYOUTS[LAYOUT][0])


def shard(net):
    if world_size() == 1:
        return
    if "tp" in LAYOUT:
        # 7 vectors on two processes; the head is on both
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(net, mesh()["layer"], {**plan, "hidden": ColwiseParallel(), "middle": RowwiseParallel()})
    for module in (net.middle, net) if "fsdp2" in LAYOUT else ():
        fully_shard(module, mesh=mesh()["data"])


def environment():
    return {"fsdp2"} if "fsdp2" in LAYOUT else set()


def clip_(parameters, largest):
    """Clip gradients by their common norm, as torch does, which takes one mesh alone."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([whole(gradient).norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((largest / (norm + 1e-6)).clamp(max=1.0))


class Checkpoints(Services):
    """Every step's weights, in memory; those of step 4 have a NaN where the second process alone sees it."""

    saved: ClassVar[dict[str, dict[int, dict[str, torch.Tensor]]]] = {}

    def __init__(self, recipe, net):
        self.net, self.weights = net, self.saved.setdefault(str(recipe), {})

    def save(self, step):
        self.weights[step] = {name: whole(value).detach().clone() for name, value in self.net.state_dict().items()}
        if step == 4:
            self.weights[step]["hidden.weight"][-1, -1] = torch.nan

    def checkpoints(self):
        return [SavedCheckpoint(Path(f"step {step}"), step) for step in self.weights]

    def load_weights(self, path):
        return self.weights[int(path.name.split()[-1])]

    def evaluate(self):
        x, y = batch(STEPS)
        with torch.no_grad():
            return {"loss": float(F.cross_entropy(self.net(x).flatten(0, 1), y.flatten()))}

    def calibrate(self, num_batches):
        with torch.no_grad():
            self.net(batch(STEPS)[0])
        reshard_(self.net)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(7, (BATCH, 3), generator=generator), torch.randint(5, (BATCH, 3), generator=generator)


def micro_batches(drawn, step):
    """Return this process's part of a step, in as many micro-batches as it has; `drawn` has the rows, if any draws."""
    if drawn is None:
        x, y = batch(step)
        number, count = place()
        mine = slice(number * BATCH // count, (number + 1) * BATCH // count)
        return [(x[mine], y[mine])]
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(STEPS)), strict=True))
    return [(x[part], y[part]) for part in itertools.islice(drawn, 2)]


def train(recipe, *, later=False, resume=None):
    """Return what is left at the end, whole, and what was saved in the middle."""
    if recipe.get("distill", {}).get("teacher") == "other":
        recipe = {"distill": {**recipe["distill"], "teacher": Net(seed=7).double()}}
    # in double no rounding of a sum over ranks tips a code over
    net = Net().to(torch.bfloat16 if "primary_weights" in recipe else torch.double)
    services = Checkpoints(recipe, net)
    session = Session(recipe, seed=4, services=services)
    if later:
        session.attach(net, environment())
    shard(net)
    session.attach(net, environment())
    foreach = None if LAYOUT == "fsdp2" else False  # torch's takes one mesh alone
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01, foreach=foreach)
    if resume is not None:
        fill_parameters_(net, resume["weights"])
        for (name, parameter), _ in zip(net.named_parameters(), itertools.count(), strict=False):
            if name in resume["momentum"]:
                state = optimizer.state[parameter]  # in its format, as torch loads it
                state["momentum_buffer"] = torch.zeros_like(parameter)
                fill_(state["momentum_buffer"], resume["momentum"][name])
        session.prepare_optimizers([optimizer])
        session.load_state_dict(resume["session"])
    drawn = None
    if "dp" in session.techniques:
        stock = DataLoader(range(STEPS * BATCH), batch_size=BATCH // 2 // world_size())
        drawn = iter(session.techniques["dp"].loader(stock, 2))
    session.begin([optimizer], total_steps=STEPS)
    saved = {}
    for step in range(session.step, STEPS):
        parts = micro_batches(drawn, step)
        for x, y in parts:
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
            (session.loss(loss) / len(parts)).backward()
        session.before_step()
        clip_(net.parameters(), 0.5)
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()
        if "soup" in recipe:
            services.save(session.step)
        if session.step == SAVED:
            with session.swapped("checkpoint"):
                saved = found(net, optimizer)
                saved["session"] = copy.deepcopy(session.state_dict())
    with torch.no_grad():
        net(x)  # leaves the outermost module gathered
    session.finish()
    report = session.receipt()["techniques"]
    report.get("average", {}).pop("bytes", None)  # of this process's parts
    return {**found(net, optimizer), "session": session.state_dict(), "report": report}, saved


def found(net, optimizer):
    states = {name: optimizer.state[value] for name, value in net.named_parameters() if value in optimizer.state}
    momentum = {name: whole(state["momentum_buffer"]).clone() for name, state in states.items()}
    weights = {name: whole(value).detach().clone() for name, value in net.state_dict().items()}
    return {"weights": weights, "momentum": momentum}


def refused(later, recipe):
    with pytest.raises(CompatibilityError) as error:
        train(recipe, later=later)
    return str(error.value)


def main(rank, folder):
    os.makedirs(folder / "two", exist_ok=True)
    os.chdir(folder / "two")  # where tickets lie
    results = {}
    for name in os.environ.get("RECIPES", "").split() or RECIPES:
        recipe = RECIPES[name]
        later = name in SHARDED_LATER
        ended, saved = train(recipe, later=later)
        resumed, _ = train(recipe, later=later, resume=saved)
        results[name] = {"ended": ended, "saved": saved, "resumed": resumed}
    if LAYOUT != "fsdp2":
        return {**results, "refused": {name: refused(False, recipe) for name, recipe in REFUSED_BY_LAYERS.items()}}
    results["refused"] = [refused(later, {"lora": {"base": "none", "rank": 3}}) for later in (False, True)]
    results["refused"].append(refused(False, RECIPES["dp-functorch"]))
    return results


if __name__ == "__main__":
    be_a_rank(main)
