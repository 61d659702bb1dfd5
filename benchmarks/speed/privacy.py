"""DP-SGD's step beside Opacus' ghost clipping: time and peak memory, on the same draws."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

import torch
from measure import Row, interleaved, main, milliseconds, peak_allocated, ratio
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shared_core import Session
from shared_core.engine.recipe import Recipe

TARGET, CLASSES = 1.2, 10


class Block(nn.Module):
    """Attention and a feed-forward network, of layers that both know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.read(self.norms[0](hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts)
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.write(found.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


class First(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


def text(width: int, depth: int) -> nn.Sequential:
    blocks = (Block(width) for _ in range(depth))
    return nn.Sequential(nn.Embedding(8000, width), *blocks, First(), nn.Linear(width, CLASSES))


def perceptron(width: int, depth: int) -> nn.Sequential:
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def convolutions(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for stage in range(4):
        wide = width << stage
        layers += [nn.Conv2d(channels, wide, 3, stride=2, padding=1), nn.GroupNorm(4, wide), nn.ReLU()]
        channels = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def steps(make: Callable[[], nn.Module], inputs: Tensor) -> dict[str, Callable[[], None]]:
    """Return a step of ours and of Opacus, in which every example is drawn, that both have as many."""
    labels, cross_entropy = torch.arange(len(inputs)) % CLASSES, nn.CrossEntropyLoss()
    torch.manual_seed(0)
    model = make()
    session = Session(Recipe.from_dict({"dp": {"noise_multiplier": 1.0, "seed": 0}}))
    session.attach(model)
    drawn = iter(session.techniques["dp"].loader(DataLoader(TensorDataset(inputs), batch_size=len(inputs))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        session.begin([optimizer], total_steps=1000)
    next(drawn)  # all examples

    def ours() -> None:
        session.loss(cross_entropy(model(inputs), labels)).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    wrapped = GradSampleModuleFastGradientClipping(make(), max_grad_norm=1.0)
    private = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=1e-3),
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(inputs),
    )  # fmt: skip
    criterion = DPLossFastGradientClipping(wrapped, private, nn.CrossEntropyLoss())

    def opacus() -> None:
        private.zero_grad()
        criterion(wrapped(inputs), labels).backward()
        private.step()

    return {"ours": ours, "opacus": opacus}


def cost(what: str, make: Callable[[], nn.Module], inputs: Tensor, rounds: int) -> Row:
    both = steps(make, inputs)
    times = interleaved(both, rounds=rounds, warmup=2)
    peaks = {name: peak_allocated(step) / 2**20 for name, step in both.items()}
    found, memory = ratio(times, "ours", "opacus"), peaks["ours"] / peaks["opacus"]
    return Row(
        f"dp, one step, {what}, batch {len(inputs)}",
        milliseconds(times, "ours"),
        f"Opacus ghost clipping {milliseconds(times, 'opacus')}",
        found.text(2),
        memory=f"{peaks['ours']:.0f} MiB, Opacus {peaks['opacus']:.0f} MiB: {memory:.2f}",
        target=f"<= {TARGET} of time and memory",
        met=max(found.median, memory) <= TARGET,
    )


def measure(quick: bool) -> list[Row]:
    warnings.filterwarnings("ignore")
    rounds, batch = (3, 8) if quick else (15, 32)
    words, pixels = torch.randint(8000, (batch, 64)), torch.randn(batch, 3, 32, 32)
    return [
        cost("embedding, 4 blocks of 256, 64 positions", lambda: text(256, 4), words, rounds),
        cost("linear, 4 layers of 1024", lambda: perceptron(1024, 4), torch.randn(batch, 1024), rounds),
        cost("linear, 4 layers of 1024", lambda: perceptron(1024, 4), torch.randn(8 * batch, 1024), rounds),
        cost("4 convolutions of 32 to 256 channels", lambda: convolutions(32), pixels, rounds),
    ]


if __name__ == "__main__":
    main(measure)
