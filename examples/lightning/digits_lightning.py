"""Model and data of the Lightning examples: a small classifier of scikit-learn's 1,797 handwritten digits.

Every example also takes other pictures, from a folder or the Hub; they are made as small as the digits, and gray:
    python examples/lightning/pruning.py --dataset uoft-cs/cifar10 --image_column img
"""

import argparse
import functools
import logging
import tempfile
import warnings
from typing import Any

import numpy
import pytorch_lightning as pl
import torch
from datasets import load_dataset
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", module="pytorch_lightning")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
torch.set_num_threads(1)  # more only get into each other's way with a model so small

FOLDER = tempfile.TemporaryDirectory()  # removed when the example ends
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "default_root_dir": FOLDER.name,
}  # fmt: skip
"""What a Trainer is given so that it prints nothing and leaves nothing in the current folder."""


def pictures() -> tuple[Tensor, Tensor]:
    """Return pictures of 64 values in [0, 1], and their labels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", help="folder or Hub id of images; none: scikit-learn's digits")
    parser.add_argument("--image_column", default="image")
    parser.add_argument("--label_column", default="label")
    parser.add_argument("--examples", type=int, default=1797)
    return loaded(**vars(parser.parse_args()))


@functools.cache
def loaded(dataset: str | None, image_column: str, label_column: str, examples: int) -> tuple[Tensor, Tensor]:
    if not dataset:
        data = load_digits()
        return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    rows = load_dataset(dataset, split="train").shuffle(0)[:examples]
    small = [numpy.array(image.convert("L").resize((8, 8)), "float32") for image in rows[image_column]]
    return torch.tensor(numpy.stack(small)).flatten(1) / 255, torch.tensor(rows[label_column])


def classes() -> int:
    return 1 + int(pictures()[1].max())


def digits(num_train: int = 1200) -> tuple[DataLoader, DataLoader]:
    x, y = pictures()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y, num_train = x[order], y[order], min(num_train, 2 * len(y) // 3)
    train, test = TensorDataset(x[:num_train], y[:num_train]), TensorDataset(x[num_train:], y[num_train:])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=600)


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 128, lr: float = 2e-3, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    @torch.no_grad()
    def accuracy(self, loader: DataLoader) -> float:
        self.eval()
        hits = [(self(x).argmax(1) == y).float() for x, y in loader]
        return float(torch.cat(hits).mean())


def make_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**{**QUIET, "max_epochs": 10, **options})
