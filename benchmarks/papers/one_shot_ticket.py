"""One-shot tickets of LeNet-300-100 on MNIST (Frankle and Carbin 2019, arXiv:1803.03635, section 2, figure 4c).

As `lottery_ticket`, with one round that prunes 80 % of the hidden layers and 40 % of the output layer: a tenth of the
time of the iterative search. The paper's one-shot tickets stop earlier than the dense net with 67.5 to 17.6 % of the
weights and are more accurate with 95 to 5.17 %.
"""

from __future__ import annotations

import functools
import math

from digits28 import Batch
from papers.lottery_ticket import dense_row, earlier, exact_row, gains, run, told, values
from replicas import Published, Runs, mean, published, reaches, spread

SEEDS, ITERATIONS, RATE = 3, 5000, 0.8


def measure(data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
    iterations = 20 if quick else ITERATIONS
    search = functools.partial(run, data=data, iterations=iterations, rounds=1, controlled=1, rate=RATE)
    found = runs.seeds(1 if quick else SEEDS, search)
    dense, ticket, control = "0 none", "1 none", "1 random_reinit"
    left = f"{mean(values(found, f'{ticket} left')):.1f} %"
    gain, sooner = gains(found, ticket, dense), earlier(found, ticket, dense)
    reached = [one[f"{ticket} reached"] or math.inf for one in found]  # never
    over, before = gains(found, ticket, control), earlier(found, ticket, control)
    return [
        dense_row(found, iterations),
        Published(f"ticket of {left}: points above dense", "above 0", spread(gain, 2), told(found, ticket),
                  reaches(gain, 0)),
        Published(f"ticket of {left}: early stopping comes earlier by", "above 0 %", f"{spread(sooner, 0)} %",
                  f"it reaches the dense net's smallest loss at iteration {mean(reached):.0f}", reaches(sooner, 0)),
        Published(f"ticket of {left} beside its re-initialization: points above it; early stopping earlier by",
                  "above 0; above 0 %", f"{spread(over, 2)}; {spread(before, 0)} %",
                  f"re-initialized: {told(found, control)}", reaches(over, 0) and reaches(before, 0)),
        exact_row(found, 1),
    ]  # fmt: skip


if __name__ == "__main__":
    published(measure)
