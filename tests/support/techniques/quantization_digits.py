"""Nets trained on the digits, once each, that the tests of quantization after training share."""

from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Attention(nn.Module):
    """Eight rows of an image as tokens: one block of a transformer, written with a keyword argument of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Linear(8, 32), nn.Embedding(8, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, images, scale=1.0):
        x = self.embed(images.flatten(1).view(-1, 8, 8) * scale) + self.places(torch.arange(8))
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 8, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x).mean(1))


def make(kind, seed):
    torch.manual_seed(seed)
    if kind == "mlp":
        layers = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 10))
    if kind == "cnn":
        convs = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU()
        return nn.Sequential(*convs, nn.Flatten(), nn.Linear(144, 10))
    return Attention()


@cache
def data(seed):
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return (images[order[:1000]], labels[order[:1000]]), (images[order[1000:]], labels[order[1000:]])


@cache
def trained(kind, seed=0):
    (images, labels), _ = data(seed)
    model, steps = make(kind, seed), 400 if kind == "attention" else 250
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(1000, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        schedule.step()
    model.zero_grad()
    return model.eval()


def batches(seed=0, count=8):
    return list(data(seed)[0][0].split(64))[:count]


def accuracy(model, seed=0):
    images, labels = data(seed)[1]
    with torch.no_grad():
        return 100 * (model(images).argmax(1) == labels).double().mean().item()
