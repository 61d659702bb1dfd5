"""One validated batch before the first step of Lightning's Trainer: what it finds, and that it leaves no trace."""

import importlib
import random

import numpy as np
import pytest
import torch
from lightning_world import BOTH, dataset, difference, everything, fit, hook_callback, loader, make_module, make_trainer
from torch.utils.data import DataLoader

import lightning_eff._trainer_hooks as hooks
from lightning_eff import EffCallback
from shared_core.errors import ConfigError

GREEDY = {"soup": {"kind": "greedy", "metric": "val_acc"}}


def prepared(folder, recipe, namespace=BOTH[0], callbacks=(), **options):
    saving = importlib.import_module(namespace).callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", save_top_k=-1, monitor="val_loss"
    )
    given = [EffCallback(recipe), *callbacks, saving]
    return make_trainer(folder, namespace, callbacks=given, enable_checkpointing=True, **options)


@pytest.mark.parametrize("namespace", BOTH)
@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize(
    ("soup", "hint"), [({}, "'eval_loss'.*'val_loss'"), ({"metric": "val_accc"}, "'val_accc'.*mean 'val_acc'")]
)
def test_a_metric_that_validation_does_not_log_is_found_before_training(tmp_path, namespace, sanity, soup, hint):
    trainer = prepared(tmp_path, {"soup": {"kind": "greedy", **soup}}, namespace, num_sanity_val_steps=sanity)
    with pytest.raises(ConfigError, match=f"soup: metric must be .*, got {hint}"):
        fit(trainer, make_module(namespace), val=True)
    assert trainer.global_step == 0
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize(("logs", "sanity", "batches"), [(True, 2, 2), (True, 0, 1), (False, 2, 3)])
def test_a_batch_is_validated_only_where_the_sanity_check_logs_no_metric(tmp_path, logs, sanity, batches):
    class Module(type(make_module())):
        steps = 0

        def validation_step(self, batch, batch_idx):
            self.__class__.steps += 1
            if logs or not self.trainer.sanity_checking:  # as many modules do
                super().validation_step(batch, batch_idx)

    counted = []
    watch = hook_callback(BOTH[0], on_train_start=lambda trainer: counted.append(Module.steps))
    fit(prepared(tmp_path, GREEDY, callbacks=[watch], num_sanity_val_steps=sanity), Module(), val=True)
    assert counted == [batches]


def test_a_run_that_needs_no_metric_validates_nothing_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_eff._services._names_logged", lambda *_: pytest.fail("validated"))
    for recipe in ({"soup": {"kind": "uniform"}}, {"prune": {"sparsity": 0.5}}):
        fit(prepared(tmp_path, recipe), make_module(), val=True)


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.data, self.own = dataset(), np.random.default_rng(0)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + self.own.random() + random.random() + np.random.random() + torch.rand(()), y


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("namespace", BOTH)
def test_it_leaves_no_trace(tmp_path, monkeypatch, namespace, workers):
    class Module(type(make_module(namespace))):
        def on_fit_start(self):
            self.outputs = []

        def validation_step(self, batch, batch_idx):
            self.outputs.append(batch_idx)
            super().validation_step(batch, batch_idx)

        def on_validation_epoch_end(self):
            self.log("val_batches", float(len(self.outputs)))

    def run(folder):
        heard = []
        names = ("on_validation_start", "on_validation_batch_end", "on_train_batch_start", "on_sanity_check_start")
        hooked = {
            name: lambda trainer, name=name: heard.append((name, dict(trainer.callback_metrics))) for name in names
        }
        logger = importlib.import_module(namespace).loggers.CSVLogger(folder / "logs")
        trainer = prepared(folder, GREEDY, namespace, callbacks=[hook_callback(namespace, **hooked)], logger=logger)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        module = Module()
        validation = DataLoader(
            Noisy(), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(4),
        )  # fmt: skip
        trainer.fit(module, loader(), validation)
        loop = trainer.fit_loop.epoch_loop.val_loop
        rng = random.getstate(), np.random.get_state()[1].tolist()
        logged = next((folder / "logs").rglob("metrics.csv")).read_text()
        return everything(trainer, module), heard, logged, rng, loop.batch_progress.state_dict(), module.outputs

    with_it = run(tmp_path / "with")
    monkeypatch.setattr(hooks, "preflight", lambda *_: None)
    without = run(tmp_path / "without")
    assert not difference(with_it[0], without[0])
    assert with_it[1:] == without[1:]


def test_a_resumed_run_validates_no_batch_at_its_start(tmp_path, monkeypatch):
    trainer = prepared(tmp_path, GREEDY, max_epochs=1)
    fit(trainer, make_module(), val=True)
    monkeypatch.setattr("lightning_eff._services._names_logged", lambda *_: pytest.fail("validated again"))
    trainer = prepared(tmp_path, GREEDY, max_epochs=2)
    fit(trainer, make_module(), val=True, ckpt_path=str(next(tmp_path.glob("*.ckpt"))))
    assert trainer.current_epoch == 2


def test_a_validation_that_fails_on_one_batch_is_told_and_training_goes_on(tmp_path):
    class Whole(type(make_module())):
        def on_validation_epoch_end(self):
            if self.trainer.num_val_batches[0] < 6:
                raise RuntimeError("all six are needed")

    trainer = prepared(tmp_path, GREEDY)
    callback = trainer.callbacks[0]
    fit(trainer, Whole(), val=True)
    (told,) = [note for note in callback.receipt["notes"] if "could not check that evaluation reports" in note]
    assert "RuntimeError: all six are needed" in told
