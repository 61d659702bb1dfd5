"""Measure the frame: steps with nothing on, each technique's bookkeeping, start-up."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from measure import QUIET_HF, QUIET_LIGHTNING, Row, Spread, Times, added, cpu_seconds, in_turn, main, python
from speed.bookkeeping import RECIPES, TENSORS, HandedOver, PlainLoop, arithmetic, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_eff
import lightning_eff

WIDTH, BATCH, WARMUP = 32, 8, 50
TARGET_US, BOOKKEEPING_US, IMPORT_SECONDS, HELP_SECONDS = 10.0, 50.0, 0.1, 1.0
# a technique that is on, has its hooks in, and does no work yet
WAITING = {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1.0}}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def median_step(starts: list[float]) -> float:
    """Return the CPU seconds of the median step, from when each one started."""
    return statistics.median(end - start for start, end in pairwise(starts))


class Stopwatch(TrainerCallback):
    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tick()

    def tick(self) -> None:
        self.starts.append(time.process_time())


def hf_step(folder: str, steps: int, plugin: Callable[[Trainer], Any] | None) -> float:
    """Return the seconds of a step in the Hugging Face Trainer."""
    data = [{"inputs": torch.randn(WIDTH), "labels": i % 2} for i in range(64)]
    arguments = TrainingArguments(
        folder,
        max_steps=WARMUP + steps,
        per_device_train_batch_size=BATCH,
        **QUIET_HF,
    )
    watch = Stopwatch()
    trainer = Trainer(model=Classifier(), args=arguments, train_dataset=data, callbacks=[watch])
    if plugin:
        plugin(trainer)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return median_step(watch.starts[WARMUP:])


class TimedModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.watch = Stopwatch()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.watch.tick()


def lightning_step(folder: str, steps: int, callback: Callable[[], pl.Callback] | None) -> float:
    """Return the seconds of a step in Lightning's Trainer."""
    num_examples = BATCH * (WARMUP + steps)
    data = TensorDataset(torch.randn(num_examples, WIDTH), torch.arange(num_examples) % 2)
    trainer = pl.Trainer(
        max_epochs=1,
        default_root_dir=folder,
        **QUIET_LIGHTNING,
        callbacks=[callback()] if callback else [],
    )
    module = TimedModule()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return median_step(module.watch.starts[WARMUP:])


def microseconds(spread: Spread) -> Spread:
    return Spread(1e6 * spread.median, 1e6 * spread.low, 1e6 * spread.high)


def row(where: str, times: Times, name: str, what: str, target: float) -> Row:
    spread = microseconds(added(times, name, "plain"))
    return Row(
        f"{where}: {what}",
        f"{spread.text(1)} µs a step more",
        f"Trainer alone {1e6 * statistics.median(times['plain']):.0f} µs a step",
        target=f"<= {target:.0f} µs",
        met=spread.median <= target,
    )


def steps(folder: str, rounds: int, num_steps: int) -> list[Row]:
    trainers: dict[str, dict[str, Callable[[], float]]] = {
        "Hugging Face Trainer": {
            "plain": partial(hf_step, folder, num_steps, None),
            "off": partial(hf_step, folder, num_steps, lambda trainer: hf_eff.attach(trainer, {})),
            "waiting": partial(hf_step, folder, num_steps, lambda trainer: hf_eff.attach(trainer, WAITING)),
        },
        "Lightning": {
            "plain": partial(lightning_step, folder, num_steps, None),
            "off": partial(lightning_step, folder, num_steps, lambda: lightning_eff.EffCallback({})),
            "waiting": partial(lightning_step, folder, num_steps, lambda: lightning_eff.EffCallback(WAITING)),
        },
    }
    rows = []
    for where, variants in trainers.items():
        times = in_turn(variants, rounds=rounds, seconds=15.0)
        rows.append(row(where, times, "off", "plugin installed, nothing switched on", TARGET_US))
        rows.append(row(where, times, "waiting", "pruning switched on, before its first mask", BOOKKEEPING_US))
    return rows


