"""LeNet-300-100 as products of smaller matrices on MNIST, after Denil et al. 2013 (arXiv:1306.0543).

They train a network of which most weights are predicted from the others by a dictionary; the best network loses no
accuracy with 5 % of its weights. Here the weights of both hidden layers become products of two factors of one rank
each, truncated from a trained network; they are trained as long as the network was, and so is the network itself.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from digits28 import Batch
from mnist import Drawn, errors, mlp, train
from replicas import Published, Runs, published, reaches, spread

SEEDS, BATCH, EPOCHS, RATE, DROPOUT = 3, 128, 4, 1e-3, 0.2
RANKS = (45, 18, 9)  # 25, 10 and 5 % of the weights of the hidden layers


def run(seed: int, data: tuple[Batch, Batch], quick: bool) -> dict[str, Any]:
    """Return accuracy in percent of the network, of the same trained on, and of each rank."""
    images, test = data
    steps = 10 if quick else EPOCHS * len(images[0]) // BATCH
    model = train(mlp(seed, 300, 100, dropout=DROPOUT), Drawn(images, steps, BATCH, seed), rate=RATE)
    found: dict[str, Any] = {"dense": 100 - 100 * errors(model, test) / len(test[0])}
    recipes = {"trained on": {}, **{f"rank {rank}": {"low_rank": {"rank": rank}} for rank in RANKS}}
    for name, recipe in recipes.items():
        tuned = train(copy.deepcopy(model), Drawn(images, steps, BATCH, 100 + seed), rate=RATE, recipe=recipe)
        found[name] = 100 - 100 * errors(tuned, test) / len(test[0])
    return found


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    found = runs.seeds(1 if quick else SEEDS, functools.partial(run, data=data, quick=quick))

    def told(name: str) -> str:
        return f"{spread([one[name] for one in found], 2)} %"

    rows = [Published("dense: accuracy; trained on", "", f"{told('dense')}; {told('trained on')}",
                      f"{EPOCHS} epochs each, dropout {DROPOUT:g}")]  # fmt: skip
    for rank in RANKS:
        gap = [one[f"rank {rank}"] - one["trained on"] for one in found]
        left = rank * (784 + 300 + 300 + 100) / (784 * 300 + 300 * 100)
        rows.append(
            Published(f"rank {rank} in both hidden layers, {left:.0%} of their weights: points above dense, trained on",
                      "no drop at 5 %", spread(gap, 2), told(f"rank {rank}"), reaches(gap, 0))
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    published(measure)
