"""What the frame adds: to steps with nothing on, as each technique's bookkeeping, at start-up."""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
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
from bookkeeping import RECIPES, TENSORS, PlainLoop, arithmetic, timed
from measure import QUIET_HF, QUIET_LIGHTNING, Row, Spread, Times, added, cpu_seconds, in_turn, main, python
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_eff
import lightning_eff

WIDTH, BATCH, WARMUP = 32, 8, 50
TARGET_US, BOOKKEEPING_US, IMPORT_SECONDS, HELP_SECONDS = 10.0, 50.0, 0.3, 1.0
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
        in_turn(variants, rounds=1)
        times = in_turn(variants, rounds=rounds)
        rows.append(row(where, times, "off", "plugin installed, nothing switched on", TARGET_US))
        rows.append(row(where, times, "waiting", "pruning switched on, before its first mask", BOOKKEEPING_US))
    return rows


def bookkeeping(rounds: int, calls: int) -> list[Row]:
    """Measure the verbs of each technique beside what they compute."""
    rows = []
    reads: dict[str, int] = {}
    for key in ("", *RECIPES):
        loop, alone = PlainLoop(key), arithmetic(key)
        times: Times = {"verbs": [], "alone": []}
        for _ in range(rounds):
            pairs = [(loop.step(), timed(alone)) for _ in range(calls)]  # by turns, as caches are cold after a step
            for name, values in zip(times, zip(*pairs, strict=True), strict=True):
                times[name].append(statistics.median(values))
        rest, verbs_us = microseconds(added(times, "verbs", "alone")), 1e6 * statistics.median(times["verbs"])
        reads[key] = loop.host_reads()
        rows.append(
            Row(
                f"bookkeeping of {key or 'an empty session'}, plain loop, {TENSORS} tensors",
                f"{rest.text(0)} µs a step",
                f"its verbs {verbs_us:.0f} µs, of which arithmetic {1e6 * statistics.median(times['alone']):.0f} µs",
                target=f"<= {BOOKKEEPING_US:.0f} µs",
                met=rest.median <= BOOKKEEPING_US,
            )
        )
    waiting = ", ".join(f"{key} {count}" for key, count in reads.items() if count)
    found = f"{waiting}; none of the other {sum(not count for count in reads.values())}"
    return [
        *rows,
        Row("times that the verbs of a step wait for the device", found, target="<= 1", met=max(reads.values()) <= 1),
    ]


def starts(rounds: int) -> list[Row]:
    """Measure what programs take from start to end, in CPU time."""
    eff = str(Path(python()[0]).with_name("eff"))
    trainer, lightning = "from transformers import Trainer, TrainingArguments", "import pytorch_lightning"
    commands = {
        trainer: python("-c", trainer),
        "import hf_eff": python("-c", f"{trainer}; import hf_eff"),
        "hf_eff's trainer and arguments": python(
            "-c", f"{trainer}; from hf_eff import EffTrainer, EffTrainingArguments"
        ),
        lightning: python("-c", lightning),
        "import lightning_eff": python("-c", f"{lightning}; import lightning_eff"),
        "lightning_eff's callbacks": python("-c", f"{lightning}; from lightning_eff import EffCallback, Pruning"),
        "eff --help": [eff, "--help"],
        "eff prune --help": [eff, "prune", "--help"],  # these two list the options of a technique
        "eff low-rank --help": [eff, "low-rank", "--help"],
    }
    programs = {name: partial(cpu_seconds, command) for name, command in commands.items()}
    in_turn(programs, rounds=1)  # compiles
    times = in_turn(programs, rounds=rounds)
    rows = []
    for name, spent in times.items():
        seconds = statistics.median(spent)
        base = trainer if "hf_eff" in name else lightning if "lightning_eff" in name else ""
        if base:
            more = added(times, name, base)
            told, peer = f"{more.text()} s more", f"{base} {statistics.median(times[base]):.2f} s"
            rows.append(
                Row(f"start: {name}", told, peer, target=f"<= {IMPORT_SECONDS} s", met=more.median <= IMPORT_SECONDS)
            )
        elif name.startswith("eff"):
            met = seconds < HELP_SECONDS
            rows.append(Row(f"start: `{name}`", f"{seconds:.2f} s", target=f"< {HELP_SECONDS:.0f} s", met=met))
    return rows


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        rows = steps(folder, rounds=2 if quick else 25, num_steps=100 if quick else 400)
    rows += bookkeeping(rounds=3 if quick else 15, calls=10 if quick else 50)
    return [*rows, *starts(rounds=1 if quick else 5)]


if __name__ == "__main__":
    main(measure)