def bookkeeping(rounds: int, calls: int) -> list[Row]:
    """Measure the verbs of each technique beside what they compute."""
    rows = []
    reads: dict[str, int] = {}
    loops = {key or "an empty session": partial(PlainLoop, key) for key in ("", *RECIPES)}
    loops["an empty session, and the accessors of torch that primary_weights needs"] = HandedOver
    for key, make in loops.items():
        loop, alone = make(), arithmetic(key)
        times: Times = {"verbs": [], "alone": []}
        for _ in range(rounds):
            pairs = [(loop.step(), timed(alone)) for _ in range(calls)]  # by turns, as caches are cold after a step
            for name, values in zip(times, zip(*pairs, strict=True), strict=True):
                times[name].append(statistics.median(values))
        rest, verbs_us = microseconds(added(times, "verbs", "alone")), 1e6 * statistics.median(times["verbs"])
        reads[key] = loop.host_reads()
        rows.append(
            Row(
                f"bookkeeping of {key}, plain loop, {TENSORS} tensors",
                f"{rest.text(0)} µs a step",
                f"its verbs {verbs_us:.0f} µs, of which arithmetic {1e6 * statistics.median(times['alone']):.0f} µs",
                target="" if make is HandedOver else f"<= {BOOKKEEPING_US:.0f} µs",
                met=None if make is HandedOver else rest.median <= BOOKKEEPING_US,
            )
        )
    waiting = ", ".join(f"{key} {count}" for key, count in reads.items() if count)
    found = f"{waiting}; none of the other {sum(not count for count in reads.values())}"
    return [
        *rows,
        Row("times that the verbs of a step wait for the device", found, target="<= 1", met=max(reads.values()) <= 1),
    ]


def import_seconds(statements: tuple[str, ...]) -> list[float]:
    """Return the CPU seconds of imports, one after another, in a process of their own."""
    timed = [f"{statement}; ticks.append(time.process_time())" for statement in statements]
    # no collection of all that torch and a trainer made, .2 s, which falls into any import by chance
    program = "import gc, time; gc.disable(); ticks = [time.process_time()]\n" + "\n".join(timed) + "\nprint(*ticks)"
    # with bytecode, as an installed package has it
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    output = subprocess.run(
        python("-c", program), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    )
    return [end - start for start, end in pairwise(map(float, output.stdout.split()[-len(timed) - 1 :]))]


def imports(rounds: int) -> list[Row]:
    """Measure what our imports take where a user has imported the trainer: differences of programs are all noise."""
    chains = (
        ("from transformers import Trainer, TrainingArguments", "import hf_eff",
         "from hf_eff import EffTrainer, EffTrainingArguments"),
        ("import pytorch_lightning", "import lightning_eff", "from lightning_eff import EffCallback, Pruning"),
    )  # fmt: skip
    rows = []
    for statements in chains:
        import_seconds(statements)  # compiles
        base, *ours = zip(*(import_seconds(statements) for _ in range(rounds)), strict=True)
        summed = [0.0] * rounds
        for statement, seconds in zip(statements[1:], ours, strict=True):
            summed = [before + more for before, more in zip(summed, seconds, strict=True)]
            more = Spread.of(summed)
            rows.append(
                Row(
                    f"start: `{statement}`",
                    f"{more.text()} s more",
                    f"{statements[0]} {statistics.median(base):.2f} s",
                    target=f"<= {IMPORT_SECONDS} s",
                    met=more.median <= IMPORT_SECONDS,
                )
            )
    return rows


def helps(rounds: int) -> list[Row]:
    """Measure what our command takes from start to end; the last two list the options of a technique."""
    eff = str(Path(python()[0]).with_name("eff"))
    programs = {
        command: partial(cpu_seconds, [eff, *command.split()[1:]])
        for command in ("eff --help", "eff prune --help", "eff low-rank --help")
    }
    in_turn(programs, rounds=1)  # compiles
    rows = []
    for name, spent in in_turn(programs, rounds=rounds).items():
        seconds = Spread.of(spent)
        target, met = f"< {HELP_SECONDS:.0f} s", seconds.median < HELP_SECONDS
        rows.append(Row(f"start: `{name}`", f"{seconds.text()} s", target=target, met=met))
    return rows


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        # to make a trainer takes as long as some hundred steps
        rows = steps(folder, rounds=2 if quick else 25, num_steps=100 if quick else 600)
    rows += bookkeeping(rounds=3 if quick else 9, calls=10 if quick else 25)
    return [*rows, *imports(rounds=1 if quick else 3), *helps(rounds=1 if quick else 5)]


if __name__ == "__main__":
    main(measure)
