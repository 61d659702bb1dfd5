"""One of two processes whose DDP compresses gradients: ``gradient_compression_runs.py RANK FOLDER``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from two_ranks import be_a_rank

from shared_core import Session
from shared_core.engine.recipe import Recipe
from shared_core.engine.services import Services
from shared_core.errors import CompatibilityError, TrainingError

STEPS, RATE = 6, 0.1


class LoopServices(Services):
    def __init__(self, wrapped):
        self._wrapped = wrapped

    def wrapped_model(self):
        return self._wrapped


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(128, 24), nn.Tanh(), nn.Linear(24, 20))


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 2, 6, 6, generator=generator)


def loss_of(net, step, rank):
    return net(batch(step, rank)).square().mean()


class Run:
    """A session on a DDP module of several buckets, whose SGD is plain."""

    def __init__(self, rank, recipe, *, ddp=None, state=None):
        self.rank = rank
        # DDP's buckets are others from the second step on: PowerSGD must not care
        self.ddp = ddp or DistributedDataParallel(make_net(), bucket_cap_mb=0.005)
        self.session = Session(recipe, services=LoopServices(self.ddp), seed=3)
        self.net = self.ddp.module
        self.session.attach(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)
        if state is not None:
            self.session.load_state_dict(state)
        self.session.begin([self.optimizer], total_steps=STEPS)
        self.technique = self.session.techniques["comm"]

    def step(self, number, factor=1.0):
        """Return this process's gradients and what DDP made of them."""
        local = torch.autograd.grad(loss_of(self.net, number, self.rank) * factor, list(self.net.parameters()))
        self.optimizer.zero_grad()
        (loss_of(self.ddp, number, self.rank) * factor).backward()
        reduced = [parameter.grad.clone() for parameter in self.net.parameters()]
        self.session.before_step()
        self.optimizer.step()
        self.session.after_step()
        return {"local": local, "reduced": reduced}


def steps(run, first=0, last=STEPS):
    return [run.step(number) for number in range(first, last)]


def every_hook(rank):
    found = {}
    for name, options in {
        "bf16": {"hook": "bf16"},
        "fp16": {"hook": "fp16"},
        "powersgd": {"hook": "powersgd", "rank": 2, "begin": 1},
    }.items():
        run = Run(rank, {"comm": options})
        found[name] = {"steps": steps(run), "report": run.technique.report()}
        if run.technique.power_sgd is not None:
            found[name] |= {
                "errors": dict(run.technique.power_sgd.errors),
                "compressed": sorted(run.technique.power_sgd.compressed),
                "names": [name for name, _ in run.net.named_parameters()],
            }
        run.session.finish()
        found[name]["after"] = Run.step(Bare(run), STEPS)
    return found


class Bare:
    """The same DDP module after the session has ended: its gradients are whole averages again."""

    def __init__(self, run):
        self.net, self.ddp, self.optimizer, self.rank = run.net, run.ddp, run.optimizer, run.rank
        self.session = Session(Recipe({}))
        self.session.attach(self.net)


def resumed(rank):
    recipe = {"comm": {"hook": "powersgd", "rank": 1, "begin": 1}}
    run = Run(rank, recipe)
    steps(run, 0, 4)
    with run.session.swapped("checkpoint"):
        weights, state = {k: v.clone() for k, v in run.net.state_dict().items()}, run.session.state_dict()
    states = [None, None]
    dist.all_gather_object(states, state)
    steps(run, 4)
    again = Run(rank, recipe, ddp=None, state=states[0])  # only the main process's state is ever saved
    again.net.load_state_dict(weights)
    steps(again, 4)
    equal = all(torch.equal(a, b) for a, b in zip(run.net.parameters(), again.net.parameters(), strict=True))
    return {"equal": equal, "report": again.technique.report() == run.technique.report()}


def overflowing(rank):
    fp16 = Run(rank, {"comm": {"hook": "fp16"}})
    before = [parameter.detach().clone() for parameter in fp16.net.parameters()]
    fp16.step(0, factor=1e8)
    kept = all(torch.equal(a, b) for a, b in zip(before, fp16.net.parameters(), strict=True))
    fp16.step(1)
    power = Run(rank, {"comm": {"hook": "powersgd", "begin": 0}})
    power.step(0)
    power.session.context.discard_step = True  # as another technique has it, for NaN
    power.step(1)
    forgotten = not power.technique.power_sgd.errors
    return {"kept": kept, "applied": fp16.session.step, "skipped": fp16.session.skipped, "forgotten": forgotten}


def refused(rank):
    lines = []
    for make in (
        lambda: Run(rank, {"comm": {"hook": "bf16"}}, ddp=with_foreign_hook()),
        lambda: Session({"comm": {"hook": "powersgd"}}).attach(nn.Linear(2, 2), ["fsdp2"]),
        lambda: without_sync(Run(rank, {"comm": {"hook": "bf16"}})),
        begin_without_ddp,
    ):
        try:
            make()
        except (CompatibilityError, TrainingError) as error:
            lines.append(str(error))
    return lines


def with_foreign_hook():
    ddp = DistributedDataParallel(make_net())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddp


def begin_without_ddp():
    session = Session({"comm": {"hook": "bf16"}})
    session.attach(make_net())
    session.begin([], total_steps=STEPS)


def without_sync(run):
    with run.ddp.no_sync():
        run.step(0)


def work(rank, folder):
    found = {"hooks": every_hook(rank), "resumed": resumed(rank), "overflow": overflowing(rank)}
    return found | {"refused": refused(rank)}


if __name__ == "__main__":
    be_a_rank(work)
