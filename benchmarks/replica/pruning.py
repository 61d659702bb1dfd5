"""LeNet-300-100 pruned while it learns: gradually, at once, from the start, in 2:4 patterns, and by other criteria.

After Zhu and Gupta 2017 (arXiv:1710.01878): a network that loses its weights little by little ends better than one
that loses them at once, here after 60 % of the run; masks at random hold from the first step. The 2:4 rows follow Zhou
et al. 2021 (arXiv:2102.04010). The hidden layers are pruned, 265,200 weights; the output layer's 1000 stay in every
variant. All variants of a seed have the same start, batches, steps, optimizer and rates. That the output layer stays,
and between which of seven pairs of steps to prune gradually, was chosen on seeds 0 to 2; others are reported.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from digits28 import augment, digits, lenet
from measure import Row
from replicas import Runs, main, mean, spread
from torch import Tensor, nn

from shared_core import Recipe, Session

SEEDS, STEPS, BATCH, LEARNING_RATE = (3, 4, 5), 1500, 64, 2e-3
AUGMENTATIONS = 6
STRIKE = 0.6  # of the run
GRADUAL = {"begin": 0.2, "end": 0.8}
ONE_THRESHOLD = {"scope": "global", "max_layer_sparsity": 1.0}  # as published: no layer is limited
AT_START = {"schedule": "one_shot", "begin": 0}
N_M = {"sparsity": 0.5, "granularity": "n_m", **AT_START}
EVERY_STEP = {"end": 1.0, "every": 1}  # new masks until the last step

# prototypes of: gradual and global, gradual and local, one-shot, random
SPARSITIES = {
    0.8: "94.36, 94.18, 94.11, 89.65",
    0.95: "91.90 ± 0.45, 90.83, 87.36, 85.19",
    0.98: "85.07 ± 1.6, 85.96 ± 1.1, 68.49 ± 5.5, 80.87",
}
ALIKE = ("global", "local", "one-shot", "random")
LEAST_GAIN = {0.95: 2.5, 0.98: 10.0}  # percentage points of gradual above one-shot pruning
MOST_LOST, MOST_LOST_N_M = 0.8, 0.8  # percentage points below dense: at 80 %, with SR-STE
OTHERS = ("taylor", "movement", "wanda", "iterative", "recompute")


def variants() -> dict[str, dict[str, Any]]:
    """Return every recipe by name; an empty one trains the dense network."""
    found: dict[str, dict[str, Any]] = {"dense": {}}
    for sparsity in SPARSITIES:
        found[f"{sparsity} global"] = {"sparsity": sparsity, **ONE_THRESHOLD, **GRADUAL}
        found[f"{sparsity} local"] = {"sparsity": sparsity, "scope": "local", **GRADUAL}
        found[f"{sparsity} one-shot"] = {
            "sparsity": sparsity, **ONE_THRESHOLD, "schedule": "one_shot", "begin": STRIKE,
        }  # fmt: skip
        found[f"{sparsity} random"] = {"sparsity": sparsity, "criterion": "random", "scope": "local", **AT_START}
        found[f"{sparsity} defaults"] = {"sparsity": sparsity}
    found["2:4 fixed"] = N_M
    found["2:4 STE"] = {**N_M, **EVERY_STEP, "dynamic": "recompute"}
    found["2:4 SR-STE"] = {**N_M, **EVERY_STEP, "sr_ste": 2e-4}
    found["2:4 defaults"] = {**N_M, "sr_ste": 2e-4}
    spread_out = {"sparsity": 0.9, "criterion": "random", "scope": "erdos_renyi", **AT_START}
    found["0.9 random"] = spread_out
    found["0.9 RigL"] = {**spread_out, "dynamic": "rigl", "end": 0.75, "every": 100}  # of the paper
    for criterion in OTHERS[:3]:
        found[f"0.95 {criterion}"] = {"sparsity": 0.95, "criterion": criterion, **GRADUAL}
    found["0.95 iterative"] = {"sparsity": 0.95, "schedule": "iterative", **GRADUAL, "every": 100}
    found["0.95 recompute"] = {"sparsity": 0.95, "dynamic": "recompute", **GRADUAL}
    return {name: {**recipe, "skip": ["last"]} if recipe else {} for name, recipe in found.items()}


class Experiment:
    """The training of one seed, as a function of the recipe alone."""

    def __init__(self, seed: int, steps: int) -> None:
        self.seed, self.steps = seed, steps
        generator = torch.Generator().manual_seed(seed)
        (images, labels), (held_out, answers) = digits(seed)
        chosen = torch.randint(len(images), (steps, BATCH), generator=generator)
        self.batches = [(augment(images[index], generator), labels[index]) for index in chosen]
        generator = torch.Generator().manual_seed(1_000)
        self.test = torch.cat([augment(held_out, generator) for _ in range(AUGMENTATIONS)])
        self.answers = answers.repeat(AUGMENTATIONS)

    def run(self, recipe: dict[str, Any]) -> dict[str, Any]:
        """Return accuracy in percent at the end of training, and whether the zeros are those that were asked for."""
        model = lenet(self.seed)
        session = Session(Recipe.from_dict({"prune": recipe} if recipe else {}), seed=self.seed)
        session.attach(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        session.begin([optimizer], total_steps=self.steps, clips_gradients=False)
        for images, labels in self.batches:
            optimizer.zero_grad()
            session.loss(F.cross_entropy(model(images), labels)).backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            schedule.step()
        session.finish()
        with torch.no_grad():
            right = (model(self.test).argmax(1) == self.answers).float().mean().item()
        return {"accuracy": 100 * right, "exact": is_as_asked(hidden_weights(model), recipe)}


def hidden_weights(model: nn.Module) -> list[Tensor]:
    return [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)][:-1]


def is_as_asked(weights: Sequence[Tensor], recipe: dict[str, Any]) -> bool:
    """Return whether exactly as many weights are zero as the recipe says, in each group if there are any."""
    if recipe.get("granularity") == "n_m":
        kept, of = map(int, recipe.get("n_m", "2:4").split(":"))
        return all(bool((weight.view(-1, of).count_nonzero(dim=1) == kept).all()) for weight in weights)
    zeros = [int((weight == 0).sum()) for weight in weights]
    sizes, sparsity = [weight.numel() for weight in weights], recipe.get("sparsity", 0.0)
    if recipe.get("criterion") == "wanda":  # the weights of one output compete
        return zeros == [len(weight) * round(sparsity * weight.shape[1]) for weight in weights]
    if recipe.get("scope") == "local":
        return zeros == [round(sparsity * size) for size in sizes]
    # Erdos-Renyi rounds in each tensor
    return abs(sum(zeros) - round(sparsity * sum(sizes))) <= ("erdos" in recipe.get("scope", "")) * len(sizes)


def told(found: dict[str, list[float]], names: Sequence[str]) -> str:
    """Return accuracies, each with the difference to the dense network of the same seed."""
    texts = []
    for name in names:
        lost = [value - dense for value, dense in zip(found[name], found["dense"], strict=True)]
        texts.append(f"{mean(found[name]):.2f} ({spread(lost, 2)})")
    return ", ".join(texts)


def compared(found: dict[str, list[float]], sparsity: float) -> list[Row]:
    """Return what the ways to prune have left at one sparsity."""
    names = [f"{sparsity} {name}" for name in ALIKE]
    gradual, _, one_shot, random = (mean(found[name]) for name in names)
    if sparsity in LEAST_GAIN:
        least, than = one_shot + LEAST_GAIN[sparsity], f"one-shot + {LEAST_GAIN[sparsity]:g}"
    else:
        least, than = mean(found["dense"]) - MOST_LOST, f"dense - {MOST_LOST:g}"
    rows = [
        Row(
            f"{sparsity:.0%} pruned: gradually, under one threshold; gradually, each layer alike; at once after "
            f"{STRIKE:.0%} of the run; at random from the start",
            told(found, names),
            SPARSITIES[sparsity],
            target=f"the first >= {than} points",
            met=gradual >= least,
        )
    ]
    if sparsity == max(SPARSITIES):
        rows.append(
            Row(
                f"{sparsity:.0%} pruned: one-shot beside random from the start",
                f"{one_shot - random:+.2f}",
                "-12.4",
                target="a trap: one-shot is the worse",
                met=one_shot < random,
            )
        )
    return rows


def measure(quick: bool, runs: Runs) -> list[Row]:
    recipes = variants()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in recipes}
    for seed in SEEDS[:1] if quick else SEEDS:
        experiment = functools.cache(functools.partial(Experiment, seed, 20 if quick else STEPS))
        for name, recipe in recipes.items():
            result = runs.of(f"{name}, seed {seed}", lambda made=experiment, recipe=recipe: made().run(recipe))
            results[name].append(result)
    found = {name: [result["accuracy"] for result in of_seeds] for name, of_seeds in results.items()}
    rows = [
        Row(
            "LeNet-300-100, nothing pruned; in brackets below: points above it, seed by seed",
            spread(found["dense"], 2),
            "94.87 ± 0.04",
        )
    ]
    for sparsity in SPARSITIES:
        rows += compared(found, sparsity)
    rows += [
        Row(
            "the same three sparsities, gradually and under one threshold, in the default window (0 to 0.5 of the run)",
            told(found, [f"{sparsity} defaults" for sparsity in SPARSITIES]),
        ),
        Row(
            "2:4 in both hidden layers: masks of the start; new masks every step, weights under them learning on "
            "(STE); the same with their decay (SR-STE, 2e-4)",
            told(found, ["2:4 fixed", "2:4 STE", "2:4 SR-STE"]),
            "93.51 ± 0.47 (naive)",
            target=f"SR-STE >= dense - {MOST_LOST_N_M:g} points",
            met=mean(found["2:4 SR-STE"]) >= mean(found["dense"]) - MOST_LOST_N_M,
        ),
        Row(
            "the same with SR-STE, new masks every 10 steps until half of the run, as is the default",
            told(found, ["2:4 defaults"]),
        ),
        Row("90% pruned, Erdos-Renyi: at random from the start; RigL", told(found, ["0.9 random", "0.9 RigL"])),
        Row(f"95% pruned gradually: {', '.join(OTHERS)}", told(found, [f"0.95 {name}" for name in OTHERS])),
    ]
    exact = [result["exact"] for of_seeds in results.values() for result in of_seeds]
    rows.append(
        Row(
            "runs that ended with exactly the zeros asked for, two of every four with 2:4",
            f"{sum(exact)} of {len(exact)}",
            target="all",
            met=all(exact),
        )
    )
    return rows


if __name__ == "__main__":
    main(measure)
