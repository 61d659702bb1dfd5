"""Trains a module that cuts its own layers, by each process: ``lightning_tensor_parallel.py FOLDER``.

Started as one process it trains the same uncut, for comparison. ``DATA`` says how many processes see other examples.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from lightning_fsdp2 import BATCH, STEPS, Steady, batches
from lightning_world import BOTH, QUIET, saver
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_eff import EffCallback
from shared_core.errors import CompatibilityError

PROCESSES, DATA = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("DATA", "1"))
GROWING = {"sparsity": 0.6, "begin": 0.2, "end": 0.8, "every": 2}
RECIPES = {
    "qat": {"qat": {"scheme": "int8", "begin": 1}},
    "prune average": {"prune": {"criterion": "taylor", **GROWING}, "average": {"kind": "ema", "decay": 0.5}},
}
REFUSED = {
    "fp8": {"fp8": {"recipe": "delayed"}},
    "lsq": {"qat": {"scheme": "int8", "range": "lsq"}},
    "units": {"prune": {"criterion": "wanda", **GROWING}},
}


class Cut(Steady):
    """Cuts its layers over the processes of a group, and shards what is left of them over others."""

    def configure_model(self):
        if PROCESSES == 1:
            return
        plan = {str(2 * layer): (ColwiseParallel, RowwiseParallel)[layer % 2]() for layer in range(4)}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if DATA > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def train(folder, recipe, ckpt_path=None):
    strategy = ModelParallelStrategy(DATA, PROCESSES // DATA, save_distributed_checkpoint=False)
    trainer = pl.Trainer(
        **QUIET, default_root_dir=folder, logger=False, max_epochs=1, devices=PROCESSES, use_distributed_sampler=False,
        strategy=strategy if PROCESSES > 1 else "auto",
        callbacks=[EffCallback(recipe), saver(BOTH[0], folder / "saved")], accumulate_grad_batches=2,
    )  # fmt: skip
    number = int(os.environ.get("RANK", "0")) // (PROCESSES // DATA)
    part = slice(number * BATCH // DATA, (number + 1) * BATCH // DATA)
    data = batches(same=True).dataset
    rows = [row for step in range(STEPS) for row in range(step * BATCH, (step + 1) * BATCH)[part]]
    loader = DataLoader(torch.utils.data.Subset(data, rows), batch_size=BATCH // DATA)
    module = Cut()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    assert all(type(layer) in (nn.Linear, nn.Tanh) or DATA > 1 for layer in module.net)
    trainer.save_checkpoint(folder / f"final{'' if ckpt_path is None else ' resumed'}.ckpt", weights_only=True)


def main(folder):
    torch.set_num_threads(1)
    for name, recipe in RECIPES.items():
        train(folder / name, recipe)
        train(folder / name, recipe, folder / name / "saved" / "2.ckpt")
    told = {}
    for name, recipe in REFUSED.items() if PROCESSES > 1 else ():
        try:
            train(folder / "refused", recipe)
        except CompatibilityError as error:
            told[name] = str(error)
    (folder / f"refused{os.environ.get('RANK', '')}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
