"""Positions in a run: planned from Lightning's accumulation schedule, and told loudly where steps come otherwise."""

import json

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import make_trainer
from promise_drivers import hf_trainer, lightning_module, run_lightning
from promise_table import BATCH, eval_examples, train_examples
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_eff import attach
from lightning_eff import EffCallback

PRUNE = {"prune": {"sparsity": 0.6, "begin": 0.6, "end": 0.8, "every": 1}}
EPOCHS = 10
BATCHES = len(train_examples()) // BATCH


def by_epochs(recipe, folder, **options):
    return run_lightning(recipe, folder, max_steps=-1, max_epochs=EPOCHS, **options)


def loud(receipt):
    return [note for note in receipt["notes"] if "optimizer steps do not arrive as planned" in note]


@pytest.mark.parametrize("schedule", [{4: 4}, {0: 2, 3: 3}, {2: 2, 50: 4}])
def test_an_accumulation_schedule_is_planned_for(schedule, tmp_path):
    recipe = {"prune": {**PRUNE["prune"], "begin": "3ep"}}
    result = by_epochs(recipe, tmp_path, callbacks=[GradientAccumulationScheduler(dict(schedule))])
    factors = {0: 1, **schedule}
    steps = [-(-BATCHES // factors[max(first for first in factors if first <= epoch)]) for epoch in range(EPOCHS)]
    told = result.receipt
    assert told["steps"]["applied"] == told["steps"]["planned"] == sum(steps)
    assert told["techniques"]["prune"]["begin_step"] == sum(steps[:3])
    assert told["unreached"] == {}
    assert not loud(told)


class Growing(pl.LightningModule):
    """Has more data in every epoch, and keeps its weights of every step."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = lightning_module().net, []

    def training_step(self, batch, index):
        return self.net(**batch)["loss"]

    def train_dataloader(self):
        return DataLoader(train_examples()[: BATCH * (self.current_epoch + 1)], batch_size=BATCH)

    def on_train_batch_end(self, *_):
        self.seen.append(self.net.head.weight.detach().double())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["ema", "swa", "last_k"])
def test_an_average_takes_in_the_steps_of_data_that_grows(kind, tmp_path):
    options = {"ema": {"decay": 0.5, "warmup": False}, "swa": {"begin": 1}, "last_k": {"k": 3}}[kind]
    module, callback = Growing(), EffCallback({"average": {"kind": kind, **options}})
    make_trainer(tmp_path, callbacks=[callback], max_epochs=4, reload_dataloaders_every_n_epochs=1).fit(module)
    mean = module.seen[0]
    for weight in module.seen[1:]:
        mean = (mean + weight) / 2
    mean = {"ema": mean, "swa": torch.stack(module.seen).mean(0), "last_k": torch.stack(module.seen[-3:]).mean(0)}[kind]
    assert callback.receipt["steps"] == {"applied": 10, "skipped": 0, "planned": 4}
    torch.testing.assert_close(module.net.head.weight.double(), mean)


class Manual(pl.LightningModule):
    """Steps its one optimizer after every few batches."""

    def __init__(self, every):
        super().__init__()
        self.automatic_optimization, self.every = False, every
        self.net = lightning_module().net

    def training_step(self, batch, index):
        self.manual_backward(self.net(**batch)["loss"] / self.every)
        if (index + 1) % self.every == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_manually(every, folder, **options):
    callback = EffCallback(PRUNE)
    trainer = make_trainer(folder, callbacks=[callback], **({"max_epochs": EPOCHS} | options))
    model = Manual(every)
    trainer.fit(model, DataLoader(train_examples(), batch_size=BATCH), DataLoader(eval_examples(), batch_size=BATCH))
    return callback.receipt.values, model


def test_manual_steps_that_come_too_rarely_are_told_at_once_and_at_the_end(tmp_path, capsys):
    told, model = train_manually(2, tmp_path)
    planned = EPOCHS * BATCHES
    assert told["steps"] == {"applied": planned // 2, "skipped": 0, "planned": planned}
    (early,) = loud(told)
    assert f"at this rate the run ends after {planned // 2} of {planned} steps, before prune: first masks" in early
    assert told["notes"].index(early) < next(i for i, note in enumerate(told["notes"]) if "did not reach" in note)
    assert told["unreached"].keys() == {"prune"}
    assert f"efftrain: {early}" in capsys.readouterr().out
    assert not bool((model.net.hidden.weight == 0).any())


def test_manual_steps_that_max_steps_tells_of_are_planned_for(tmp_path):
    told, _ = train_manually(2, tmp_path, max_steps=EPOCHS * BATCHES // 2)
    assert told["steps"]["applied"] == told["steps"]["planned"]
    assert told["unreached"] == {}
    assert not loud(told)


def test_an_early_end_is_told_in_capitals(tmp_path):
    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 8

    recipe = {"distill": {"teacher": lightning_module().net, "student": "net", "begin": 0.5}}
    told = by_epochs(recipe, tmp_path, callbacks=[Ends()]).receipt
    assert told["unreached"] == {}
    assert any("distill did not run as planned: the run ended after 8 steps" in note for note in told["notes"])


class Discards(TrainerCallback):
    """Has every second optimizer step discarded, or only the first six."""

    session = None

    def __init__(self, first_alone):
        self.first_alone = first_alone

    def on_step_begin(self, args, state, control, **kwargs):
        is_early = state.global_step < 6
        self.session.context.discard_step = is_early if self.first_alone else state.global_step % 2 == 1


@pytest.mark.parametrize("first_alone", [False, True])
def test_steps_that_are_skipped_for_good_are_told(first_alone, tmp_path):
    discards = Discards(first_alone)
    trainer = hf_trainer({}, tmp_path, plugin=False, callbacks=[discards], max_steps=64)
    discards.session = attach(trainer, {"prune": {"sparsity": 0.5, "begin": 0.25, "end": 0.75, "every": 1}})
    trainer.train()
    told = json.loads((tmp_path / "eff_receipt.json").read_text())
    if first_alone:  # as a loss scale that is too large at first
        assert told["steps"] == {"applied": 58, "skipped": 6, "planned": 64}
        assert not loud(told)
        assert told["unreached"] == {}
        return
    assert told["steps"] == {"applied": 32, "skipped": 32, "planned": 64}
    (note,) = loud(told)
    assert "8 applied, 16 planned so far; at this rate the run ends after 32 of 64 steps, before prune" in note
    assert told["unreached"].keys() == {"prune"}
