"""Winning tickets of LeNet-300-100 on MNIST (Frankle and Carbin 2019, arXiv:1803.03635, figures 3 and 4, appendix G).

As in the paper: Glorot's normal initialization, Adam at 1.2e-3, batches of 60, 55,000 images to train and 5,000 to
validate, validated every 100 iterations; 20 % of what is left of the hidden layers and 10 % of the output layer pruned
a round, rewinding to the initialization; accuracy on the 10,000 test images at the iteration of the smallest validation
loss. The paper trains for 50,000 iterations and shows 15,000, which is what is trained here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from digits28 import Batch
from mnist import Drawn, mlp
from replica.lottery_ticket import BATCH, HIDDEN, Experiment, seed_run
from replicas import Published, Runs, mean, published, reaches, spread

SEEDS, ITERATIONS, ADAM_RATE, EVERY = 3, 15_000, 1.2e-3, 100
EARLY, BEST = 7, 9  # rounds that leave 21.1 and 13.5 % of the weights

Found = list[dict[str, Any]]


def run(
    seed: int, data: tuple[Batch, Batch], iterations: int, rounds: int, controlled: int, rate: float
) -> dict[str, Any]:
    """Return what `seed_run` tells of a search on MNIST, with a re-initialized ticket in one round."""
    (images, labels), test = data
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out, kept = order[: len(order) // 12], order[len(order) // 12 :]
    batches = Drawn((images[kept], labels[kept]), iterations, BATCH, seed)
    validation = images[held_out], labels[held_out]
    experiment = Experiment(functools.partial(mlp, seed, 300, 100), ADAM_RATE, batches, validation, test, EVERY)
    return seed_run(experiment, rounds, controlled, ["random_reinit"], rate)


def told(found: Found, key: str) -> str:
    """Return accuracy at early stopping and its iteration."""
    return f"{spread(values(found, f'{key} accuracy'), 2)} % at iteration {spread(values(found, f'{key} step'), 0)}"


def values(found: Found, key: str) -> list[float]:
    return [one[key] for one in found]


def gains(found: Found, key: str, over: str) -> list[float]:
    """Return points of accuracy above another run, seed by seed."""
    return [one[f"{key} accuracy"] - one[f"{over} accuracy"] for one in found]


def earlier(found: Found, key: str, than: str) -> list[float]:
    """Return by how many percent the smallest validation loss comes earlier, seed by seed."""
    return [100 * (1 - one[f"{key} step"] / one[f"{than} step"]) for one in found]


def dense_row(found: Found, iterations: int) -> Published:
    late = sum(one["0 none step"] > 0.9 * iterations for one in found)
    why = f"{iterations:,} iterations; smallest loss in the last tenth: {late} of {len(found)}"
    return Published("dense, at early stopping", "", told(found, "0 none"), why)


def exact_row(found: Found, rounds: int) -> Published:
    exact = all(value for one in found for key, value in one.items() if key.endswith(" exact"))
    met = exact and all(one["rewound"] and one["replays"] == rounds for one in found)
    what = "weights left are those of the rule; survivors start from their initial bits"
    return Published(what, "all", "all" if met else "not all", met=met)


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    iterations = 20 if quick else ITERATIONS
    search = functools.partial(run, data=data, iterations=iterations, rounds=BEST, controlled=EARLY, rate=HIDDEN)
    found = runs.seeds(1 if quick else SEEDS, search)
    early, best, control = f"{EARLY} none", f"{BEST} none", f"{EARLY} random_reinit"
    left = {key: f"{mean(values(found, f'{key} left')):.1f} %" for key in (early, best)}
    gain, over = gains(found, best, "0 none"), gains(found, early, control)
    sooner = earlier(found, early, "0 none")
    faster = [one[f"{control} step"] / one[f"{early} step"] for one in found]
    return [
        dense_row(found, iterations),
        Published(f"ticket of {left[best]}: points above dense", "above 0.3", spread(gain, 2), told(found, best),
                  reaches(gain, 0.3)),
        Published(f"ticket of {left[early]}: early stopping comes earlier by", "38 %", f"{spread(sooner, 0)} %",
                  told(found, early), reaches(sooner, 38)),
        Published(f"ticket of {left[early]} beside its re-initialization: smallest loss is reached sooner by",
                  "2.51 times", f"{spread(faster, 2)} times", f"re-initialized: {told(found, control)}",
                  reaches(faster, 2.51)),
        Published("the same: points above it", "0.5", spread(over, 2), met=reaches(over, 0.5)),
        exact_row(found, BEST),
    ]  # fmt: skip


if __name__ == "__main__":
    published(measure)
