"""LeNet-300-100 pruned on MNIST gradually and at once (Zhu and Gupta 2017, arXiv:1710.01878), 2:4 and 4:8.

Zhu and Gupta remove weights little by little while a network trains, along a cubic curve. All runs of a seed have the
same start, batches, steps and rates, as the replica on digits has; gradual pruning goes from 20 to 80 % of the run.
Pruning at once comes where the gradual begins, with all the rest of the run to recover, and at 60 %. The hidden layers
are pruned under one threshold, 265,200 weights of 266,200; the output layer's stay. 2:4 and 4:8 by SR-STE (Zhou et al.
2021, arXiv:2102.04010) prune from the first step, with new masks in every step and the paper's decay of 2e-4, in 20
epochs, where the paper has 120; for groups of eight the first layer has 304 units there, and in the dense network
beside it, which trains for as long.
"""

from __future__ import annotations

import functools
from typing import Any

from digits28 import Batch
from mnist import Drawn, errors, mlp, train
from replica.pruning import EVERY_STEP, GRADUAL, N_M, ONE_THRESHOLD, STRIKE, hidden_weights, is_as_asked
from replicas import Published, Runs, published, reaches, spread

SEEDS, STEPS, STEPS_N_M, BATCH, RATE = 5, 1200, 12_000, 100, 2e-3
SPARSITIES, AT_ONCE = (0.9, 0.95, 0.98), (GRADUAL["begin"], STRIKE)
PATTERNS, WIDER = ("2:4", "4:8"), "dense, 304 units"


def variants() -> dict[str, dict[str, Any]]:
    """Return every recipe by name; an empty one trains the dense network."""
    found: dict[str, dict[str, Any]] = {"dense": {}, WIDER: {}}
    for sparsity in SPARSITIES:
        found[f"{sparsity} gradual"] = {"sparsity": sparsity, **ONE_THRESHOLD, **GRADUAL}
        for begin in AT_ONCE:
            at_once = {"sparsity": sparsity, **ONE_THRESHOLD, "schedule": "one_shot", "begin": begin}
            found[f"{sparsity} at {begin}"] = at_once
    for pattern in PATTERNS:
        found[f"{pattern} fixed"] = {**N_M, "n_m": pattern}
        found[f"{pattern} SR-STE"] = {**N_M, **EVERY_STEP, "n_m": pattern, "sr_ste": 2e-4}
    return {name: {**recipe, "skip": ["last"]} if recipe else {} for name, recipe in found.items()}


def is_n_m(name: str) -> bool:
    """Return whether that is a run of 2:4 or 4:8, or the dense one beside them."""
    return name.startswith((*PATTERNS, WIDER))


def run(seed: int, name: str, data: tuple[Batch, Batch], steps: int) -> dict[str, Any]:
    """Return accuracy in percent at the end of training, and whether the zeros are those that were asked for."""
    (images, test), recipe = data, variants()[name]
    units = 304 if is_n_m(name) else 300
    drawn = Drawn(images, steps, BATCH, seed)
    model = train(mlp(seed, units, 100), drawn, rate=RATE, recipe={"prune": recipe} if recipe else {})
    accuracy = 100 - 100 * errors(model, test) / len(test[0])
    return {"accuracy": accuracy, "exact": is_as_asked(hidden_weights(model), recipe)}


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    steps = {name: 20 if quick else STEPS_N_M if is_n_m(name) else STEPS for name in variants()}
    results = [
        {name: runs.of(f"{name}, seed {seed}", functools.partial(run, seed, name, data, steps[name])) for name in steps}
        for seed in range(1 if quick else SEEDS)
    ]
    found = {name: [of_seed[name]["accuracy"] for of_seed in results] for name in variants()}

    def over(name: str, other: str) -> list[float]:
        return [mine - theirs for mine, theirs in zip(found[name], found[other], strict=True)]

    rows = [Published("dense: accuracy", "", f"{spread(found['dense'], 2)} %", f"{steps['dense']:,} steps of AdamW")]
    for sparsity in SPARSITIES:
        gradual = f"{sparsity} gradual"
        gains = {begin: over(gradual, f"{sparsity} at {begin}") for begin in AT_ONCE}
        rows.append(
            Published(
                f"{sparsity:.0%} pruned gradually: points above one shot at "
                + ", at ".join(f"{begin:.0%} of the run" for begin in AT_ONCE),
                "above 0",
                ", ".join(spread(gain, 2) for gain in gains.values()),
                f"{spread(found[gradual], 2)} %, {spread(over(gradual, 'dense'), 2)} beside dense",
                all(reaches(gain, 0) for gain in gains.values()),
            )
        )
    for pattern in PATTERNS:
        lost, fixed = over(f"{pattern} SR-STE", WIDER), over(f"{pattern} fixed", WIDER)
        rows.append(Published(f"{pattern} by SR-STE: points above dense", "no drop", spread(lost, 2),
                              f"{steps[WIDER]:,} steps; the paper's are ResNets on ImageNet; dense "
                              f"{spread(found[WIDER], 2)} %; masks of the start: {spread(fixed, 2)}",
                              reaches(lost, 0)))  # fmt: skip
    exact = [one["exact"] for of_seed in results for one in of_seed.values()]
    rows.append(Published("runs with exactly the zeros asked for", "all", f"{sum(exact)} of {len(exact)}",
                          met=all(exact)))  # fmt: skip
    return rows


if __name__ == "__main__":
    published(measure)
