"""Whole training steps in both trainers, with each technique and without: time, and peak memory.

Scikit-learn's digits are fine-tuned on: as sequences of 64 gray values by a small BERT in the Hugging Face Trainer, at
28x28 by LeNet-300-100 in Lightning. Left out is what a CPU only emulates (fp8, matmul), what needs fp16 or several
processes (loss_scale, comm), what changes what is sampled (dp), and what works after training (soup).
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from digits28 import digits, lenet
from measure import MIB, QUIET_HF, QUIET_LIGHTNING, Row, in_turn, main, milliseconds, peak_allocated, ratio
from sklearn.datasets import load_digits
from speed.overhead import Stopwatch, median_step
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hf_eff
import lightning_eff

BATCH, WARMUP = 16, 6
BF16 = "bf16"
Recipe = Mapping[str, Mapping[str, Any]]
AT_ONCE = {"sparsity": 0.5, "schedule": "one_shot", "begin": 0}
VARIANTS: dict[str, Recipe] = {
    "plain": {},
    "prune": {"prune": AT_ONCE},
    "prune, 2:4 with SR-STE": {"prune": {**AT_ONCE, "granularity": "n_m", "sr_ste": 2e-4}},
    "cluster": {"cluster": {"bits": 4, "begin": 1}},
    "low_rank": {"low_rank": {"rank": 16, "force": True}},
    "lora": {"lora": {"rank": 8, "base": "none"}},
    "qat": {"qat": {"scheme": "int8", "begin": 0}},
    "distill": {"distill": {"temperature": 2.0}},
    "average": {"average": {"kind": "ema"}},
    "activations": {"activations": {"pack": "int8"}},
    "checkpointing": {"checkpointing": {"policy": "block"}},
    f"plain, {BF16}": {},
    f"primary_weights, {BF16}": {"primary_weights": {"kind": "fp32_copy"}},
}


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=17,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=192,
            max_position_embeddings=64,
            num_labels=10,
        )
    )


def prepared(name: str, make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and the recipe of a variant; it is taught by a model of its own kind."""
    recipe: dict[str, Any] = {key: dict(options) for key, options in VARIANTS[name].items()}
    if "distill" in recipe:
        recipe["distill"]["teacher"] = make()
    return make().to(torch.bfloat16 if BF16 in name else torch.float32), recipe


def hf_step(folder: str, data: list[dict[str, Any]], steps: int, name: str) -> float:
    """Return the CPU seconds of a step in the Hugging Face Trainer."""
    model, recipe = prepared(name, bert)
    arguments = TrainingArguments(
        folder,
        max_steps=WARMUP + steps,
        per_device_train_batch_size=BATCH,
        **QUIET_HF,
    )
    watch = Stopwatch()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[watch])
    hf_eff.attach(trainer, recipe)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return median_step(watch.starts[WARMUP:])


class TimedModule(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.watch = Stopwatch()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images = batch[0].to(next(self.model.parameters()).dtype)
        return nn.functional.cross_entropy(self(images).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.watch.tick()


def lightning_step(folder: str, data: TensorDataset, steps: int, name: str) -> float:
    """Return the CPU seconds of a step in Lightning's Trainer."""
    model, recipe = prepared(name, partial(lenet, 0))
    if "distill" in recipe:
        recipe["distill"] = {**recipe["distill"], "student": "model"}
    trainer = pl.Trainer(
        max_steps=WARMUP + steps,
        default_root_dir=folder,
        **QUIET_LIGHTNING,
        callbacks=[lightning_eff.EffCallback(recipe)],
    )
    module = TimedModule(model)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=True))
    return median_step(module.watch.starts[WARMUP:])


def rows(where: str, step: Callable[[int, str], float], *, rounds: int, steps: int) -> list[Row]:
    step(2, "plain")  # what torch makes once is no variant's
    peaks = {name: peak_allocated(partial(step, 2, name)) / MIB for name in VARIANTS}
    times = in_turn({name: partial(step, steps, name) for name in VARIANTS}, rounds=rounds)
    found = []
    for name in VARIANTS:
        base = f"plain, {BF16}" if BF16 in name else "plain"
        if name != base:
            found.append(
                Row(
                    f"{where}: {name}",
                    f"{milliseconds(times, name)} a step",
                    f"{base} {milliseconds(times, base)}",
                    f"{ratio(times, name, base).text()}",
                    f"peak {peaks[name]:.1f} MiB, {base} {peaks[base]:.1f} MiB",
                )
            )
    return found


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    pixels = load_digits()
    sequences = [
        {"input_ids": torch.tensor(image, dtype=torch.int64), "labels": int(label)}
        for image, label in zip(pixels.data, pixels.target, strict=True)
    ]
    size = {"rounds": 1 if quick else 5, "steps": 4 if quick else 16}
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        in_bert = rows("BERT, Hugging Face Trainer", partial(hf_step, folder, sequences), **size)
        images = TensorDataset(*digits(0)[0])
        return in_bert + rows("LeNet, Lightning", partial(lightning_step, folder, images), **size)


if __name__ == "__main__":
    main(measure)
