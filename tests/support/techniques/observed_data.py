"""Activations of several shapes, and the kinds of observers that tests give them to."""

import torch

STREAMING = ("minmax", "percentile", "kl", "mse")
HISTOGRAMS = ("percentile", "kl", "mse")
DATA = {
    "normal": lambda g: torch.randn(3000, generator=g),
    "relu": lambda g: torch.randn(3000, generator=g).relu(),
    "negative": lambda g: -torch.rand(3000, generator=g) - 0.5,
    "heavy": lambda g: torch.randn(3000, generator=g) ** 5,
    "offset": lambda g: torch.randn(3000, generator=g) * 0.01 + 100,
}


def sample(name, seed=0):
    return DATA[name](torch.Generator().manual_seed(seed))
