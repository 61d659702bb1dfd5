"""A LightningModule of repeated blocks that shards nothing itself, and its training by one or by two processes."""

import importlib
import os
import warnings
from functools import cache

import torch
from lightning_world import BOTH, QUIET, saver
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import EffCallback

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
STEPS, BATCH, WIDTH = 6, 8, 32
PRUNE = {"prune": {"sparsity": 0.6, "begin": 0.2, "end": 0.8, "every": 2}}
AVERAGE = {"average": {"kind": "ema", "decay": 0.7, "every": 2}}
LOW_RANK = {"low_rank": {"rank": 8, "min_size": 512, "decomposition": "scaled", "calibration_batches": 3}, **AVERAGE}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@cache
def module_class(namespace):
    class Blocks(importlib.import_module(namespace).LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Linear(16, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 4)
            self.sharded, self.validated = [], []

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

        def training_step(self, batch, index):
            self.sharded.append(isinstance(self.blocks[0].up.weight, DTensor))
            # before forward: the root's weights must be there in all of training_step
            weight = self.head.weight
            penalty = F.linear(torch.ones(1, WIDTH, dtype=weight.dtype), weight).square().sum()
            return F.cross_entropy(self(batch[0]), batch[1]) + 1e-3 * penalty

        def validation_step(self, batch, index):
            self.validated.append(float(F.cross_entropy(self(batch[0]), batch[1])))

        def predict_step(self, batch, index):
            return F.linear(torch.tanh(batch[0] @ self.embed.weight.T), self.head.weight)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Blocks


def batches():
    """Return a loader of this process's part of every batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, 16, generator=generator)
    y = (x[..., 0] > 0).long() + 2 * (x[..., 1] > 0).long()
    part = slice(RANK * BATCH // PROCESSES, (RANK + 1) * BATCH // PROCESSES)
    return DataLoader(TensorDataset(x[:, part].flatten(0, 1), y[:, part].flatten()), batch_size=BATCH // PROCESSES)


def train(folder, recipe, *, namespace=BOTH[0], module=None, ckpt_path=None, validate=False, save=True, **options):
    """Return trainer, callback and module after training; a checkpoint is saved after every batch."""
    callbacks = [EffCallback(recipe)] if recipe is not None else []
    module = module or module_class(namespace)()
    trainer = importlib.import_module(namespace).Trainer(
        **{
            **QUIET, "default_root_dir": str(folder), "logger": False, "enable_checkpointing": save, "max_epochs": 1,
            "devices": PROCESSES, "use_distributed_sampler": False,
            "callbacks": [*callbacks, *([saver(namespace, folder)] if save else [])], **options,
        }
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, batches(), batches() if validate else None, ckpt_path=ckpt_path)
    return trainer, (callbacks or [None])[0], module


def weights(module):
    """Return the state dict as whole tensors."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.state_dict().items()
    }
