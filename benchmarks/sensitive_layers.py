"""Measure what keeping sensitive layers in float brings: ``python benchmarks/sensitive_layers.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measure import device, today, versions
from one_shot import batches as texts
from one_shot import trained as trained_decoder
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shared_core.quantization import quantize_with_report
from shared_core.quantization.post_training.quality import quantized_bytes

SEEDS = (0, 1, 2)
SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8"},
    "int8, weights of 4 bits": {"scheme": "int8", "weight_bits": 4},
    "int4_weight": {"scheme": "int4_weight"},
}
Net = tuple[nn.Module, list[Any], Callable[[nn.Module], tuple[float, float]]]
"""A trained model, its calibration batches, and a function that returns its loss and accuracy (%) on unseen data."""


class Residual(nn.Module):
    """Add a branch to its input."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Attention(nn.Module):
    """Self-attention on separate projections."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """A vision transformer whose tokens are the rows of a digit."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, size), nn.Parameter(torch.randn(8, size) * 0.02)
        self.blocks = nn.Sequential(*(
            nn.Sequential(
                Residual(nn.Sequential(nn.LayerNorm(size), Attention(size, 4))),
                Residual(nn.Sequential(
                    nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size),
                )),
            )
            for _ in range(3)
        ))  # fmt: skip
        self.head = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x.squeeze(1)) + self.places).mean(1))


class Reader(nn.Module):
    """An LSTM that reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Linear(8, 64), nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.lstm(self.embed(x.squeeze(1)).relu())[0][:, -1]).relu())


def convolutional() -> nn.Module:
    sizes, layers = (16, 32, 64), []
    for before, after in zip((1, *sizes), sizes, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def depthwise() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    for before, after in ((32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(before, before, 3, padding=1, groups=before, bias=False), nn.BatchNorm2d(before)]
        layers += [nn.ReLU6(), nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def of_digits(make: Callable[[], nn.Module], seed: int) -> Net:
    """Train a net on one half of scikit-learn's digits, and measure it on the other."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 8 - 1
    y = torch.tensor(data.target)[order]
    half = len(x) // 2
    torch.manual_seed(seed)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(30):
        for part in torch.randperm(half).split(64):
            F.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def quality(model: nn.Module) -> tuple[float, float]:
        outputs, right = model(x[half:]), y[half:]
        return F.cross_entropy(outputs, right).item(), 100 * (outputs.argmax(1) == right).double().mean().item()

    return net.eval(), [*x[:320].split(64)], quality


def decoder(seed: int) -> Net:
    """Return the decoder of `one_shot.py`."""
    generator = torch.Generator().manual_seed(seed + 1)
    model, unseen = trained_decoder(texts(400, generator)), texts(20, generator)

    @torch.no_grad()
    def quality(model: nn.Module) -> tuple[float, float]:
        logits, following = model(input_ids=torch.cat(unseen)).logits[:, :-1].flatten(0, 1), torch.cat(unseen)[:, 1:]
        right = (logits.argmax(-1) == following.flatten()).double().mean()
        return F.cross_entropy(logits, following.flatten()).item(), 100 * right.item()

    return model, [{"input_ids": text} for text in texts(8, generator)], quality


NETS: dict[str, Callable[[int], Net]] = {
    "convolutions": lambda seed: of_digits(convolutional, seed),
    "depthwise convolutions": lambda seed: of_digits(depthwise, seed),
    "transformer": lambda seed: of_digits(Transformer, seed),
    "LSTM": lambda seed: of_digits(Reader, seed),
    "decoder": decoder,
}


def main() -> None:
    """Print a row for each net and scheme: changes of loss and accuracy, and bytes, with all layers and with fewer."""
    print(f"{device()}, {today()}, torch {versions()['torch']}; means of {len(SEEDS)} seeds")
    for name, make in NETS.items():
        nets = [make(seed) for seed in SEEDS]
        before = [quality(net) for net, _, quality in nets]
        size = sum(value.numel() * 4 for value in nets[0][0].parameters())
        loss, accuracy = (sum(values) / len(SEEDS) for values in zip(*before, strict=True))
        print(f"{name}: loss {loss:.4f}, accuracy {accuracy:.2f} %, {size:,} bytes", flush=True)
        for scheme, options in SCHEMES.items():
            for keeps in (False, True):
                made = [
                    quantize_with_report(net, options, data, keep_sensitive=keeps, allow_partial=True)
                    for net, data, _ in nets
                ]
                after = [quality(model) for (model, _), (_, _, quality) in zip(made, nets, strict=True)]
                losses, hits = (
                    [new[part] - old[part] for new, old in zip(after, before, strict=True)] for part in (0, 1)
                )
                print(
                    f"  {scheme}, {'kept' if keeps else 'all'}: {len(made[0][1].layers)} layers, "
                    f"loss {sum(losses) / len(losses):+.4f} ({min(losses):+.4f} to {max(losses):+.4f}), "
                    f"accuracy {sum(hits) / len(hits):+.2f}, {quantized_bytes(made[0][0]):,} bytes",
                    flush=True,
                )


if __name__ == "__main__":
    main()
