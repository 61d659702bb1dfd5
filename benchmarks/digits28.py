"""Data and model of the replicas on images: scikit-learn's digits at 28x28, augmented anew, and LeNet-300-100."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def _shuffled(seed: int) -> Batch:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images = F.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)[order]
    return images, torch.tensor(data.target)[order]


def digits(seed: int) -> tuple[Batch, Batch]:
    """Return scikit-learn's digits at 28x28, split by source image: 1197 to train, 400 to test."""
    images, labels = _shuffled(seed)
    return (images[:1197], labels[:1197]), (images[1397:], labels[1397:])


def validation_digits(seed: int) -> Batch:
    """Return the 200 images of the same split that are neither trained nor tested on."""
    images, labels = _shuffled(seed)
    return images[1197:1397], labels[1197:1397]


def augment(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Rotate by up to 15 degrees, scale by up to 15 %, shift by up to 18 %, or so many times that; add noise."""
    angle, size, right, down = 2 * torch.rand(4, len(images), generator=generator) - 1
    angle, size = angle * math.radians(15) * strength, 1 + 0.15 * strength * size
    cosine, sine = size * angle.cos(), size * angle.sin()
    shifts = 2 * 0.18 * strength * right, 2 * 0.18 * strength * down  # the grid is two wide
    rows = torch.stack((cosine, -sine, shifts[0], sine, cosine, shifts[1]), 1).view(-1, 2, 3)
    moved = F.grid_sample(images, F.affine_grid(rows, list(images.shape), align_corners=False), align_corners=False)
    return moved + 0.08 * torch.randn(moved.shape, generator=generator)


def lenet(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model


View = Callable[[Tensor, torch.Generator], Tensor]


def accuracy(model: nn.Module, test: Batch, generator: torch.Generator, view: View = augment) -> float:
    """Return the share of test images, newly augmented, that fp32 weights get right."""
    with torch.no_grad():
        return (model(view(test[0], generator)).argmax(1) == test[1]).float().mean().item()
