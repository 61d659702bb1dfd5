"""A training script of either trainer, as a user has it: it knows nothing of tickets and resumes where it was.

Run as a program: ``lottery_script.py hf|lightning FOLDER``. Where ``<FOLDER's name>.die`` lies beside FOLDER, it is
killed once, after a checkpoint in the middle.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from promise_drivers import hf_trainer, run_lightning

DIES_AT = 5


def _die(folder: Path, step: int) -> None:
    order = folder.with_name(f"{folder.name}.die")
    if step == DIES_AT and order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def train_hf(folder: Path, recipe: Any = None) -> Any:
    from transformers import TrainerCallback

    from hf_eff import attach

    class Die(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _die(folder, state.global_step)

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_every": 2, "dropout": 0.3, "shuffle": True}
    trainer = hf_trainer({}, folder, plugin=False, callbacks=[Die()], **options)
    if recipe is not None:
        attach(trainer, recipe)
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    return trainer


def train_lightning(folder: Path, recipe: Any = None) -> Any:
    import pytorch_lightning as pl
    import torch

    from lightning_eff import EffCallback

    class Die(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            _die(folder, trainer.global_step)

    torch.manual_seed(3)
    callbacks = [Die(), *([EffCallback(recipe)] if recipe is not None else [])]
    checkpoints = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    options: dict[str, Any] = {"limit_val_batches": 5, "val_check_interval": 2, "save_every": 2}
    resume = checkpoints[-1] if checkpoints else None
    return run_lightning(
        {}, folder, plugin=False, callbacks=callbacks, resume=resume, dropout=0.3, shuffle=True, **options
    )


if __name__ == "__main__":
    {"hf": train_hf, "lightning": train_lightning}[sys.argv[1]](Path(sys.argv[2]))
