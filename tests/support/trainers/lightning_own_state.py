"""One of two processes that each come to hold what the other does not: ``lightning_own_state.py FOLDER``.

Batch norms of its own examples, buffers that training reads, and what techniques take from these.
"""

import os
import sys
from pathlib import Path

import torch
from lightning_world import BOTH, fit, make_trainer, module_class, saver
from pytorch_lightning.strategies import DDPStrategy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_eff import EffCallback
from lightning_eff.pytorch import EffFSDPStrategy

AVERAGE = {"average": {"kind": "ema"}}
TAUGHT_BY_ITSELF = {"distill": {"teacher": "ema", "student": "net", "ema_decay": 0.5}}
LEARNED = {"qat": {"scheme": "int8", "range": "lsq_plus", "begin": 2}}  # its first scale is of the folded weight


class Centered(module_class(BOTH[0])):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        self.center = self.center.lerp(batch[0].mean(0), 0.5)
        return F.cross_entropy(self(batch[0] - self.center), batch[1])


class Descending(Centered):
    """Without any state of its optimizer."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LateExpert(Centered):
    """With a part that has no gradient, and so no state, before step 4."""

    def __init__(self):
        super().__init__()
        self.expert = torch.nn.Linear(8, 4)

    def forward(self, x):
        return super().forward(x) + (self.expert(x) if self.trainer.global_step >= 4 else 0)


def ddp(**options):
    return lambda: DDPStrategy(**options)


def sharded(**options):
    return lambda: EffFSDPStrategy(**options)


FOLDER = {"save_distributed_checkpoint": True}
# strategy, module, recipe, batches to a step, batches after which is resumed (3 an epoch)
CASES = {
    "window": (ddp(), Centered, AVERAGE, 2, (4, 6)),
    "own buffers": (ddp(broadcast_buffers=False), Centered, AVERAGE, 2, (6, 7)),  # 7 ends a window
    "teacher": (ddp(), Centered, TAUGHT_BY_ITSELF, 1, (3,)),
    "learned": (ddp(), Centered, LEARNED, 1, (4,)),
    "file": (sharded(), LateExpert, AVERAGE, 1, (2, 4)),
    "folder": (sharded(**FOLDER), LateExpert, AVERAGE, 1, (2, 4)),
    "first window, file": (sharded(), Centered, AVERAGE, 2, (0,)),
    "first window, folder": (sharded(**FOLDER), Centered, AVERAGE, 2, (0,)),
    "stateless, file": (sharded(), Descending, AVERAGE, 1, (4,)),
    "stateless, folder": (sharded(**FOLDER), Descending, AVERAGE, 1, (4,)),
}


def train(folder, case, seed, ckpt_path=None):
    strategy, module, recipe, accumulate, _ = CASES[case]
    callback = EffCallback(recipe)
    torch.manual_seed(seed)
    trainer = make_trainer(
        folder,
        callbacks=[callback, saver(BOTH[0], folder / str(seed))],
        strategy=strategy(),
        devices=2,
        max_epochs=3,
        accumulate_grad_batches=accumulate,
    )
    module = fit(trainer, module(), seed=5 + seed, ckpt_path=ckpt_path)
    told = {f"state.{place}": value for place, value in _leaves(callback.session.state_dict()["techniques"])}
    moments = {
        f"optimizer.{number}.{name}": value
        for number, state in trainer.optimizers[0].state_dict()["state"].items()
        for name, value in state.items()
    }
    tensors = {**module.state_dict(), **moments}
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in tensors.items()} | told


def _leaves(state, place=""):
    if isinstance(state, torch.Tensor):
        yield place, state
    elif isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _leaves(value, f"{place}/{key}")


if __name__ == "__main__":
    found = {}
    for case, (*_, batches) in CASES.items():
        folder = Path(sys.argv[1]) / case
        whole = train(folder, case, seed=0)
        for batch in batches:
            resumed = train(folder, case, seed=9, ckpt_path=folder / "0" / f"{batch}.ckpt")
            found[f"{case}, {batch}"] = whole, resumed
    torch.save(found, Path(sys.argv[1]) / f"result-{os.environ['LOCAL_RANK']}.pt")
