"""LeNets with weights and inputs of 8, 4, 3 and 2 bits on MNIST by LSQ (Esser et al. 2020, arXiv:1902.08153).

As in the paper: training starts from the trained float network and learns scales with the weights, and LeNet-5 has 8
bits in its first and last layer. In LeNet-300-100, whose first layer holds nine weights of ten, all layers have the
same bits. Weights have a scale per output channel, inputs one. Every width trains for as long; in the paper 8 bits have
one epoch and the others 90. The paper's images are ImageNet's; what can be compared is how a width changes the number
of errors: ResNet-18 has 29.5 % in float and 28.9, 28.9, 29.8 and 32.4 % at 8, 4, 3 and 2 bits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from digits28 import Batch
from mnist import Drawn, errors, lenet5, mlp, train
from replicas import Published, Runs, mean, published, reaches, spread
from torch import nn

SEEDS, BATCH, DROPOUT, RATE, DECAY, TUNING_RATE = 3, 128, 0.2, 1e-3, 0.05, 2e-3
FLOAT, WIDTHS = 29.5, {8: 28.9, 4: 28.9, 3: 29.8, 2: 32.4}  # the paper's errors in %
EIGHT_BITS = [f"{place}:{option}=8" for place in ("first", "last") for option in ("weight_bits", "activation_bits")]


@dataclass(frozen=True)
class Net:
    """How a network is trained in float and then at each width."""

    build: Callable[[int], nn.Sequential]
    epochs: int
    tuning_epochs: int
    overrides: list[str]


NETS = {
    "LeNet-300-100": Net(lambda seed: mlp(seed, 300, 100, dropout=DROPOUT), 6, 5, []),
    "LeNet-5, first and last layer of 8 bits": Net(lambda seed: lenet5(seed, dropout=DROPOUT), 5, 3, EIGHT_BITS),
}


def run(net: Net, seed: int, data: tuple[Batch, Batch], quick: bool) -> dict[str, Any]:
    """Return the errors of the float network, of the same trained on, and of each width."""
    images, test = data

    def drawn(epochs: int, order: int) -> Drawn:
        return Drawn(images, 10 if quick else epochs * len(images[0]) // BATCH, BATCH, order)

    model = train(net.build(seed), drawn(net.epochs, seed), rate=RATE, decay=DECAY)

    def tuned(recipe: dict[str, Any]) -> int:
        batches = drawn(net.tuning_epochs, 100 + seed)
        return errors(train(copy.deepcopy(model), batches, rate=TUNING_RATE, recipe=recipe), test)

    found = {"float": errors(model, test), "float, trained on": tuned({})}
    for bits in WIDTHS:
        widths = {"weight_bits": bits, "activation_bits": bits, "overrides": net.overrides}
        found[f"{bits} bits"] = tuned({"qat": {"scheme": "int8", "range": "lsq", **widths}})
    return found


def rows(title: str, net: Net, found: list[dict[str, Any]], share: float) -> list[Published]:
    def told(name: str) -> str:
        return f"{spread([share * one[name] for one in found], 2)} %"

    made = [Published(f"{title}: error in float; trained on for as long as with LSQ", f"{FLOAT} %",
                      f"{told('float')}; {told('float, trained on')}",
                      f"the paper's is ResNet-18 on ImageNet; here {net.epochs} epochs and {net.tuning_epochs} more")
            ]  # fmt: skip
    for bits, paper in WIDTHS.items():
        name, published_times = f"{bits} bits", round(paper / FLOAT, 2)
        times = [one[name] / one["float"] for one in found]
        points = mean([share * (one["float"] - one[name]) for one in found])
        made.append(
            Published(f"{name}: errors, of those in float", f"{published_times:.2f} times", f"{spread(times, 2)} times",
                      f"{told(name)}, {points:+.2f} points of accuracy; the paper's {FLOAT - paper:+.1f}",
                      reaches(times, published_times, lower=True))
        )  # fmt: skip
    return made


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    made = []
    for title, net in NETS.items():
        found = runs.seeds(1 if quick else SEEDS, functools.partial(run, net, data=data, quick=quick), title)
        made += rows(title, net, found, 100 / len(data[1][0]))
    return made


if __name__ == "__main__":
    published(measure)
