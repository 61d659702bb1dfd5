"""What averaging the models of a search brings: the best single one, the uniform soup, the greedy soup.

After Wortsman et al. 2022 (arXiv:2203.05482): members are fine-tuned from one start with other learning rates, decays
and batches. The greedy soup is chosen on 200 held-out images by `greedy_soup`; what is reported is measured on test
images that nothing was chosen on, and on the same moved further than any that was trained on. Last, three members with
far too high a learning rate are among them, which a uniform soup does not survive. Learning rates are constant: where
they end at 0, members are so settled that averages gain nothing. Steps and rates were chosen on seeds 100 and 101;
others are reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from digits28 import Batch, View, augment, digits, lenet, validation_digits
from measure import Row
from replicas import Runs, main, mean, spread
from torch import Tensor, nn

from shared_core.soup import greedy_soup, uniform_soup

SEEDS, MEMBERS, WILD = range(8), 16, 3
BATCH, LABELED, COPIES = 64, 300, 6
START_STEPS, STEPS, WILD_STEPS = 600, 300, 600
RATES, WILD_RATE, DECAYS = (5e-4, 1e-3, 1.5e-3, 2e-3), 1e-2, (0.0, 1e-2)
SHIFT = 1.3
"""How much further test images are moved than those of the training."""


def trained(
    start: nn.Module, data: Batch, rate: float, decay: float, steps: int, seed: int, view: View = augment
) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = lenet(0)
    model.load_state_dict(start.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    for chosen in torch.randint(len(data[0]), (steps, BATCH), generator=generator):
        optimizer.zero_grad()
        F.cross_entropy(model(view(data[0][chosen], generator)), data[1][chosen]).backward()
        optimizer.step()
    return model.eval()


def views(data: Batch, strength: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(1_000)
    moved = [augment(data[0], generator, strength) for _ in range(COPIES)]
    return torch.cat(moved), data[1].repeat(COPIES)


class Experiment:
    """The members of one seed and what they are measured on."""

    def __init__(self, made: Iterable[nn.Module], **measured_on: Batch) -> None:
        """Take the members, and the images to choose on and to report, the former first."""
        self.measured_on = measured_on
        self.members: list[dict[str, Tensor]] = [dict(model.state_dict()) for model in made]
        self._model = lenet(0).eval()

    @classmethod
    def on_digits(cls, seed: int, quick: bool) -> Experiment:
        train, test = digits(seed)
        few = train[0][:LABELED], train[1][:LABELED]
        shorten = 20 if quick else 1
        start = trained(lenet(seed), few, 2e-3, 0.0, START_STEPS // shorten, seed)
        search = [(RATES[i % 4], DECAYS[i // 4 % 2], STEPS // shorten) for i in range(MEMBERS)]
        wild = [(WILD_RATE, 0.0, WILD_STEPS // shorten)] * WILD
        made = [trained(start, few, *options, 100 * seed + i) for i, options in enumerate([*search, *wild])]
        return cls(made, chosen_on=views(validation_digits(seed)), test=views(test), shifted=views(test, SHIFT))

    def accuracy(self, weights: dict[str, Tensor], data: Batch) -> float:
        self._model.load_state_dict(weights)
        with torch.no_grad():
            return 100 * (self._model(data[0]).argmax(1) == data[1]).float().mean().item()

    def souped(self, members: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Return the accuracies of the best single member, of the mean member and of both soups."""
        chosen_on = self.measured_on["chosen_on"]
        singles = [self.accuracy(weights, chosen_on) for weights in members]
        best = members[max(range(len(members)), key=singles.__getitem__)]
        greedy = greedy_soup(members, lambda weights: self.accuracy(weights, chosen_on))
        of = {"best": best, "uniform": uniform_soup(members), "greedy": greedy.state_dict}
        found: dict[str, Any] = {"ingredients": len(greedy.ingredients)}
        for where, data in self.measured_on.items():
            found |= {f"{name} {where}": self.accuracy(weights, data) for name, weights in of.items()}
            found[f"mean {where}"] = mean([self.accuracy(weights, data) for weights in members])
        return found


def measure(quick: bool, runs: Runs) -> list[Row]:
    found: dict[str, list[dict[str, Any]]] = {"search": [], "wild": []}
    for seed in list(SEEDS)[: 1 if quick else None]:
        experiment = None
        for name in found:
            if f"{name}, seed {seed}" not in runs:
                experiment = experiment or Experiment.on_digits(seed, quick)
            members = [] if experiment is None else experiment.members[: MEMBERS if name == "search" else None]
            found[name].append(
                runs.of(f"{name}, seed {seed}", lambda e=experiment, m=members: e.souped(m))  # type: ignore[misc]
            )
    return [*rows(found["search"], "16 members", ""), *rows(found["wild"], "with 3 of a far too high rate", "wild")]


def gain(found: list[dict[str, Any]], name: str, over: str, where: str) -> list[float]:
    return [seed[f"{name} {where}"] - seed[f"{over} {where}"] for seed in found]


def rows(found: list[dict[str, Any]], who: str, kind: str) -> list[Row]:
    """Return one row a data set: all four accuracies, and what greedy gains."""
    prototypes = {
        "": {
            "chosen_on": "86.52; greedy 86.85",
            "test": "86.34; 85.62; 86.15; 86.67",
            "shifted": "70.22; -; 70.72; 71.49",
        },
        "wild": {"chosen_on": "", "test": "86.34; -; 83.85; 86.69", "shifted": ""},
    }[kind]
    rows = []
    for where, what in (("chosen_on", "images chosen on"), ("test", "test images"), ("shifted", "moved further")):
        values = "; ".join(
            spread([seed[f"{name} {where}"] for seed in found], 2) for name in ("best", "mean", "uniform", "greedy")
        )
        over, beyond = gain(found, "greedy", "best", where), gain(found, "greedy", "uniform", where)
        ours = f"{values} (over best {mean(over):+.2f}, over uniform {mean(beyond):+.2f})"
        target, met = "", None
        if where == "chosen_on":
            target, met = "never below the best", min(over) >= 0
        elif kind == "wild" and where == "test":
            target, met = "over uniform >= +2.0", mean(beyond) >= 2.0
        elif not kind:
            least = 0.1 if where == "test" else 0.8
            target, met = f"over best >= +{least}", mean(over) >= least
        if where == "chosen_on":
            what += f", {mean([seed['ingredients'] for seed in found]):.1f} ingredients"
        rows.append(Row(f"{who}, {what}: best; mean; uniform; greedy", ours, prototypes[where], target=target, met=met))
    return rows


if __name__ == "__main__":
    main(measure)
