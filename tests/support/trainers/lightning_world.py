"""A small classifier on fixed random digits, and Trainers that are quiet: what the tests of this folder train."""

from __future__ import annotations

import importlib
import itertools
import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BOTH = ("pytorch_lightning", "lightning.pytorch")
BATCHES = 6
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 2,
}


def dataset(num_rows: int = 4 * BATCHES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def loader(**options: Any) -> DataLoader:
    return DataLoader(dataset(), batch_size=4, **{"shuffle": True, **options})


@cache
def module_class(namespace: str) -> Any:
    lightning = importlib.import_module(namespace)

    class Classifier(lightning.LightningModule):
        def __init__(self, width: int = 16, lr: float = 0.01, dropout: float = 0.3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(
                nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            self.log("val_loss", F.cross_entropy(logits, batch[1]))
            self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    Classifier.__qualname__ = "Classifier"
    return Classifier


def make_module(namespace: str = BOTH[0], seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return module_class(namespace)(**options)


def make_trainer(folder: Any, namespace: str = BOTH[0], **options: Any) -> Any:
    defaults = {
        **QUIET,
        "default_root_dir": str(folder),
        "logger": False,
        "enable_checkpointing": False,
        "max_epochs": 3,
    }
    return importlib.import_module(namespace).Trainer(**{**defaults, **options})


def fit(trainer: Any, module: Any, val: bool = False, seed: int = 5, ckpt_path: Any = None, train: Any = None) -> Any:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            module, loader() if train is None else train, loader(shuffle=False) if val else None, ckpt_path=ckpt_path
        )
    return module


def hook_callback(namespace: str, **hooks: Any) -> Any:
    """A callback of one namespace with these hooks, each a function of the trainer."""

    def method(function: Any) -> Any:
        return lambda self, trainer, *args: function(trainer)

    base = importlib.import_module(namespace).Callback
    return type("Hooks", (base,), {name: method(function) for name, function in hooks.items()})()


def saver(namespace: str, folder: Any, hook: str = "on_train_batch_end") -> Any:
    """A callback that saves ``0.ckpt``, ``1.ckpt``, ... whenever this hook is called."""
    paths = (f"{folder}/{number}.ckpt" for number in itertools.count())
    return hook_callback(namespace, **{hook: lambda trainer: trainer.save_checkpoint(next(paths))})


def everything(trainer: Any, module: Any) -> dict[str, Any]:
    """All that two equal runs must have in common, as tensors."""
    found = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for index, state in trainer.optimizers[0].state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    found["lr"] = torch.tensor(trainer.optimizers[0].param_groups[0]["lr"], dtype=torch.float64)
    found["rng"] = torch.get_rng_state()
    return found


def difference(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]
