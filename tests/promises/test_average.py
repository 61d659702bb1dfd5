"""Running averages in both trainers: what validation, checkpoints of any kind, the best and the last model hold."""

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import make_trainer, saver
from promise_drivers import hf_trainer, lightning_module, run_lightning
from promise_table import eval_examples, make_net, train_examples
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from lightning_eff import Pruning, WeightAverage
from shared_core.engine.saving.state_file import load_state
from shared_core.errors import CompatibilityError, ConfigError

EMA = {"average": {"kind": "ema", "decay": 0.8}}
NORMS = {"average": {**EMA["average"], "bn_batches": 2}}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
VALIDATING = {"limit_val_batches": 2, "val_check_interval": 2}


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


def average_of(folder):
    return load_state(folder)["techniques"]["average"]["kept"][0]


class HfWatch(TrainerCallback):
    """Notes the weights after every step and in every validation, and saves in the middle of one."""

    def __init__(self, error=None):
        self.stepped, self.validated, self.trainer, self.error = {}, {}, None, error

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.stepped[state.global_step] = weights_of(model)

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.validated[state.global_step] = weights_of(self.trainer.model)
        if self.error and state.global_step == 4:
            raise self.error

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.trainer._save_checkpoint(self.trainer.model, None)
            self.trainer.save_model(f"{args.output_dir}/mine")


class LightningWatch(pl.Callback):
    """The same in Lightning."""

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


def test_in_transformers_validation_and_saved_models_are_the_average_and_checkpoints_the_weights(tmp_path):
    watch = HfWatch()
    trainer = watch.trainer = hf_trainer(EMA, tmp_path, save_every=2, callbacks=[watch], **EVALUATING)
    trainer.train()
    for step in (2, 4, 6, 8):
        folder = tmp_path / f"checkpoint-{step}"
        saved, average = load_file(folder / "model.safetensors"), average_of(folder)
        assert same(saved, watch.stepped[step])
        assert same(average, watch.validated[step])
        assert not same(average, saved)
    mine = load_file(tmp_path / "mine" / "model.safetensors")
    assert same(mine, watch.validated[4])  # from within a validation, like the checkpoint of step 4
    assert same(average, trainer.model.state_dict())
    trainer.save_model(str(tmp_path / "final"))
    assert same(load_file(tmp_path / "final" / "model.safetensors"), trainer.model.state_dict())
    assert trainer.state.log_history[0]["average/updates"] == 1.0


def test_in_lightning_validation_and_checkpoints_are_the_average_with_the_weights_beside(tmp_path):
    watch = LightningWatch(tmp_path)
    best = pl.callbacks.ModelCheckpoint(tmp_path / "best", monitor="eval_loss", mode="max", save_top_k=1)
    result = run_lightning(EMA, tmp_path, save_every=2, callbacks=[watch, best], **VALIDATING)
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
    step = torch.load(best.best_model_path, weights_only=True)["global_step"]
    module = type(lightning_module()).load_from_checkpoint(best.best_model_path, weights_only=True)
    assert same(watch.validated[step], module.state_dict())


