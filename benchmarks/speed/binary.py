"""Measure converted layers of binary weights and inputs: bits and int8 codes, against the float layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from measure import Row, interleaved, main, milliseconds, ratio
from torch import nn

from shared_core.quantization import convert, quantize


def layer(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int) -> Row:
    model, x = nn.Sequential(make()).eval(), torch.randn(shape)
    binary = quantize(model, "xnor_net", [x])
    models: dict[str, nn.Module] = {
        "float": model, "bits": convert(copy.deepcopy(binary)), "int8": convert(binary, backend="auto")
    }  # fmt: skip
    calls: dict[str, Any] = {kind: lambda own=own: own(x) for kind, own in models.items()}
    with torch.no_grad():
        times = interleaved(calls, rounds=rounds, calls=3, warmup=3)
    sizes = {kind: sum(value.nbytes for value in own.state_dict().values()) for kind, own in models.items()}
    return Row(
        f"xnor_net {name}: convert(), and with backend='auto'",
        f"bits {milliseconds(times, 'bits')}; auto {milliseconds(times, 'int8')}",
        f"float {milliseconds(times, 'float')}",
        f"{ratio(times, 'bits', 'float').text()} of float; auto {ratio(times, 'int8', 'float').text()}",
        f"file {sizes['bits'] / 1e3:,.0f} of {sizes['float'] / 1e3:,.0f} kB",
    )


def measure(quick: bool) -> list[Row]:
    torch.manual_seed(0)
    wide, size, rounds = (16, 7, 2) if quick else (64, 28, 15)
    return [
        layer(f"Conv2d({wide}, {wide}, 3), batch {batch} of {size}x{size}",
              lambda: nn.Conv2d(wide, wide, 3, padding=1), (batch, wide, size, size), rounds)
        for batch in (1, 8)
    ] + [
        layer(f"Conv2d({4 * wide}, {4 * wide}, 3), batch 1 of {size // 2}x{size // 2}",
              lambda: nn.Conv2d(4 * wide, 4 * wide, 3, padding=1), (1, 4 * wide, size // 2, size // 2), rounds)
    ] + [
        layer(f"Linear({width}, {width}), {rows} row{'s' * (rows > 1)}",
              lambda width=width: nn.Linear(width, width), (rows, width), rounds)
        for width, rows in ((16 * wide, 256), (16 * wide, 1), (64 * wide, 1))
    ]  # fmt: skip


if __name__ == "__main__":
    main(measure)
