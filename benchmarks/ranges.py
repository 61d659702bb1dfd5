"""Compare the observed ranges of `qat` on three small nets and runs of two lengths: ``python benchmarks/ranges.py``.

Each net is trained from random weights on scikit-learn's digits, rounded from the first step. The table has the signal
to noise ratio of the outputs for unseen images: the final model with rounded inputs against the same weights with
inputs in float. So it shows how well the ranges fit the final model. The errors depend on the weights as well.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import typing

import torch
import torch.nn.functional as F
from measure import RESULTS, measured_on
from sklearn.datasets import load_digits
from torch import Tensor, nn

from efftrain import training
from shared_core.numerics.rounding import sqnr
from shared_core.quantization import QatConfig, apply_ranges

RANGES = tuple(
    one for one in typing.get_args(typing.get_type_hints(QatConfig)["range"]) if one[:3] not in ("lsq", "pac")
)
STEPS, BATCH, SEEDS, BITS = (50, 500), 64, 1, (8, 4)
WIDTH, PATCH = 64, 16


class Transformer(nn.Module):
    """Two layers of four heads on patches of four rows by four columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(PATCH, WIDTH), nn.Linear(WIDTH, 10)
        self.places = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(F.unfold(images, 4, stride=4).mT) + self.places
        for number in range(2):
            heads = self.qkv[number](self.norms[2 * number](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).flatten(2)
            x = x + self.projections[number](mixed)
            x = x + self.mlps[number](self.norms[2 * number + 1](x))
        return self.head(x.mean(1))


def mlp() -> nn.Module:
    """Return a net of three linear layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    """Return a net of three convolutions with batch norms."""
    sizes = ((1, 16, 1), (16, 32, 2), (32, 32, 2))
    layers = [nn.Sequential(nn.Conv2d(n, m, 3, s, 1, bias=False), nn.BatchNorm2d(m), nn.ReLU()) for n, m, s in sizes]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


NETS = {"MLP": mlp, "convolutions": convolutions, "transformer": Transformer}


def run(name: str, kind: str, steps: int, bits: int, seed: int) -> tuple[float, float]:
    """Return the signal to noise ratio of the outputs in dB, and the error in %, on unseen images."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], torch.tensor(data.target)[order]
    torch.manual_seed(seed)
    model = NETS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    draw = torch.Generator().manual_seed(seed)
    recipe = {"qat": {"scheme": "int8", "activation_bits": bits, "range": kind}}
    with training(recipe, model, optimizer, total_steps=steps) as loop:
        for _ in range(steps):
            some = torch.randint(1400, (BATCH,), generator=draw)
            with loop.forward():
                loss = F.cross_entropy(model(images[some]), labels[some])
            loop.backward(loss)
            loop.step()
            loop.zero_grad()
    model.eval()
    found = {key: layer.quantized_range for key, layer in model.named_modules() if hasattr(layer, "quantized_range")}
    rounded = apply_ranges(copy.deepcopy(model), found)
    with torch.no_grad():
        exact, outputs = model(images[1400:]), rounded(images[1400:])
    return sqnr(exact, outputs), 100 * (outputs.argmax(1) != labels[1400:]).double().mean().item()


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    asked = parser.parse_args()
    lines = [
        "# Observed ranges of `qat`",
        "",
        measured_on(),
        "",
        "Signal-to-noise ratio of the outputs in dB, and error in %, for unseen digits of scikit-learn. Rounded inputs",
        "are compared with float ones in the same final model, so the ratio shows how well the ranges fit it. Each net",
        f"trains from random weights. Seeds: {asked.seeds}. Written by `python benchmarks/ranges.py`.",
    ]
    for bits in BITS:
        lines += ["", f"Inputs of {bits} bits:", "", f"| net, steps | {' | '.join(f'`{kind}`' for kind in RANGES)} |"]
        lines.append("|---" * (1 + len(RANGES)) + "|")
        for name in NETS:
            for steps in asked.steps:
                cells = []
                for kind in RANGES:
                    found = [run(name, kind, steps, bits, seed) for seed in range(asked.seeds)]
                    decibels, errors = (statistics.fmean(column) for column in zip(*found, strict=True))
                    cells.append(f"{decibels:.1f} ({errors:.1f})")
                lines.append(f"| {name}, {steps:,} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    (RESULTS / "ranges.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