def test_the_best_model_is_the_average_of_its_step(tmp_path):
    class Worsening(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_loss"] = float(state.global_step == 2 or state.global_step > 4)

    watch = HfWatch()
    best = {"load_best_model_at_end": True, "save_every": 2, "callbacks": [Worsening(), watch], **EVALUATING}
    trainer = watch.trainer = hf_trainer(EMA, tmp_path, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    assert same(average_of(tmp_path / "checkpoint-4"), trainer.model.state_dict())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(train_examples())


def test_norms_are_estimated_from_a_stream_for_every_validation(tmp_path):
    watch, runs, rows = HfWatch(), [], train_examples()
    for evaluating in (EVALUATING, {}):
        trainer = watch.trainer = hf_trainer(NORMS, tmp_path, callbacks=[watch], **evaluating)
        trainer.train_dataset = Stream()
        trainer.train()
        runs.append(watch.stepped[8])
        net = make_net()
        net.load_state_dict(trainer.model.state_dict())
        for stat in (net.norm.running_mean, net.norm.running_var):
            stat.zero_()
        net.norm.momentum, net.norm.num_batches_tracked = None, torch.tensor(0)
        with torch.no_grad():
            for start in (0, 8):
                net(torch.stack([row["x"] for row in rows[start : start + 8]]))
        assert same(net.norm.state_dict(), trainer.model.norm.state_dict())
    assert same(*runs)


def test_norms_are_estimated_for_every_validation_and_saved_with_it(tmp_path):
    watch = LightningWatch(tmp_path)
    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path, monitor="eval_loss", filename="{step}", save_top_k=-1)
    options = {"callbacks": [watch, checkpoints], "enable_checkpointing": True}
    result = run_lightning(NORMS, tmp_path, **options, **VALIDATING)
    assert len(result.checkpoints) == 4
    for step, path in result.checkpoints.items():
        saved = torch.load(path, weights_only=True)
        assert saved["state_dict"]["net.norm.num_batches_tracked"] == 2
        assert saved["eff_raw_state_dict"].get("net.norm.num_batches_tracked", 2) == step
        assert same(saved["state_dict"], watch.validated[step])
    plain = run_lightning(NORMS, tmp_path / "plain", callbacks=[quiet := LightningWatch(tmp_path)])
    assert same(quiet.stepped[8], watch.stepped[8])
    assert same(plain.weights, result.weights)


def lightning_fit(folder, *callbacks, data=None, **options):
    """Train in Lightning on a stream, or on data that are validated too."""
    trainer, module = make_trainer(folder, callbacks=list(callbacks), **options), lightning_module()
    loaders = [DataLoader(one, batch_size=8) for one in (data or [Stream()])]
    return trainer, module, lambda: trainer.fit(module, *loaders)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_an_exception_in_validation_leaves_the_weights_in_training(front_end, error, tmp_path):
    if front_end == "hf":
        watch = HfWatch(error)
        trainer = watch.trainer = hf_trainer(EMA, tmp_path, callbacks=[watch], **EVALUATING)
        with pytest.raises(error):
            trainer.train()
        model = trainer.model
    else:
        watch, options = LightningWatch(tmp_path, error), {"max_steps": 8, "num_sanity_val_steps": 2, **VALIDATING}
        data = train_examples(), eval_examples()
        trainer, model, fit = lightning_fit(tmp_path, watch, WeightAverage(**EMA["average"]), data=data, **options)
        with pytest.raises((error, SystemExit)):
            fit()
        assert "save_checkpoint" not in vars(trainer)
    assert same(watch.stepped[4], model.state_dict())
    assert not same(watch.validated[4], model.state_dict())


def test_a_fraction_of_a_stream_without_max_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the number of training steps is unknown"):
        lightning_fit(tmp_path, WeightAverage(kind="swa"), max_epochs=1)[2]()
    average = WeightAverage(kind="swa", begin=2)
    lightning_fit(tmp_path, average, max_epochs=1)[2]()
    assert average.receipt["techniques"]["average"]["first_update_step"] == 2


def test_lightnings_own_averages_beside_ours_are_refused(tmp_path):
    for other in (pl.callbacks.StochasticWeightAveraging(0.1), pl.callbacks.EMAWeightAveraging()):
        with pytest.raises(CompatibilityError, match="one of them"):
            lightning_fit(tmp_path, WeightAverage(kind="ema"), other)[2]()


def test_each_of_several_callbacks_has_the_receipt(tmp_path):
    average, pruning = WeightAverage(kind="ema"), Pruning(sparsity=0.5, schedule="one_shot", begin=2)
    lightning_fit(tmp_path, average, pruning, max_epochs=1)[2]()
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
