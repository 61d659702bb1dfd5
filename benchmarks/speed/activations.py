"""Packed activations: time of a forward and backward, and the memory they hold, beside plain torch and save_on_cpu."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import MIB, Row, interleaved, main, milliseconds, peak_allocated, ratio
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from shared_core import Session
from shared_core.engine.recipe import Recipe

PACKS = ("exact", "bf16", "int8")


def convolutional(width: int, size: int, batch: int) -> tuple[nn.Module, Tensor]:
    """Return a VGG-like net: convolution, batch norm, ReLU, max-pool, then dropout and linear layers."""
    layers: list[nn.Module] = []
    channels = 3
    for wide in (width, 2 * width, 4 * width):
        for _ in range(2):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.Flatten(),
        nn.Linear(channels * (size // 8) ** 2, 256),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(256, 10),
    ]
    return nn.Sequential(*layers), torch.randn(batch, 3, size, size)


def transformer(activation: str, width: int, size: int, batch: int) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.1, activation=activation, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(batch, size, width)


def rows(name: str, model: nn.Module, x: Tensor, rounds: int) -> list[Row]:
    def step(net: nn.Module, surround: Callable[[], Any]) -> None:
        with surround():
            loss = net(x).square().mean()
        torch.autograd.grad(loss, list(net.parameters()))

    variants, sessions = {"plain": partial(step, model, contextlib.nullcontext)}, {}
    for pack in PACKS:
        net = copy.deepcopy(model)  # a model has one session
        sessions[pack] = Session(Recipe.from_dict({"activations": {"pack": pack}}))
        sessions[pack].attach(net)
        sessions[pack].begin([torch.optim.SGD(net.parameters(), lr=0.1)], total_steps=None)
        variants[pack] = partial(step, net, sessions[pack].forward)
    variants["save_on_cpu"] = partial(step, model, save_on_cpu)
    times = interleaved(variants, rounds=rounds)
    peaks = {variant: peak_allocated(call) for variant, call in variants.items()}
    peer = f"save_on_cpu {ratio(times, 'save_on_cpu', 'plain').text()}, {peaks['save_on_cpu'] / MIB:.0f} MiB"
    return [
        Row(
            f"activations, {name}, {pack}: {session.figures()['activations/saved']:.0%} of their bytes saved",
            f"{milliseconds(times, pack)} (plain {milliseconds(times, 'plain')})",
            peer,
            ratio(times, pack, "plain").text(),
            f"peak {peaks[pack] / MIB:.0f} MiB (plain {peaks['plain'] / MIB:.0f} MiB)",
        )
        for pack, session in sessions.items()
    ]


def measure(quick: bool) -> list[Row]:
    torch.manual_seed(0)
    size, rounds = ({"width": 8, "size": 16, "batch": 8}, 3) if quick else ({"width": 64, "size": 32, "batch": 16}, 7)
    tokens = {"width": 32, "size": 16, "batch": 8} if quick else {"width": 256, "size": 256, "batch": 4}
    return [
        *rows("convolutional net", *convolutional(**size), rounds),
        *rows("transformer with ReLU", *transformer("relu", **tokens), rounds),
        *rows("transformer with GELU", *transformer("gelu", **tokens), rounds),
    ]


if __name__ == "__main__":
    main(measure)
