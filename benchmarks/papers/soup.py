"""Soups of a sweep on MNIST (Wortsman et al. 2022, arXiv:2203.05482): the best member, the uniform and the greedy soup.

The paper fine-tunes CLIP with many settings. Here members go on from one network that has seen few images, with other
rates, decays and orders, which `replica.soup` does on the digits; their rates are constant. The last 10,000 training
images choose the best member and the greedy soup; nothing is chosen on the test images, nor on the same images moved by
up to two pixels.
"""

from __future__ import annotations

import functools
from typing import Any

from digits28 import Batch, lenet
from papers.distillation import Jittered
from replica.soup import DECAYS, MEMBERS, RATES, Experiment, gain, trained
from replicas import Published, Runs, published, reaches, spread
from torch import nn

SEEDS, HELD_OUT, START_STEPS, STEPS, START_RATE = 5, 10_000, 300, 300, 2e-3


def run(seed: int, data: tuple[Batch, Batch], quick: bool) -> dict[str, Any]:
    """Return the accuracies of the best member, of the mean one and of both soups."""
    (images, labels), test = data
    held_out = min(HELD_OUT, len(images) // 2)
    train = images[:-held_out], labels[:-held_out]

    def member(start: nn.Module, rate: float, decay: float, steps: int, number: int) -> nn.Module:
        return trained(start, train, rate, decay, 5 if quick else steps, number, lambda images, _: images)

    start = member(lenet(seed), START_RATE, 0.0, START_STEPS, seed)
    made = [member(start, RATES[i % 4], DECAYS[i // 4 % 2], STEPS, 100 * (seed + 1) + i) for i in range(MEMBERS)]
    moved = next(iter(Jittered(test, 1, len(test[0]), seed)))
    experiment = Experiment(made, chosen_on=(images[-held_out:], labels[-held_out:]), test=test, moved=moved)
    return experiment.souped(experiment.members)


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    found = runs.seeds(1 if quick else SEEDS, functools.partial(run, data=data, quick=quick))
    rows = []
    for where, what, paper in (
        ("chosen_on", "images chosen on", "never below"),
        ("test", "test images", "above 0; +0.65 for CLIP on ImageNet"),
        ("moved", "test images moved by up to two pixels", "above 0"),
    ):
        over = gain(found, "greedy", "best", where)
        text = "; ".join(
            f"{name} {spread([one[f'{name} {where}'] for one in found], 2)} %"
            for name in ("best", "mean", "uniform", "greedy")
        )
        met = min(over) >= 0 if where == "chosen_on" else reaches(over, 0)
        rows.append(
            Published(
                f"greedy soup of {MEMBERS}, {what}: points above the best member", paper, spread(over, 2), text, met
            )
        )
    return rows


if __name__ == "__main__":
    published(measure)
