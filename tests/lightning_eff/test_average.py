"""Running averages in Lightning: what validation, checkpoints of any kind and the last model hold."""

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import make_trainer, saver
from promise_drivers import lightning_module, run_lightning
from torch.utils.data import DataLoader

from lightning_eff import Pruning, WeightAverage
from shared_core.errors import CompatibilityError, ConfigError

EMA = {"average": {"kind": "ema", "decay": 0.8}}
VALIDATING = {"limit_val_batches": 2, "val_check_interval": 2}


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


class Watch(pl.Callback):
    """Notes the weights after every step and in every validation, and saves in the middle of one."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.stepped, self.validated = folder, error, {}, {}

    def on_train_batch_end(self, trainer, module, *args):
        self.stepped[trainer.global_step] = weights_of(module)

    def on_validation_batch_end(self, trainer, module, *args):
        self.validated[trainer.global_step] = weights_of(module)
        if self.error and trainer.global_step == 4:
            raise self.error

    def on_validation_epoch_end(self, trainer, module):
        if trainer.global_step == 4:
            for weights_only in (False, True):
                trainer.save_checkpoint(self.folder / f"inside-{weights_only}.ckpt", weights_only)


def test_validation_and_checkpoints_are_the_average_with_the_weights_beside(tmp_path):
    watch = Watch(tmp_path)
    result = run_lightning(EMA, tmp_path, save_every=2, callbacks=[watch], **VALIDATING)
    paths = [*result.checkpoints.items(), *((4, tmp_path / f"inside-{only}.ckpt") for only in (False, True))]
    assert len(paths) == 6
    for step, path in paths:
        saved = torch.load(path, weights_only=True)
        average, weights = saved["state_dict"], saved["eff_raw_state_dict"]
        assert same(average, watch.validated[step]), path
        assert set(weights) == {name for name, _ in lightning_module().named_parameters()} | {
            "net.norm.running_mean", "net.norm.running_var",
        }  # fmt: skip
        assert same(weights, watch.stepped[step])
    assert same({f"net.{name}": value for name, value in result.weights.items()}, watch.validated[8])


def test_the_best_checkpoint_is_the_average_to_plain_lightning(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="eval_loss", mode="max", save_top_k=1)
    watch = Watch(tmp_path)
    run_lightning(EMA, tmp_path, callbacks=[watch, saver], enable_checkpointing=True, **VALIDATING)
    step = torch.load(saver.best_model_path, weights_only=True)["global_step"]
    module = type(lightning_module()).load_from_checkpoint(saver.best_model_path, weights_only=True)
    assert same(watch.validated[step], module.state_dict())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_validation_leaves_the_weights_in_training(error, tmp_path):
    watch, module = Watch(tmp_path, error), lightning_module()
    from promise_table import eval_examples, train_examples

    callbacks = [watch, WeightAverage(kind="ema", decay=0.8)]
    trainer = make_trainer(tmp_path, callbacks=callbacks, max_steps=8, num_sanity_val_steps=2, **VALIDATING)
    loaders = (DataLoader(data, batch_size=8) for data in (train_examples(), eval_examples()))
    with pytest.raises((error, SystemExit)):
        trainer.fit(module, *loaders)
    assert same(watch.stepped[4], module.state_dict())
    assert not same(watch.validated[4], module.state_dict())
    assert "save_checkpoint" not in vars(trainer)


def test_norms_are_estimated_for_every_validation_and_saved_with_it(tmp_path):
    watch = Watch(tmp_path)
    recipe = {"average": {**EMA["average"], "bn_batches": 2}}
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="eval_loss", filename="{step}", save_top_k=-1)
    result = run_lightning(recipe, tmp_path, callbacks=[watch, saver], enable_checkpointing=True, **VALIDATING)
    assert len(result.checkpoints) == 4
    for step, path in result.checkpoints.items():
        saved = torch.load(path, weights_only=True)
        assert saved["state_dict"]["net.norm.num_batches_tracked"] == 2
        assert saved["eff_raw_state_dict"].get("net.norm.num_batches_tracked", 2) == step
        assert same(saved["state_dict"], watch.validated[step])
    plain = run_lightning(recipe, tmp_path / "plain", callbacks=[quiet := Watch(tmp_path)])
    assert same(quiet.stepped[8], watch.stepped[8])
    assert same(plain.weights, result.weights)


def fit(tmp_path, *callbacks):
    from promise_table import train_examples

    trainer = make_trainer(tmp_path, callbacks=list(callbacks), max_epochs=1)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(train_examples())

    trainer.fit(lightning_module(), DataLoader(Stream(), batch_size=8))


def test_a_fraction_of_a_stream_without_max_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the number of training steps is unknown"):
        fit(tmp_path, WeightAverage(kind="swa"))
    average = WeightAverage(kind="swa", begin=2)
    fit(tmp_path, average)
    assert average.receipt["techniques"]["average"]["first_update_step"] == 2


def test_lightnings_own_averages_beside_ours_are_refused(tmp_path):
    for other in (pl.callbacks.StochasticWeightAveraging(0.1), pl.callbacks.EMAWeightAveraging()):
        with pytest.raises(CompatibilityError, match="keep one of them"):
            fit(tmp_path, WeightAverage(kind="ema"), other)


def test_each_of_several_callbacks_has_the_receipt(tmp_path):
    average, pruning = WeightAverage(kind="ema"), Pruning(sparsity=0.5, schedule="one_shot", begin=2)
    fit(tmp_path, average, pruning)
    assert average.receipt["techniques"].keys() == pruning.receipt["techniques"].keys() == {"average", "prune"}


class Adversaries(pl.LightningModule):
    """Two optimizers by turns, as Lightning's documentation shows a GAN."""

    def __init__(self, toggles):
        super().__init__()
        self.automatic_optimization, self.toggles = False, toggles
        self.generator, self.discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        noise = torch.randn(len(batch), 4)
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            scores = self.discriminator(self.generator(noise)) - self.discriminator(batch)
            optimizer.zero_grad()
            self.manual_backward(scores.square().mean())
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


def test_optimizers_that_take_turns_have_one_average(tmp_path):
    x = torch.randn(32, 8)

    def trained(toggles, *callbacks, seed=0, **options):
        torch.manual_seed(seed)
        module, average = Adversaries(toggles), WeightAverage(kind="ema", decay=0.8)
        trainer = make_trainer(tmp_path, callbacks=[average, *callbacks], max_epochs=2)
        trainer.fit(module, DataLoader(x, 8, shuffle=True), **options)
        assert average.receipt["techniques"]["average"]["parameters"] == 4
        return weights_of(module)

    whole = trained(True, saver("pytorch_lightning", tmp_path))
    assert same(whole, trained(False))
    assert same(whole, trained(True, seed=1, ckpt_path=tmp_path / "2.ckpt"))
