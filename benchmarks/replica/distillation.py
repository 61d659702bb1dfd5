"""What a teacher's probabilities carry: digits that the student never saw, labels it was not given, and where they end.

After Hinton, Vinyals and Dean 2015 (arXiv:1503.02531), section 3: a student whose transfer set lacks a digit, or holds
two digits only, still knows the others, once the biases of the missing or the only classes are moved. There they are
moved to what is best on the test set; here to where as large a share of 200 held-out images falls into these classes as
belongs to them. Then few labels: six augmented copies of each image, made once, since a student that sees new images in
every batch hardly overfits its labels, which a row of its own shows. Last, students too small for all labels. All
students of a seed and a row have the same start, batches, steps and rates. Temperatures, copies and the number of steps
were chosen on seeds 100 to 102; others are reported.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from digits28 import Batch, augment, digits, lenet, validation_digits
from measure import Row
from replicas import Runs, main, mean, spread
from torch import Tensor, nn

from shared_core import Recipe, Session

SEEDS, BATCH, LEARNING_RATE = range(4), 64, 2e-3
STEPS, TEACHER_STEPS, SMALL_STEPS = 1500, 2500, 3000
AUGMENTATIONS = COPIES = 6
LABELED, WIDTH, SMALL = 250, 64, (30, 12)
TRANSFER = {"no 3": ([0, 1, 2, 4, 5, 6, 7, 8, 9], [3]), "only 7 and 8": ([7, 8], [7, 8])}
"""The digits that the student sees, and those whose biases are moved."""
TRANSFER_TEMPERATURE, TEMPERATURES = 8.0, (1.0, 2.0, 4.0, 8.0)
JUDGED = 4.0  # of few labels: the temperature of the prototype's paired gain
ALPHA = 0.1  # of the labels, where there are both


class Experiment:
    """The students of one seed, and their teacher."""

    def __init__(self, seed: int, quick: bool) -> None:
        self.seed, self.quick = seed, quick
        self.train, self.test = digits(seed)[0], augmented(digits(seed)[1])
        self.held_out = augmented(validation_digits(seed))

    @functools.cached_property
    def teacher(self) -> nn.Module:
        return self.taught(lenet(self.seed), self.train, {}, TEACHER_STEPS, anew=True)

    def taught(self, model: nn.Module, data: Batch, recipe: dict[str, Any], steps: int, anew: bool) -> nn.Module:
        """Train a model on batches drawn from the data, images augmented anew or taken as they are; return it."""
        steps = 20 if self.quick else steps
        generator = torch.Generator().manual_seed(self.seed + 1)
        session = Session(Recipe.from_dict({"distill": recipe} if recipe else {}), seed=self.seed)
        session.attach(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        session.begin([optimizer], total_steps=steps, clips_gradients=False)
        for chosen in torch.randint(len(data[0]), (steps, BATCH), generator=generator):
            images, labels = data[0][chosen], data[1][chosen]
            optimizer.zero_grad()
            # images without a label, -100, have no task loss; the teacher judges them all the same
            task = F.cross_entropy(model(augment(images, generator) if anew else images), labels)
            session.loss(task).backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            schedule.step()
        session.finish()
        return model.eval()

    def distilled(self, temperature: float | None, alpha: float) -> dict[str, Any]:
        """Return the recipe; without a temperature, labels alone teach."""
        return {} if temperature is None else {"teacher": self.teacher, "temperature": temperature, "alpha": alpha}

    def transfer(self, name: str, temperature: float | None) -> dict[str, Any]:
        """Return the accuracies of a LeNet that saw some digits only, before and after its biases are moved."""
        seen, moved = TRANSFER[name]
        kept = torch.isin(self.train[1], torch.tensor(seen))
        data = self.train[0][kept], self.train[1][kept]
        student = self.taught(lenet(self.seed + 1000), data, self.distilled(temperature, 0.0), TEACHER_STEPS, anew=True)
        with torch.no_grad():
            logits, held_out, labels = student(self.test[0]), student(self.held_out[0]), self.test[1]
        bias = balancing_bias(held_out, moved, torch.isin(self.held_out[1], torch.tensor(moved)).float().mean().item())
        fixed, three = logits.clone(), labels == 3
        fixed[:, moved] += bias
        return {
            "accuracy": right(logits, labels),
            "on 3": right(logits[three], labels[three]),
            "bias": bias,
            "fixed": right(fixed, labels),
            "fixed on 3": right(fixed[three], labels[three]),
        }

    def few_labels(self, temperature: float | None, images: int, labeled: int, anew: bool) -> dict[str, Any]:
        """Return the accuracy of a student with so many of the images, so many of them labeled."""
        labels = self.train[1][:images].clone()
        labels[labeled:] = -100
        data = self.train[0][:images], labels
        if not anew:
            generator = torch.Generator().manual_seed(self.seed)
            data = torch.cat([augment(data[0], generator) for _ in range(COPIES)]), labels.repeat(COPIES)
        return self.student(WIDTH, data, temperature, STEPS, anew)

    def small(self, width: int, temperature: float | None) -> dict[str, Any]:
        """Return the accuracy of a small student with all labels."""
        return self.student(width, self.train, temperature, SMALL_STEPS, anew=True)

    def student(self, width: int, data: Batch, temperature: float | None, steps: int, anew: bool) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
        return self.judged(self.taught(model, data, self.distilled(temperature, ALPHA), steps, anew))

    @torch.no_grad()
    def judged(self, model: nn.Module) -> dict[str, Any]:
        logits, labels = model(self.test[0]), self.test[1]
        return {"accuracy": right(logits, labels), "on 3": right(logits[labels == 3], labels[labels == 3])}


def augmented(data: Batch) -> Batch:
    generator = torch.Generator().manual_seed(1_000)
    return torch.cat([augment(data[0], generator) for _ in range(AUGMENTATIONS)]), data[1].repeat(AUGMENTATIONS)


def right(logits: Tensor, labels: Tensor) -> float:
    return 100 * (logits.argmax(1) == labels).float().mean().item()


def balancing_bias(logits: Tensor, classes: Sequence[int], share: float) -> float:
    """Return what to add to the logits of the classes for such a share of the rows to fall into them."""
    among = torch.isin(torch.arange(logits.shape[1]), torch.tensor(classes))
    return torch.quantile(logits[:, ~among].amax(1) - logits[:, among].amax(1), share).item()


Found = dict[str, list[dict[str, Any]]]
"""The results of each run's name, seed by seed."""


