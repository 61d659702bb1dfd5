"""LeNet-300-100 quantized after and in training, and two deep networks with bits chosen by the Hessian's trace.

All three layers are quantized, the first and the last too: weights per output channel, inputs per tensor. Quantized
after training with the ranges of minimum and maximum or of least squared error; trained with the straight-through
estimator (STE) and with LSQ (Esser et al. 2020, arXiv:1902.08153). STE has LSQ's codes and LSQ's scales at the start
and leaves them there, so that what differs is the gradient of the scale. The second part follows HAWQ-V2 (Dong et al.
2020, arXiv:1911.03852): weights alone are rounded, and nothing is trained afterwards.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from typing import Any

import torch
import torch.nn.functional as F
from digits28 import Batch, augment, digits, lenet
from measure import Row
from replicas import Runs, main, mean, spread
from torch import Tensor, nn

from shared_core import Recipe, Session
from shared_core.quantization import BitPlan, apply_ranges, convert, layer_sensitivity, plan_bits, quantize
from shared_core.quantization.batch_norm import LEARNED

SEEDS, STEPS, TUNING_STEPS, BATCH = 5, 2500, 500, 64
LEARNING_RATE, TUNING_RATE = 2e-3, 5e-4
AUGMENTATIONS, CALIBRATION = 6, 10
WIDTHS = ((8, 8), (4, 8), (3, 8), (3, 3), (2, 8), (2, 2))
AFTER_TRAINING = ("minmax", "mse")
METHODS = (*AFTER_TRAINING, "STE", "LSQ")
ORDERED = ((2, 8), (2, 2), (3, 3))
PROTOTYPE = {
    (8, 8): "95.47, 95.45, 95.56, 95.54 of 95.46",
    (4, 8): "95.31, 94.98, 95.56, 95.45",
    (3, 8): "93.73, 94.02, 95.43, 95.47",
    (3, 3): "91.92, 93.26, 94.03, 94.84",
    (2, 8): "45.92, 88.44, 93.98, 95.07",
    (2, 2): "24.87, 83.42, 84.57, 91.22",
}
LARGEST_LOSS = {(3, 8): 0.2, (2, 8): 0.6, (2, 2): 4.5}  # percentage points of LSQ below the float model

CANDIDATES, RANDOM_PLANS, PROBES = (2, 3, 4, 6, 8), 40, 50
PLAN_AUGMENTATIONS = 2
DEEP_STEPS = 2000
RANDOM = ((4, 3), (4, 2), (3, 2))  # (bits a weight, fewest bits of a layer)


def name(widths: tuple[int, int]) -> str:
    return f"W{widths[0]}A{widths[1]}"


def deep_mlp(seed: int) -> nn.Sequential:
    """Return six linear layers on images at 14x14, of which none holds most of the weights."""
    torch.manual_seed(seed)
    sizes = (196, 128, 128, 128, 128, 128, 10)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), *layers[:-1])


def deep_cnn(seed: int) -> nn.Sequential:
    """Return five convolutions and two linear layers, of which none holds most of the weights."""
    torch.manual_seed(seed)
    channels, strides = (1, 16, 32, 32, 32, 32), (2, 2, 1, 1, 2)
    layers: list[nn.Module] = []
    for (inputs, outputs), stride in zip(itertools.pairwise(channels), strides, strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))


DEEP = {"MLP": (deep_mlp, 5), "CNN": (deep_cnn, 3)}  # and seeds


def train(
    model: nn.Module, data: Batch, seed: int, steps: int, rate: float, qat: dict[str, Any] | None = None
) -> nn.Module:
    """Train in place and return what would be deployed; `qat` may hold ``learn``: whether scales are trained."""
    generator = torch.Generator().manual_seed(seed)
    learn, session = True, Session(Recipe.from_dict({}))
    if qat is not None:
        learn = qat["learn"]
        session = Session(Recipe.from_dict({"qat": {key: value for key, value in qat.items() if key != "learn"}}))
    session.attach(model)
    parameters = [p for key, p in model.named_parameters() if learn or key.rpartition(".")[2] not in LEARNED]
    optimizer = torch.optim.Adam(parameters, lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    session.begin([optimizer], total_steps=steps)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(data[0]), (BATCH,), generator=generator)
        optimizer.zero_grad()
        session.loss(F.cross_entropy(model(augment(data[0][chosen], generator)), data[1][chosen])).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        schedule.step()
    technique: Any = session.techniques.get("qat")
    ranges = None if technique is None else technique.ranges()
    session.finish()
    model.eval()
    return model if ranges is None else apply_ranges(model, ranges)


@torch.no_grad()
def judged(model: nn.Module, test: Batch, augmentations: int = AUGMENTATIONS) -> tuple[float, float]:
    """Return accuracy in percent and loss on the same augmented images for every model."""
    generator = torch.Generator().manual_seed(1_000)
    images = torch.cat([augment(test[0], generator) for _ in range(augmentations)])
    labels = test[1].repeat(augmentations)
    output: Tensor = model.eval()(images)
    return 100 * (output.argmax(1) == labels).float().mean().item(), F.cross_entropy(output, labels).item()


def calibration(data: Batch, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10_000 + seed)
    return [
        augment(data[0][torch.randperm(len(data[0]), generator=generator)[:128]], generator) for _ in range(CALIBRATION)
    ]


def lenet_run(seed: int, quick: bool) -> dict[str, float]:
    """Return the accuracy of one trained network under every method."""
    data, test = digits(seed)
    steps, tuning = (20, 5) if quick else (STEPS, TUNING_STEPS)
    model = train(lenet(seed), data, seed, steps, LEARNING_RATE)
    found = {"float": judged(model, test)[0]}
    tuned = train(copy.deepcopy(model), data, 100 + seed, tuning, TUNING_RATE)
    found["float, trained on"] = judged(tuned, test)[0]
    batches = calibration(data, seed)
    for weight_bits, activation_bits in WIDTHS:
        width = name((weight_bits, activation_bits))
        options = {"scheme": "int8", "weight_bits": weight_bits, "activation_bits": activation_bits}
        for method in AFTER_TRAINING:
            quantized = quantize(model, {**options, "range": method}, batches)
            found[f"{width} {method}"] = judged(quantized, test)[0]
            if weight_bits == activation_bits == 8:
                found[f"{width} {method}, integer"] = judged(convert(quantized), test)[0]
        if weight_bits > 3:  # nothing to win back
            continue
        for method, learn in (("STE", False), ("LSQ", True)):
            qat = {**options, "range": "lsq", "learn": learn}
            # two bits everywhere are still learning after so many steps
            for told, steps in (
                ("", tuning),
                *([(", twice", 2 * tuning)] if (weight_bits, activation_bits) == (2, 2) else []),
            ):
                trained = train(copy.deepcopy(model), data, 100 + seed, steps, TUNING_RATE, qat)
                found[f"{width} {method}{told}"] = judged(trained, test)[0]
    return found


def plan_run(kind: str, seed: int, quick: bool) -> dict[str, Any]:
    """Return the accuracy of one network under plans of 4 and 3 bits a weight, and how well cost predicts loss."""
    data, test = digits(seed)
    model = train(DEEP[kind][0](seed), data, seed, 20 if quick else DEEP_STEPS, LEARNING_RATE).eval()
    generator = torch.Generator().manual_seed(20_000 + seed)
    batch = augment(data[0], generator), data[1]

    def loss(net: nn.Module, pair: Any) -> Tensor:
        return F.cross_entropy(net(pair[0]), pair[1])

    probes = 2 if quick else PROBES
    costs = {
        "Hessian": layer_sensitivity(model, [batch], loss=loss, bits=CANDIDATES, probes=probes, seed=seed),
        "KL": layer_sensitivity(model, [batch[0]], metric="kl", bits=CANDIDATES),
    }
    sizes = {layer: model.get_submodule(layer).weight.numel() for layer in costs["KL"]}  # type: ignore[operator, union-attr]

    def true(plan: BitPlan) -> tuple[float, float]:
        return judged(quantize(model, plan.qat_options("int8_weight")), test, PLAN_AUGMENTATIONS)

    found: dict[str, Any] = {"float": judged(model, test, PLAN_AUGMENTATIONS)[0]}
    for budget in (4, 3):
        found[f"{budget} uniform"] = true(BitPlan(dict.fromkeys(sizes, budget), sizes))[0]
        for metric, cost in costs.items():
            found[f"{budget} {metric} plan"] = true(plan_bits(cost, sizes, budget, CANDIDATES))[0]
            found[f"{budget} {metric} plan, floor 2"] = true(plan_bits(cost, sizes, budget, CANDIDATES, floor=2))[0]
    for budget, floor in RANDOM:
        plans = random_plans(sizes, budget, floor, 4 if quick else RANDOM_PLANS, seed)
        measured = [true(plan) for plan in plans]
        found[f"{budget} random, floor {floor}"] = mean([accuracy for accuracy, _ in measured])
        for metric, cost in costs.items():
            predicted = [sum(cost[layer][width] for layer, width in plan.bits.items()) for plan in plans]
            key = f"{budget} {metric} spearman, floor {floor}"
            found[key] = spearman(predicted, [value for _, value in measured])
            if metric == "Hessian":
                found[f"{budget} worst predicted, floor {floor}"] = measured[predicted.index(max(predicted))][0]
    return found


def random_plans(sizes: dict[str, int], budget: int, floor: int, count: int, seed: int) -> list[BitPlan]:
    """Return plans within the budget and at most a quarter of a bit below it."""
    widths = [width for width in CANDIDATES if width >= floor]
    chance, plans = random.Random(seed), list[BitPlan]()
    while len(plans) < count:
        plan = BitPlan({layer: chance.choice(widths) for layer in sizes}, sizes)
        if budget - 0.25 <= plan.average_bits <= budget:
            plans.append(plan)
    return plans


def spearman(a: list[float], b: list[float]) -> float:
    ranks = torch.tensor([a, b], dtype=torch.float64).argsort(1).argsort(1).double()
    return torch.corrcoef(ranks)[0, 1].item()


def lenet_rows(runs: list[dict[str, float]]) -> list[Row]:
    rows = [
        Row(
            "LeNet-300-100 in float; the same, trained on for as long as STE and LSQ",
            f"{spread([run['float'] for run in runs], 2)}; {spread([run['float, trained on'] for run in runs], 2)}",
            "95.46 ± 0.63; 95.62",
        )
    ]
    base = mean([run["float"] for run in runs])
    for widths in WIDTHS:
        width, methods = name(widths), METHODS if widths[0] <= 3 else AFTER_TRAINING
        means = [mean([run[f"{width} {method}"] for run in runs]) for method in methods]
        text = ", ".join(spread([run[f"{width} {method}"] for run in runs], 2) for method in methods)
        target, met = "", None
        if widths == (8, 8):
            integer = [mean([run[f"{width} {method}, integer"] for run in runs]) for method in AFTER_TRAINING]
            target = "within 0.2 points of float"
            met = all(abs(value - base) <= 0.2 for value in (*means, *integer))
            text += f"; integer model {integer[0]:.2f}, {integer[1]:.2f}"
        if widths in ORDERED:
            target, met = "min-max <= MSE <= STE <= LSQ", means == sorted(means)
        if widths in LARGEST_LOSS:
            reached = base - means[-1] <= LARGEST_LOSS[widths]
            target += f"{', ' if target else ''}LSQ within {LARGEST_LOSS[widths]} points of float"
            met = reached and met is not False
        named = "min-max, MSE" + (", STE, LSQ" if widths[0] <= 3 else "")
        rows.append(Row(f"{width}: {named}", text, PROTOTYPE[widths], target=target, met=met))
    longer = [[run[f"W2A2 {method}, twice"] for run in runs] for method in ("STE", "LSQ")]
    reached = base - mean(longer[1]) <= LARGEST_LOSS[2, 2]
    rows.append(
        Row(
            f"W2A2, {2 * TUNING_STEPS} steps instead of {TUNING_STEPS}: STE, LSQ",
            ", ".join(spread(values, 2) for values in longer),
            target=f"STE <= LSQ, LSQ within {LARGEST_LOSS[2, 2]} points of float",
            met=reached and mean(longer[0]) <= mean(longer[1]),
        )
    )
    return rows


def plan_rows(kind: str, runs: list[dict[str, Any]]) -> list[Row]:
    def told(key: str) -> str:
        return spread([run[key] for run in runs], 2)

    def average(key: str) -> float:
        return mean([run[key] for run in runs])

    rows = [Row(f"deep {kind} in float, {len(runs)} seeds", told("float"), "94.54")]
    for budget, prototype in ((4, "93.56, 94.08 (floor 2)"), (3, "88.35, 72.07 (floor 2)")):
        keys = ("uniform", *(f"{metric} plan{floor}" for metric in ("Hessian", "KL") for floor in ("", ", floor 2")))
        rows.append(
            Row(
                f"deep {kind}, {budget} bits a weight: uniform; plan by the Hessian with floor 3, with floor 2; by KL "
                "with floor 3, with floor 2",
                ", ".join(told(f"{budget} {key}") for key in keys),
                prototype,
                target="Hessian plan >= uniform" if budget == 4 else "the floor repairs the plan: >= uniform",
                met=average(f"{budget} Hessian plan") >= average(f"{budget} uniform"),
            )
        )
    for budget, floor in RANDOM:
        prototype = "" if floor == 3 else "0.85 ± 0.08; worst of all 38.4" if budget == 4 else "0.75 ± 0.16"
        rows.append(
            Row(
                f"deep {kind}, {RANDOM_PLANS} random plans of {budget} bits a weight, none below {floor}: Spearman's "
                "correlation of the Hessian's cost and the true loss; the same of KL; accuracy on average, of the one "
                "with the largest Hessian cost",
                "; ".join(
                    told(f"{budget} {key}, floor {floor}")
                    for key in ("Hessian spearman", "KL spearman", "random", "worst predicted")
                ),
                prototype,
                target="Hessian >= 0.7",
                met=average(f"{budget} Hessian spearman, floor {floor}") >= 0.7,
            )
        )
    return rows


def measure(quick: bool, runs: Runs) -> list[Row]:
    seeds = range(1 if quick else SEEDS)
    nets = [runs.of(f"LeNet, seed {seed}", functools.partial(lenet_run, seed, quick)) for seed in seeds]
    rows = lenet_rows(nets)
    for kind, (_, count) in DEEP.items():
        calls = [functools.partial(plan_run, kind, seed, quick) for seed in seeds[:count]]
        plans = [runs.of(f"{kind}, seed {seed}", call) for seed, call in enumerate(calls)]
        rows += plan_rows(kind, plans)
    return rows


if __name__ == "__main__":
    main(measure)
