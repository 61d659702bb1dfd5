"""Training in FP8 and in fp16 on MNIST: Micikevicius et al. 2022, arXiv:2209.05433, and 2018, arXiv:1710.03740.

FP8: products of the hidden layers forward in E4M3 and backward in E5M2, with scales of the magnitudes at hand or of
the last steps; the hidden layers have 304 and 112 units, for products are of multiples of 16. Seeds are paired: start,
batches, steps and rates are those of fp32.

fp16: `replica.loss_scaling` on these images. The loss is multiplied by 1e-5 and the learning rate divided by it, of
which fp32 sees nothing; so small are the gradients of the paper's detection network as they are.
"""

from __future__ import annotations

import functools
from typing import Any

from digits28 import Batch
from mnist import Drawn, errors, mlp, train
from replica.loss_scaling import Training, share
from replicas import Published, Runs, published, reaches, spread

SEEDS = 5
BATCH, EPOCHS, RATE, HIDDEN = 128, 2, 1e-3, ("1", "4")
FP8 = ("tensorwise", "delayed")
STEPS, COEFFICIENT = 600, 1e-5
FP16: dict[str, dict[str, Any]] = {
    "fp32": {"half": False},
    "fp16": {},
    "small": {"coefficient": COEFFICIENT},
    "scaled": {"coefficient": COEFFICIENT, "scaling": {"kind": "dynamic"}},
}


def eight_bits(seed: int, recipe: dict[str, Any], data: tuple[Batch, Batch], steps: int) -> dict[str, Any]:
    """Return accuracy in percent of the weights that were trained, in fp32."""
    images, test = data
    model = train(mlp(seed, 304, 112), Drawn(images, steps, BATCH, seed), rate=RATE, recipe=recipe)
    return {"accuracy": 100 - 100 * errors(model, test) / len(test[0])}


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    seeds = range(1 if quick else SEEDS)
    steps = 5 if quick else EPOCHS * len(data[0][0]) // BATCH
    recipes = {"fp32": {}, **{name: {"fp8": {"recipe": name, "include": list(HIDDEN)}} for name in FP8}}
    eight = {
        name: runs.seeds(
            len(seeds), functools.partial(eight_bits, recipe=recipe, data=data, steps=steps), f"fp8, {name}"
        )
        for name, recipe in recipes.items()
    }
    sixteen = {
        name: [
            runs.of(f"fp16, {name}, seed {seed}", Training(
                seed, steps=5 if quick else STEPS, data=lambda _: data, view=lambda images, _: images, **options).run)
            for seed in seeds
        ]
        for name, options in FP16.items()
    }  # fmt: skip
    return [*fp8_rows(eight, steps), *fp16_rows(sixteen)]


def beside(found: dict[str, list[dict[str, Any]]], name: str) -> list[float]:
    return [one["accuracy"] - base["accuracy"] for one, base in zip(found[name], found["fp32"], strict=True)]


def accuracies(found: list[dict[str, Any]]) -> str:
    return f"{spread([one['accuracy'] for one in found], 2)} %"


def fp8_rows(found: dict[str, list[dict[str, Any]]], steps: int) -> list[Published]:
    rows = [Published("FP8: accuracy in fp32", "", accuracies(found["fp32"]), f"{steps:,} steps of AdamW")]
    for name in FP8:
        gap = beside(found, name)
        rows.append(
            Published(f"FP8, {name}: points above fp32", "no drop", spread(gap, 2),
                      f"{accuracies(found[name])}; the paper's are convolutional networks and transformers",
                      reaches(gap, 0))
        )  # fmt: skip
    return rows


def fp16_rows(found: dict[str, list[dict[str, Any]]]) -> list[Published]:
    def flushed(name: str) -> str:
        return f"{spread([one['flushed'] for one in found[name]])} % of activation gradients flushed to zero"

    counted, recounted = (
        [tuple(counts) for name in ("fp16", "small", "scaled") for one in found[name] for counts in one["counts"][side]]
        for side in (0, 1)
    )
    natural, small, scaled = (beside(found, name) for name in ("fp16", "small", "scaled"))
    skipped = max(one["skipped"] for one in found["scaled"])
    same = sum(ours == exact for ours, exact in zip(counted, recounted, strict=True))
    apart = 100 * abs(share(counted) - share(recounted))
    return [
        Published("fp16: accuracy in fp32", "", accuracies(found["fp32"]), f"{STEPS} steps of SGD, batches of 32"),
        Published("fp16 without loss scaling: points above fp32", "no drop", spread(natural, 2), flushed("fp16"),
                  reaches(natural, 0)),
        Published(f"the same, loss times {COEFFICIENT:g}: points above fp32", "far below (diverges)", spread(small, 2),
                  f"{flushed('small')}, the paper's 31 %", not reaches(small, 0)),
        Published("the same with loss scaling: points above fp32", "no drop", spread(scaled, 2),
                  f"{flushed('scaled')}; kind dynamic, {skipped} steps skipped at most, where the paper takes 8",
                  reaches(scaled, 0)),
        Published("share flushed in all fp16 runs; recounted in float64", "",
                  f"{100 * share(counted):.3f}; {100 * share(recounted):.3f} %",
                  f"equal in {same} of {len(counted)} steps counted", apart <= 0.01),
    ]  # fmt: skip


if __name__ == "__main__":
    published(measure)
