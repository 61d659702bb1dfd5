"""One optimizer step of a small language model in each front end, on micro-batches as they are given."""

import copy
import math

import torch
from lightning_world import make_trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shared_core import training

VOCABULARY = 24


def llama(seed, layers=2, kind=LlamaForCausalLM, config=LlamaConfig, **options):
    """Return a decoder that asks for a key-value cache, as transformers' defaults do."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(
        config(
            vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=64, initializer_range=0.2,
            bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes | options,
        )
    )  # fmt: skip


def documents(count=6):
    """Return token ids of documents of unlike lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(rows, side="right"):
    """Return a batch of documents with a row each."""
    width = max(map(len, rows))

    def column(values, filler):
        fill = [[filler] * (width - len(value)) for value in values]
        joined = (f + v if side == "left" else v + f for v, f in zip(values, fill, strict=True))
        return torch.tensor(list(joined))

    return {
        "input_ids": column(rows, 0), "labels": column(rows, -100),
        "attention_mask": column([[1] * len(row) for row in rows], 0),
    }  # fmt: skip


def packed(rows):
    """Return the documents in one row, told apart by their positions, as `DataCollatorWithFlattening` does."""
    labels = [[-100, *row[1:]] for row in rows]
    columns = {"input_ids": rows, "labels": labels, "position_ids": [range(len(row)) for row in rows]}
    return {name: torch.tensor([[value for row in column for value in row]]) for name, column in columns.items()}


def cut(rows, size, collate):
    """Return micro-batches of so many documents."""
    return [collate(rows[start : start + size]) for start in range(0, len(rows), size)]


class Kept(torch.optim.SGD):
    """Keeps the gradients of its latest step."""

    def __init__(self, model, **options):
        super().__init__(model.parameters(), lr=1e-3, **options)
        self._names = dict(model.named_parameters())

    def step(self, closure=None):
        loss = super().step(closure)
        self.gradients = {name: value.grad.clone() for name, value in self._names.items() if value.grad is not None}
        return loss


def bare(model, recipe, window, folder):
    optimizer = Kept(model)
    model.train()
    with training(recipe, model, optimizer, total_steps=1, accumulate=len(window)) as loop:
        for batch in window:
            with loop.forward():
                loss = model(**batch).loss
            loop.backward(loss / len(window))
        loop.step()
        figures = loop.session.figures()
    return optimizer.gradients, figures


def hf(model, recipe, window, folder):
    from hf_eff import attach

    arguments = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=len(window), seed=0,
        max_grad_norm=0, report_to=[], save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False, train_sampling_strategy="sequential", lr_scheduler_type="constant",
    )  # fmt: skip
    optimizer = Kept(model)
    trainer = Trainer(
        model, arguments, train_dataset=window, data_collator=lambda rows: rows[0], optimizers=(optimizer, None)
    )
    if recipe:
        attach(trainer, recipe)
    trainer.train()
    figures = {name: value for entry in trainer.state.log_history for name, value in entry.items() if "/" in name}
    return optimizer.gradients, figures


def lightning(model, recipe, window, folder):
    import pytorch_lightning as pl

    from lightning_eff import EffCallback

    optimizer, model = Kept(model), model.train()

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, **batch):
            return self.net(**batch)

        def training_step(self, batch, index):
            return (self if whole else self.net)(**batch).loss

        def configure_optimizers(self):
            return optimizer

    recipe = {key: dict(options) for key, options in recipe.items()}
    whole = "distill" in recipe and recipe["distill"].setdefault("student", "net") is None
    callbacks = [EffCallback(recipe)] if recipe else []
    options = {"max_steps": 1, "accumulate_grad_batches": len(window), "log_every_n_steps": 1}
    trainer = make_trainer(folder, callbacks=callbacks, **options)
    trainer.fit(Module(), DataLoader(window, batch_size=None))
    return optimizer.gradients, {name: float(value) for name, value in trainer.callback_metrics.items()}


def accelerated(model, recipe, window, folder):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_eff import prepare

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, project_dir=folder, gradient_accumulation_steps=len(window))
    kept = Kept(model)
    inner, optimizer = prepare(accelerator, model.train(), kept, recipe=recipe, total_steps=1)
    for batch in window:
        with accelerator.accumulate(inner):
            accelerator.backward(inner(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return kept.gradients, {}


def fabric(model, recipe, window, folder):
    from lightning.fabric import Fabric

    from lightning_eff import setup

    kept = Kept(model)
    runner = Fabric(accelerator="cpu", devices=1)
    inner, optimizer = setup(runner, model.train(), kept, recipe=recipe, total_steps=1, accumulate=len(window))
    for number, batch in enumerate(window, 1):
        runner.backward(inner(**batch).loss / len(window))
        if number == len(window):
            optimizer.step()
            optimizer.zero_grad()
    return kept.gradients, {}


FRONT_ENDS = {"bare": bare, "hf": hf, "lightning": lightning, "accelerate": accelerated, "fabric": fabric}


def gradients(front_end, model, recipe, window, folder):
    """Return the gradients of a step of a copy of the model, and what was logged of it."""
    return FRONT_ENDS[front_end](copy.deepcopy(model), copy.deepcopy(recipe), window, folder)


def relative(found, expected):
    """Return the largest relative difference of two models' gradients, by tensor; infinite where names differ."""
    if found.keys() != expected.keys():
        return math.inf
    norms = {name: expected[name].norm() for name in expected}
    floor = 1e-3 * max(norms.values())
    return max(float((found[name] - expected[name]).norm() / max(norms[name], floor)) for name in expected)
