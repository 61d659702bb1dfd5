"""Structured pruning of five small nets: every layer alike, or all under one threshold, and what Torch-Pruning does.

Each net learns scikit-learn's digits (8x8, 1197 images), loses 30 or 50 % of its channels or hidden neurons by the
magnitude of their weights, is shrunk and fine-tuned for a quarter of its training. What is told is the accuracy on the
600 images left, after fine-tuning and right after pruning, the share of the parameters left, and the share of its units
that the layer keeps that lost most. Torch-Pruning, where it is installed, prunes the same layers with
``GroupMagnitudeImportance`` and ``global_pruning=True``.

    python benchmarks/structured_scope.py [--quick] [--seeds 3]
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shared_core.channel_graph import find_groups
from shared_core.pruning import prune
from shared_core.tools.shrink import shrink

EPOCHS, TUNING, BATCH, RATE = 16, 4, 128, 3e-3
SPARSITIES = (0.3, 0.5)
VARIANTS = ("local", "global", "global, scores not divided", "Torch-Pruning, global")


def _unit(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def _classifier(features: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def plain() -> nn.Module:
    """Return four convolutions."""
    return _classifier(nn.Sequential(_unit(1, 12), _unit(12, 24, stride=2), _unit(24, 48, stride=2), _unit(48, 48)), 48)


class Block(nn.Module):
    """Two convolutions, and a residual connection around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_unit(inputs, outputs, stride=stride), _unit(outputs, outputs)[:2])
        self.skip = nn.Identity() if inputs == outputs else _unit(inputs, outputs, 1, stride)[:2]

    def forward(self, x: Tensor) -> Tensor:
        """Add what the body makes to what comes in."""
        return torch.relu(self.body(x) + self.skip(x))


def resnet() -> nn.Module:
    """Return three stages of two residual blocks."""
    shapes = ((12, 12, 1), (12, 12, 1), (12, 24, 2), (24, 24, 1), (24, 48, 2), (48, 48, 1))
    blocks = [Block(*shape) for shape in shapes]
    return _classifier(nn.Sequential(_unit(1, 12), *blocks), 48)


def mobile() -> nn.Module:
    """Return depthwise separable convolutions."""
    parts = [_unit(1, 16)]
    for inputs, outputs, stride in ((16, 24, 1), (24, 32, 2), (32, 48, 1), (48, 64, 2)):
        parts += [_unit(inputs, inputs, stride=stride, groups=inputs), _unit(inputs, outputs, 1)]
    return _classifier(nn.Sequential(*parts), 64)


class Encoder(nn.Module):
    """A transformer encoder that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Linear(8, 32), nn.Parameter(0.1 * torch.randn(8, 32))
        self.attention = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the digits."""
        x = self.embedding(x.squeeze(1)) + self.positions
        for i, (attention, up, down) in enumerate(zip(self.attention, self.up, self.down, strict=True)):
            x = self.norms[2 * i](x + attention(x, x, x, need_weights=False)[0])
            x = self.norms[2 * i + 1](x + down(F.gelu(up(x))))
        return self.head(x.mean(1))


def mlp() -> nn.Module:
    """Return three hidden layers."""
    widths = (64, 96, 48, 24)
    hidden = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(24, 10))


NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain CNN": (plain, "channel"), "ResNet": (resnet, "channel"), "depthwise separable": (mobile, "channel"),
    "encoder": (Encoder, "neuron"), "MLP": (mlp, "neuron"),
}  # fmt: skip


