"""Lightning's tuner beside techniques: its trials run without callbacks and put the weights back."""

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import dataset, difference, everything, fit, loader, make_module, make_trainer, saver
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_eff import EffCallback
from shared_core.errors import CompatibilityError, TrainingError

RECIPE = {"prune": {"sparsity": 0.5}, "qat": {"scheme": "int8"}, "average": {"kind": "ema"}}


class Data(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self):
        return DataLoader(dataset(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return loader(shuffle=False)


def trained(folder, tune=None, finder=()):
    callback = EffCallback(RECIPE)
    trainer, module, data = make_trainer(folder, callbacks=[*finder, callback]), make_module(), Data()
    if tune is not None:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        tune(Tuner(trainer), module, data)
        assert difference(before, module.state_dict()) == []
        assert "training_step" not in vars(module)
        data.batch_size = 4
    torch.manual_seed(5)
    trainer.fit(module, datamodule=data)
    assert callback.receipt["steps"] == {"applied": 18, "skipped": 0, "planned": 18}
    return everything(trainer, module)


def test_a_run_after_trials_is_the_run_without_them(tmp_path):
    def learning_rate(tuner, module, data):
        assert tuner.lr_find(module, datamodule=data, num_training=4, update_attr=False) is not None

    def batch_size(tuner, module, data):
        assert tuner.scale_batch_size(module, datamodule=data, max_trials=2, steps_per_trial=1) == 4

    alone = trained(tmp_path)
    assert difference(alone, trained(tmp_path, learning_rate)) == []
    assert difference(alone, trained(tmp_path, batch_size)) == []
    assert difference(alone, trained(tmp_path, finder=[LearningRateFinder(num_training_steps=4)])) == []


def test_private_data_is_not_tuned_on(tmp_path):
    recipe = {"dp": {"noise_multiplier": 1.0, "max_grad_norm": 1.0}}
    trainer = make_trainer(tmp_path, callbacks=[LearningRateFinder(), EffCallback(recipe)])
    with pytest.raises(CompatibilityError, match="got LearningRateFinder, whose trials see the data without noise"):
        fit(trainer, make_module())


def test_a_resume_is_not_tuned_again(tmp_path):
    # Lightning (2.6) would train from step 0, without a word
    def trainer(*more):
        finder = LearningRateFinder(num_training_steps=4)
        return make_trainer(tmp_path, callbacks=[finder, EffCallback(RECIPE), *more], max_epochs=1)

    fit(trainer(saver("pytorch_lightning", tmp_path)), make_module())
    with pytest.raises(CompatibilityError, match="no LearningRateFinder, after whose trials Lightning starts again"):
        fit(trainer(), make_module(), ckpt_path=tmp_path / "2.ckpt")


def test_a_trial_in_mid_training_is_refused(tmp_path):
    class AtTheFirstEpoch(LearningRateFinder):
        def on_fit_start(self, trainer, pl_module):
            pass

        def on_train_epoch_start(self, trainer, pl_module):
            self.lr_find(trainer, pl_module)

    trainer = make_trainer(tmp_path, callbacks=[AtTheFirstEpoch(num_training_steps=4), EffCallback(RECIPE)])
    with pytest.raises(TrainingError, match="run a tuner before training"):
        fit(trainer, make_module())


def test_a_trial_that_fails_gives_module_and_callback_back(tmp_path, monkeypatch):
    callback, module = EffCallback(RECIPE), make_module()
    trainer = make_trainer(tmp_path, callbacks=[callback])
    own, kinds = dict(vars(module)), [type(one) for one in module.modules()]
    with monkeypatch.context() as patch:
        patch.setattr(type(module), "training_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Tuner(trainer).lr_find(module, datamodule=Data(), num_training=4, update_attr=False)
    assert not {name for name in vars(module).keys() - own.keys() if callable(vars(module)[name])}
    assert [type(one) for one in module.modules()] == kinds
    assert "save_checkpoint" not in vars(trainer)
    assert callback in trainer.callbacks
