"""One of two processes whose module reads, in training, what each process saw: ``lightning_ddp_buffers.py FOLDER``."""

import os
import sys
from pathlib import Path

import torch
from lightning_world import BOTH, fit, make_trainer, module_class, saver
from pytorch_lightning.strategies import DDPStrategy
from torch.nn import functional as F

from lightning_eff import EffCallback


class Centred(module_class(BOTH[0])):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        self.center = self.center.lerp(batch[0].mean(0), 0.5)
        return F.cross_entropy(self(batch[0] - self.center), batch[1])


def train(folder, broadcasts, seed, ckpt_path=None):
    torch.manual_seed(seed)
    trainer = make_trainer(
        folder,
        callbacks=[EffCallback({"average": {"kind": "ema"}}), saver(BOTH[0], folder / str(seed))],
        strategy=DDPStrategy(broadcast_buffers=broadcasts),
        devices=2,
        max_epochs=3,
        accumulate_grad_batches=2,
    )
    module = fit(trainer, Centred(), seed=5 + seed, ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in module.state_dict().items()}


if __name__ == "__main__":
    found = {}
    for broadcasts, batch in ((True, 4), (True, 6), (False, 6), (False, 7)):  # 7 ends a window of 3 batches an epoch
        folder = Path(sys.argv[1]) / f"{broadcasts}-{batch}"
        whole = train(folder, broadcasts, seed=0)
        resumed = train(folder, broadcasts, seed=9, ckpt_path=folder / "0" / f"{batch}.ckpt")
        found[f"{broadcasts}, {batch}"] = whole, resumed
    torch.save(found, Path(sys.argv[1]) / f"result-{os.environ['LOCAL_RANK']}.pt")
