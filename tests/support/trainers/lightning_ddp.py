"""One of two processes that train together: ``lightning_ddp.py FOLDER``, with LOCAL_RANK and MASTER_PORT set."""

import os
import sys
from pathlib import Path

import torch
from lightning_world import BOTH, fit, make_module, make_trainer, saver

from lightning_eff import EffCallback

RECIPE = {
    "prune": {"sparsity": 0.5, "end": 0.5, "every": 2},
    "qat": {"scheme": "int8", "begin": 0.2},
    "soup": {"kind": "greedy", "metric": "val_loss"},
}


def train(folder: Path, seed: int = 0, ckpt_path: Path | None = None) -> tuple[EffCallback, dict[str, torch.Tensor]]:
    from pytorch_lightning.callbacks import ModelCheckpoint

    callback = EffCallback({**RECIPE, "distill": {"teacher": make_module(seed=3), "alpha": 0.7}})
    trainer = make_trainer(
        folder,
        callbacks=[callback, saver(BOTH[0], folder / f"rank-shared-{seed}"), ModelCheckpoint(folder / f"soup-{seed}")],
        strategy="ddp",
        devices=2,
        max_epochs=4,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
    )
    module = fit(trainer, make_module(seed=seed), seed=5 + seed, val=True, ckpt_path=ckpt_path)
    return callback, {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    callback, whole = train(folder)
    # 3 batches an epoch and process: batch 7 lies inside an epoch and inside an accumulation window.
    _, resumed = train(folder, seed=9, ckpt_path=folder / "rank-shared-0" / "6.ckpt")
    torch.save(
        {
            "whole": whole,
            "resumed": resumed,
            "masks": callback.session.techniques["prune"].state_dict()["masks"],
            "ranges": callback.session.techniques["qat"].state_dict()["ranges"],
        },
        folder / f"result-{os.environ['LOCAL_RANK']}.pt",
    )
