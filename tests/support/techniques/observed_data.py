"""Activations of several shapes, the kinds of ranges that tests find of them, and these by their definitions."""

import torch

from shared_core.quantization import Histogram, kl_range, mse_range, percentile_range

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


def range_of(kind, steps, bits=8, percentile=99.99, bins=2048):
    """Return [min, max] of the values of all steps."""
    if kind in ("minmax", "ema"):
        ends = torch.stack([torch.stack([x.min(), x.max()]) for x in steps]).double()
        low, high = ends.unbind(1)
        found = ends[0] if kind == "ema" else torch.stack([low.min(), high.max()])
        for count, step in enumerate(ends[1:] if kind == "ema" else (), start=1):
            found = found + max(0.01, 9 / (count + 10)) * (step - found)
        return found.tolist()
    histogram = Histogram(bins=bins)
    for x in steps:
        histogram.update(x.reshape(1, -1))
    if kind == "percentile":
        return percentile_range(histogram, percentile, False)[0].tolist()
    search = kl_range if kind == "kl" else mse_range
    return search(histogram, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, False)[0].tolist()