def named(name: str, temperature: float | None) -> str:
    return f"{name}, labels alone" if temperature is None else f"{name}, T = {temperature:g}"


def plan() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return the method of `Experiment` and its arguments by the name of the run."""
    found: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for name in TRANSFER:
        for temperature in (None, TRANSFER_TEMPERATURE):
            found[named(name, temperature)] = "transfer", (name, temperature)
    every = len(digits(0)[0][0])
    for temperature in (None, *TEMPERATURES):
        found[named("few", temperature)] = "few_labels", (temperature, LABELED, LABELED, False)
    for regime, anew in (("unlabeled", False), ("unlabeled, anew", True)):
        found[named(regime, JUDGED)] = "few_labels", (JUDGED, every, LABELED, anew)
    found["all labels"] = "few_labels", (None, every, every, False)
    for temperature in (None, JUDGED):
        found[named("few, anew", temperature)] = "few_labels", (temperature, LABELED, LABELED, True)
    for width in SMALL:
        for temperature in (None, 2.0, JUDGED):
            found[named(f"width {width}", temperature)] = "small", (width, temperature)
    return found


def values(found: Found, name: str, key: str = "accuracy") -> list[float]:
    return [result[key] for result in found[name]]


def gains(found: Found, name: str, base: str) -> list[float]:
    return [mine - theirs for mine, theirs in zip(values(found, name), values(found, base), strict=True)]


def told(found: Found, names: Sequence[str], base: str) -> str:
    """Return accuracies, the first alone, each other with its gain over `base`, seed by seed."""
    return ", ".join(
        spread(values(found, name), 2)
        + (f" ({'+' * (mean(gains(found, name, base)) >= 0)}{spread(gains(found, name, base), 2)})" * (name != base))
        for name in names
    )


def transfer_rows(found: Found) -> list[Row]:
    """Return what a student knows of digits that it never saw."""
    rows = []
    prototypes = {
        "no 3": ("0.0", "63.1 ± 6.3, bias +3.4, 91.3 ± 1.0, 92.6"),
        "only 7 and 8": ("19.4", "41.8 ± 2.3, 74.7 ± 1.7"),
    }
    for name, keys, least in (("no 3", ("on 3", "fixed on 3"), 88.0), ("only 7 and 8", ("accuracy", "fixed"), 70.0)):
        data, of = ("without 3s", "3s") if name == "no 3" else ("of 7s and 8s alone", "all digits")
        biases = "bias of 3" if name == "no 3" else "biases of 7 and 8"
        for temperature in (None, TRANSFER_TEMPERATURE):
            run = named(name, temperature)
            before, after = (values(found, run, key) for key in keys)
            ours = f"{spread(before)}; {spread(after)} by {mean(values(found, run, 'bias')):+.1f}"
            if name == "no 3":
                ours += f", {spread(values(found, run, 'fixed'))} on all digits"
            target, met = "", None
            if temperature is not None:
                target, met = f"moved: >= {least:g}", mean(after) >= least
            elif name == "no 3":
                target, met = "0", not any(before)
            how = "labels alone" if temperature is None else f"distilled at T = {temperature:g}"
            rows.append(
                Row(
                    f"transfer set {data}, {how}: accuracy on {of}; after the {biases} moved",
                    ours,
                    prototypes[name][temperature is not None],
                    target=target,
                    met=met,
                )
            )
    return rows


def measure(quick: bool, runs: Runs) -> list[Row]:
    seeds = SEEDS[:1] if quick else SEEDS
    found: Found = {name: [] for name in ("teacher", *plan())}
    for seed in seeds:
        made = functools.cache(functools.partial(Experiment, seed, quick))
        found["teacher"].append(runs.of(f"teacher, seed {seed}", lambda made=made: made().judged(made().teacher)))
        for name, (method, arguments) in plan().items():
            run = lambda made=made, method=method, arguments=arguments: getattr(made(), method)(*arguments)  # noqa: E731
            found[name].append(runs.of(f"{name}, seed {seed}", run))
    few, unlabeled = named("few", None), named("unlabeled", JUDGED)
    judged = named("few", JUDGED)
    rows = [
        Row(
            "teacher: LeNet-300-100, all labels; on 3s alone",
            f"{spread(values(found, 'teacher'), 2)}; {spread(values(found, 'teacher', 'on 3'))}",
            "96.4",
        ),
        *transfer_rows(found),
    ]
    rows += [
        Row(
            f"784-{WIDTH}-10, {LABELED} labels; in brackets here and below: points gained, seed by seed",
            told(found, [few], few),
            "75.31 ± 1.0",
        ),
        Row(
            f"the same images with the teacher, T = {', '.join(f'{temperature:g}' for temperature in TEMPERATURES)}",
            told(found, [named("few", temperature) for temperature in TEMPERATURES], few),
            "77.2, 78.4, 79.4 (+4.10 ± 0.52), 80.2 ± 0.8",
            target=f"at T = {JUDGED:g}: >= +3.0",
            met=mean(gains(found, judged, few)) >= 3.0,
        ),
        Row(
            "the teacher on 947 unlabeled images as well; all 1197 labels and no teacher",
            told(found, [unlabeled, "all labels"], few),
            "83.55 ± 0.83 (+8.24 ± 1.5), 83.56",
            target=">= +6.0",
            met=mean(gains(found, unlabeled, few)) >= 6.0,
        ),
    ]
    anew = named("few, anew", None)
    rows.append(
        Row(
            f"images augmented anew in every batch: {LABELED} labels; with the teacher; on the unlabeled images too",
            told(found, [anew, named("few, anew", JUDGED), named("unlabeled, anew", JUDGED)], anew),
        )
    )
    for width, prototype in zip(SMALL, ("82.4; 82.4 to 82.7", "75.5; 74.7 to 77.9"), strict=True):
        names = [named(f"width {width}", temperature) for temperature in (None, 2.0, JUDGED)]
        rows.append(
            Row(
                f"784-{width}-10, all labels, {SMALL_STEPS} steps: labels alone; with the teacher at T = 2, {JUDGED:g}",
                told(found, names, names[0]),
                prototype,
            )
        )
    return rows


if __name__ == "__main__":
    main(measure)
