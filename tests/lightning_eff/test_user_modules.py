"""Modules that decide when optimizers step, layers get a shape, callbacks are made; compiled ones; and tuners."""

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import (
    BOTH,
    dataset,
    difference,
    everything,
    fit,
    hook_callback,
    loader,
    make_module,
    make_trainer,
    module_class,
    saver,
)
from pytorch_lightning.callbacks import LearningRateFinder
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from lightning_eff import EffCallback, Pruning
from shared_core.errors import CompatibilityError, TrainingError


class EverySecondBatch(module_class(BOTH[0])):
    """Accumulates as Lightning's documentation of `optimizer_step` shows it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def test_batches_without_a_step_are_not_skipped_steps_and_schedules_move_as_without_us(tmp_path):
    def trained(recipe):
        callback = EffCallback(recipe)
        trainer = make_trainer(tmp_path, callbacks=[callback])
        torch.manual_seed(0)
        module = EverySecondBatch()
        fit(trainer, module)
        return callback, everything(trainer, module)

    _, bare = trained({})
    callback, ours = trained({"activations": {"pack": "exact", "min_size": 1}})
    assert callback.receipt["steps"] == {"applied": 9, "skipped": 0, "planned": 18}
    assert difference(bare, ours) == []


def test_lazy_layers_are_told_to_be_made_first(tmp_path):
    class Lazy(module_class(BOTH[0])):
        def __init__(self):
            super().__init__()
            self.net[0] = nn.LazyLinear(16)

    def trained(module):
        callback = EffCallback({"prune": {"sparsity": 0.5}})
        fit(make_trainer(tmp_path, callbacks=[callback], max_epochs=1), module)
        return callback.receipt["techniques"]["prune"]["sparsity"]

    with pytest.raises(TrainingError, match=r"lazy layers .*net\.0\.weight, net\.0\.bias; pass a batch"):
        trained(Lazy())
    made = Lazy()
    made(torch.randn(2, 8))
    assert trained(made) == 0.5


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.AdamW])
def test_dead_gradients_move_no_live_weight_where_nothing_is_clipped(optimizer, tmp_path):
    def trained(zeroed):
        module = make_module(dropout=0.0)
        module.configure_optimizers = lambda: optimizer(module.parameters(), lr=0.01)
        if zeroed:
            for weight in (weight for weight in module.parameters() if weight.ndim > 1):
                weight.register_hook(lambda gradient, weight=weight: gradient.masked_fill(weight == 0, 0.0))
        prune = Pruning(sparsity=0.5, begin=0, schedule="one_shot")
        fit(make_trainer(tmp_path, callbacks=[prune]), module)
        return [weight.detach() for weight in module.parameters() if weight.ndim > 1]

    for weight, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(weight, other)
        assert (weight == 0).float().mean() > 0.3


def test_what_was_pruned_stays_pruned_under_a_new_callback(tmp_path):
    kept = EffCallback({"prune": {"sparsity": 0.5}})

    class MakesNew(module_class(BOTH[0])):
        def configure_callbacks(self):
            return [EffCallback({"prune": {"sparsity": 0.5}})]

    class Keeps(module_class(BOTH[0])):
        def configure_callbacks(self):
            return [kept]

    def trained(kind):
        torch.manual_seed(0)
        module = kind()
        trainer = make_trainer(tmp_path, BOTH[0], max_epochs=1)
        fit(trainer, module)
        mask = module.net[0].weight == 0

        def check(trainer):
            assert (module.net[0].weight[mask] == 0).all()

        trainer.callbacks.append(hook_callback(BOTH[0], on_train_batch_end=check))
        trainer.fit_loop.max_epochs = 2
        fit(trainer, module)
        (callback,) = [one for one in trainer.callbacks if isinstance(one, EffCallback)]
        assert (callback is kept) == (kind is Keeps)
        assert callback.receipt["steps"]["applied"] == 12
        return everything(trainer, module)

    assert difference(trained(MakesNew), trained(Keeps)) == []


@pytest.mark.parametrize("max_epochs", [1, 2])
def test_another_module_is_refused_by_a_trainer_that_has_trained(max_epochs, tmp_path):
    callback = EffCallback({"prune": {"sparsity": 0.5, "begin": 0, "schedule": "one_shot"}})
    trainer, first, second = make_trainer(tmp_path, max_epochs=1, callbacks=[callback]), make_module(), make_module()
    fit(trainer, first)
    trainer.fit_loop.max_epochs = max_epochs
    with pytest.raises(TrainingError, match="the module that this Trainer has trained"):
        fit(trainer, second)
    assert all(
        torch.equal(weight, other)
        for weight, other in zip(second.parameters(), make_module().parameters(), strict=True)
    )

    trainer.fit_loop.max_epochs = 2
    fit(trainer, first)  # the one that it has trained trains on
    assert callback.receipt["steps"]["applied"] == 12
    fit(make_trainer(tmp_path, max_epochs=1, callbacks=[callback]), second)
    assert callback.receipt["steps"]["applied"] == 6
    for module in (first, second):
        assert sum((module.net[index].weight == 0).sum() for index in (0, 4)) == (8 * 16 + 16 * 4) // 2


@pytest.mark.parametrize("options", [{"teacher": "ema"}, {"teacher": "mutual", "peers": 2}])
def test_a_copy_of_the_student_computes_with_its_own_weights(options, tmp_path):
    def trained(compiles):
        module = make_module(dropout=0.0)
        module.log = lambda *args, **kwargs: None  # which dynamo does not trace
        trainer = make_trainer(tmp_path, callbacks=[EffCallback({"distill": options})], max_epochs=1)
        compiled = torch.compile(module, backend="eager") if compiles else module
        fit(trainer, compiled, train=loader(drop_last=True))
        return everything(trainer, module)

    assert difference(trained(False), trained(True)) == []


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
    with pytest.raises(CompatibilityError, match="LearningRateFinder"):
        fit(trainer, make_module())


def test_a_resume_is_not_tuned_again(tmp_path):
    # Lightning (2.6) would train from step 0, without a word
    def trainer(*more):
        finder = LearningRateFinder(num_training_steps=4)
        return make_trainer(tmp_path, callbacks=[finder, EffCallback(RECIPE), *more], max_epochs=1)

    fit(trainer(saver("pytorch_lightning", tmp_path)), make_module())
    with pytest.raises(CompatibilityError, match="LearningRateFinder"):
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
