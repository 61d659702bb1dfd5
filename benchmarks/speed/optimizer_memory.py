"""Bytes a parameter of weights, gradients and optimizer state: plain training, ours, torchao's and bitsandbytes'.

Counted at torch's allocator, internal buffers included, on a model whose activations do not count: an embedding that
holds a fifth of all weights, as a small language model's does, and equal linear layers.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from measure import Row, allocated, interleaved, main, ratio
from torch import Tensor, nn

from shared_core import Session
from shared_core.engine.recipe import Recipe

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
BF16 = torch.bfloat16
PLAIN = "plain bf16, AdamW fused"


def fused(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def of_bitsandbytes(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    library: Any = importlib.import_module("bitsandbytes.optim")
    optimizer: torch.optim.Optimizer = library.AdamW8bit(parameters, lr=1e-4)
    return optimizer


def of_torchao(name: str) -> Make:
    def make(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        import torchao.optim

        optimizer: torch.optim.Optimizer = getattr(torchao.optim, name)(parameters, lr=1e-4, bf16_stochastic_round=True)
        return optimizer

    return make


VARIANTS: dict[str, tuple[torch.dtype, Make, dict[str, str]]] = {
    "plain fp32, AdamW fused": (torch.float32, fused, {}),
    PLAIN: (BF16, fused, {}),
    "plain bf16, AdamW foreach": (BF16, lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True), {}),
    "fp32_copy": (BF16, fused, {"kind": "fp32_copy"}),
    "kahan": (BF16, fused, {"kind": "kahan"}),
    "stochastic_rounding": (BF16, fused, {"kind": "stochastic_rounding"}),
    "kahan, state_dtype bfloat16": (BF16, fused, {"kind": "kahan", "state_dtype": "bfloat16"}),
    "stochastic_rounding, state_dtype bfloat16": (
        BF16, fused, {"kind": "stochastic_rounding", "state_dtype": "bfloat16"},
    ),
    "stochastic_rounding, state_dtype bfloat16, bitsandbytes AdamW8bit": (
        BF16, of_bitsandbytes, {"kind": "stochastic_rounding", "state_dtype": "bfloat16"},
    ),
    "bitsandbytes AdamW8bit": (BF16, of_bitsandbytes, {}),
    "torchao _AdamW, bf16_stochastic_round": (BF16, of_torchao("_AdamW"), {}),
    "torchao AdamW8bit, bf16_stochastic_round": (BF16, of_torchao("AdamW8bit"), {}),
}  # fmt: skip


class Loop:
    """A training loop that has made two steps: state exists, what is compiled is compiled."""

    def __init__(self, width: int, dtype: torch.dtype, make: Make, options: dict[str, str]) -> None:
        layers = [nn.Linear(width, width, bias=False) for _ in range(16)]
        self.model = nn.Sequential(nn.Embedding(4 * width, width), *layers).to(dtype)
        self._tokens = torch.randint(4 * width, (4,))
        self._optimizer = make(self.model.parameters())
        self._session: Session | None = None
        if options:
            self._session = Session(Recipe.from_dict({"primary_weights": {**options, "telemetry_every": 0}}))
            self._session.attach(self.model)
            self._session.begin([self._optimizer], total_steps=None)
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.model(self._tokens).float().square().mean().backward()
        if self._session:
            self._session.before_step()
        self._optimizer.step()
        if self._session:
            self._session.after_step()
        self._optimizer.zero_grad()


def measure(quick: bool) -> list[Row]:
    width = 256 if quick else 1024
    loops: dict[str, Loop] = {}
    held, peak = {}, {}
    for name, variant in VARIANTS.items():
        made: list[Any] = []
        held[name], _ = allocated(lambda variant=variant, made=made: made.append(Loop(width, *variant)))
        loops[name] = made[0]
        _, above = allocated(loops[name].step)
        peak[name] = held[name] + above
        gc.collect()
    times = interleaved({name: loop.step for name, loop in loops.items()}, rounds=2 if quick else 3)
    count = sum(parameter.numel() for parameter in loops[PLAIN].model.parameters())
    return [
        Row(
            f"bytes a parameter: {name}",
            f"{held[name] / count:.2f} between steps, {peak[name] / count:.2f} at the peak of one",
            f"{PLAIN} {held[PLAIN] / count:.2f}, {peak[PLAIN] / count:.2f}",
            f"step {ratio(times, name, PLAIN).text()}, {1e3 * statistics.median(times[name]):.0f} ms",
            f"peak {peak[name] / peak[PLAIN]:.2f} of plain",
            *(
                ("peak of plain + 10 %", peak[name] <= 1.1 * peak[PLAIN])
                if name == "stochastic_rounding, state_dtype bfloat16"
                else ()
            ),
        )
        for name in VARIANTS
    ]


if __name__ == "__main__":
    main(measure)