class Task:
    """The digits of one seed's split."""

    def __init__(self, seed: int) -> None:
        data = load_digits()
        order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(seed))
        images, labels = (
            torch.tensor(data.images, dtype=torch.float32)[order, None] / 16,
            torch.tensor(data.target)[order],
        )
        self.train, self.test, self.seed = (images[:1197], labels[:1197]), (images[1197:], labels[1197:]), seed

    def fit(self, model: nn.Module, epochs: int, rate: float) -> None:
        """Train with AdamW and a rate that falls to 0."""
        generator = torch.Generator().manual_seed(self.seed)
        images, labels = self.train
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * -(-len(images) // BATCH))
        model.train()
        for _ in range(epochs):
            for index in torch.randperm(len(images), generator=generator).split(BATCH):
                F.cross_entropy(model(images[index]), labels[index]).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the share of the test images that are told right, in percent."""
        images, labels = self.test
        return 100 * float((model.eval()(images).argmax(1) == labels).float().mean())


def _by_us(
    model: nn.Module, example: Tensor, granularity: str, sparsity: float, variant: str
) -> tuple[nn.Module, float]:
    options: dict[str, Any] = {"sparsity": sparsity, "granularity": granularity, "scope": variant.split(",")[0]}
    undivided = variant.endswith("not divided")
    if undivided:
        options["max_layer_sparsity"] = 1.0
    path = "shared_core.pruning.structured.relative_scores"
    with mock.patch(path, lambda scores, live: scores) if undivided else mock.patch.dict({}):
        report = prune(model, options, [example])
    least = min(1 - unit["pruned"] / unit["units"] for unit in report.units)
    return shrink(model, example, latency_repeats=0).model, least


def _by_torch_pruning(model: nn.Module, example: Tensor, granularity: str, sparsity: float) -> tuple[nn.Module, float]:
    import torch_pruning

    groups = [group for group in find_groups(model, example) if group.kind == granularity and not group.reason_kept]
    reach = {part.tensor.removesuffix(".weight") for group in groups for part in group.slices if part.role == "out"}
    before = {name: module.weight.shape[0] for name, module in model.named_modules() if name in reach}
    layers = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
    kept = [module for name, module in model.named_modules() if isinstance(module, layers) and name not in reach]
    torch_pruning.MetaPruner(
        model, example, torch_pruning.importance.GroupMagnitudeImportance(p=2), global_pruning=True,
        pruning_ratio=sparsity, ignored_layers=kept,
    ).step()  # fmt: skip
    left = [model.get_submodule(name).weight.shape[0] / number for name, number in before.items()]
    return model, min(left)


def measured(
    net: str, sparsity: float, variant: str, dense: nn.Module, task: Task
) -> tuple[float, float, float, float]:
    """Return accuracy after fine-tuning and before it, the share of parameters left, the least of a layer's units."""
    model, granularity, example = copy.deepcopy(dense).eval(), NETS[net][1], task.train[0][:2]
    if variant.startswith("Torch"):
        small, least = _by_torch_pruning(model, example, granularity, sparsity)
    else:
        small, least = _by_us(model, example, granularity, sparsity, variant)
    count = [sum(parameter.numel() for parameter in each.parameters()) for each in (small, dense)]
    before = task.accuracy(small)
    task.fit(small, TUNING, RATE / 3)
    return task.accuracy(small), before, 100 * count[0] / count[1], 100 * least


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one seed, one sparsity, the MLP alone")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = VARIANTS if importlib.util.find_spec("torch_pruning") else VARIANTS[:-1]
    sparsities = SPARSITIES[:1] if arguments.quick else SPARSITIES
    found: dict[tuple[str, float, str], list[tuple[float, float, float, float]]] = {}
    dense_accuracy: dict[str, list[float]] = {}
    started = time.process_time()
    for net in ["MLP"] if arguments.quick else NETS:
        for seed in range(1 if arguments.quick else arguments.seeds):
            task = Task(seed)
            torch.manual_seed(seed)
            dense = NETS[net][0]()
            task.fit(dense, EPOCHS, RATE)
            dense_accuracy.setdefault(net, []).append(task.accuracy(dense))
            for sparsity in sparsities:
                for variant in variants:
                    row = measured(net, sparsity, variant, dense, task)
                    found.setdefault((net, sparsity, variant), []).append(row)
        print(f"{net}: {time.process_time() - started:.0f} s", file=sys.stderr, flush=True)
    print(f"| net (dense) | units pruned | {' | '.join(variants)} |\n|---|---|{'---|' * len(variants)}")
    for net, accuracies in dense_accuracy.items():
        for sparsity in sparsities:
            cells = []
            for variant in variants:
                after, before, parameters, least = zip(*found[net, sparsity, variant], strict=True)
                mean, spread = statistics.mean(after), max(after) - min(after)
                cells.append(
                    f"{mean:.1f} ± {spread / 2:.1f} ({statistics.mean(before):.0f}; {statistics.mean(parameters):.0f}; "
                    f"{min(least):.0f})"
                )
            print(f"| {net} ({statistics.mean(accuracies):.1f}) | {sparsity:.0%} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
