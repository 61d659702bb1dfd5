"""LeNet-300-100 with a first layer of rank 16 of 300: truncated, fine-tuned, multiplied out again.

What is expected follows Denil et al. 2013 (arXiv:1306.0543), who predict most of a network's weights from a few.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from digits28 import augment, digits, lenet
from measure import Row
from replica.compression import accuracy, train
from replicas import Runs, main, spread

from shared_core.low_rank import factorize, merge

SEEDS, STEPS, RANK, CALIBRATION = 3, 2500, 16, 1197
FIRST = {"rank": RANK, "include": ["1"]}


@torch.no_grad()
def run(seed: int, quick: bool) -> dict[str, Any]:
    """Return what one trained network is worth whole, truncated, and fine-tuned in two factors."""
    data, test = digits(seed)
    steps = 40 if quick else STEPS
    with torch.enable_grad():
        model = train(lenet(seed), data, seed, steps)
        on = train(copy.deepcopy(model), data, 100 + seed, steps)
        tuned = train(copy.deepcopy(model), data, 100 + seed, steps, {"low_rank": FIRST})
    found: dict[str, Any] = {"dense": accuracy(model, test), "dense, trained on": accuracy(on, test)}
    images = augment(data[0][:CALIBRATION], torch.Generator().manual_seed(seed))
    for decomposition in ("svd", "scaled", "whitened"):
        truncated = copy.deepcopy(model)
        report = factorize(truncated, {**FIRST, "decomposition": decomposition}, [images])
        found[decomposition] = accuracy(truncated, test)
        found[f"{decomposition}: error"] = float((truncated(images) - model(images)).norm() / model(images).norm())
    found |= {"tuned": accuracy(tuned, test), "parameters": list(report.parameters)}
    factors = tuned(images)
    merge(tuned)
    found["merged: difference"] = float((tuned(images) - factors).abs().max() / factors.abs().max())
    return found


def measure(quick: bool, runs: Runs) -> list[Row]:
    """Return the rows of this replica."""
    found = [runs.of(f"seed {seed}", lambda seed=seed: run(seed, quick)) for seed in range(1 if quick else SEEDS)]

    def told(name: str, digits: int = 2) -> str:
        return spread([one[name] for one in found], digits)

    lost = [one["dense"] - one["tuned"] for one in found]
    before, after = found[0]["parameters"]
    gap = max(one["merged: difference"] for one in found)
    better = all(one["whitened: error"] < one["svd: error"] for one in found)
    return [
        Row("dense, accuracy; the same, trained on", f"{told('dense')}; {told('dense, trained on')} %"),
        Row("rank 16 of 300 before fine-tuning: svd; scaled; whitened",
            f"{told('svd')}; {told('scaled')}; {told('whitened')} %"),
        Row("their error in the logits, relative", f"{told('svd: error', 3)}; {told('scaled: error', 3)}; "
            f"{told('whitened: error', 3)}", target="whitened below svd", met=better),
        Row("rank 16 of 300 after fine-tuning", f"{told('tuned')} %, {spread(lost, 2)} points lost; "
            f"{before:,} -> {after:,} parameters", target="at most 0.5 points lost", met=sum(lost) / len(lost) <= 0.5),
        Row("multiplied out: largest difference of the logits, relative", f"{gap:.1e}", target="1e-6", met=gap <= 1e-6),
    ]  # fmt: skip


if __name__ == "__main__":
    main(measure)
