"""What the plugin adds to a training step of either trainer with nothing switched on, and to start-up."""

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
from measure import Row, Spread, Times, added, cpu_seconds, in_turn, main, python
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_eff
import lightning_eff

WIDTH, BATCH, WARMUP = 32, 8, 50
TARGET_US = 10.0
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
    """Return the CPU seconds of the median step, from when each one started, the first ones left out."""
    return statistics.median(end - start for start, end in pairwise(starts[WARMUP:]))


class Stopwatch(TrainerCallback):
    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.starts.append(time.process_time())


def hf_step(folder: str, steps: int, plugin: Callable[[Trainer], Any] | None) -> float:
    """Return the seconds of a step in the Hugging Face Trainer."""
    data = [{"inputs": torch.randn(WIDTH), "labels": i % 2} for i in range(64)]
    arguments = TrainingArguments(
        folder,
        max_steps=WARMUP + steps,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    watch = Stopwatch()
    trainer = Trainer(model=Classifier(), args=arguments, train_dataset=data, callbacks=[watch])
    if plugin:
        plugin(trainer)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return median_step(watch.starts)


class TimedModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.starts: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts.append(time.process_time())


def lightning_step(folder: str, steps: int, callback: Callable[[], pl.Callback] | None) -> float:
    """Return the seconds of a step in Lightning's Trainer."""
    num_examples = BATCH * (WARMUP + steps)
    data = TensorDataset(torch.randn(num_examples, WIDTH), torch.arange(num_examples) % 2)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback()] if callback else [],
    )
    module = TimedModule()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return median_step(module.starts)


def row(where: str, times: Times, name: str, what: str, target: float | None) -> Row:
    spread = added(times, name, "plain")
    spread = Spread(1e6 * spread.median, 1e6 * spread.low, 1e6 * spread.high)
    return Row(
        f"{where}: {what}",
        f"{spread.text(1)} µs a step more",
        f"Trainer alone {1e6 * statistics.median(times['plain']):.0f} µs a step",
        target="" if target is None else f"<= {target:.0f} µs",
        met=None if target is None else spread.median <= target,
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
        rows.append(row(where, times, "waiting", "pruning switched on, before its first mask", None))
    return rows


def starts(rounds: int) -> list[Row]:
    """Measure what programs take from start to end, in CPU time."""
    eff = str(Path(python()[0]).with_name("eff"))
    commands = {
        "torch": python("-c", "import torch"),
        "transformers": python("-c", "from transformers import Trainer, TrainingArguments"),
        "hf_eff": python("-c", "from hf_eff import EffTrainer, EffTrainingArguments"),
        "help": [eff, "--help"],
    }
    times = in_turn({name: partial(cpu_seconds, command) for name, command in commands.items()}, rounds=rounds)
    more = added(times, "hf_eff", "transformers")
    return [
        Row(
            "start: import of hf_eff's trainer and arguments",
            f"{statistics.median(times['hf_eff']):.2f} s, {more.text()} s more than the peer",
            f"the same of transformers {statistics.median(times['transformers']):.2f} s",
        ),
        Row(
            "start: `eff --help`",
            f"{statistics.median(times['help']):.2f} s",
            f"import torch {statistics.median(times['torch']):.2f} s",
        ),
    ]


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        rows = steps(folder, rounds=2 if quick else 25, num_steps=100 if quick else 400)
    return [*rows, *starts(rounds=1 if quick else 3)]


if __name__ == "__main__":
    main(measure)
