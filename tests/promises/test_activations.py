"""Checkpointed and packed activations in both trainers: language models, several optimizers, what is left alone."""

import pytest
import pytorch_lightning as pl
import torch
from language_runs import documents, llama, padded
from lightning_world import make_trainer
from promise_drivers import difference, hf_trainer, lightning_module, run_hf
from promise_table import DigitsNet, make_net, recipe_of, train_examples
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import hf_eff
import lightning_eff
from shared_core.errors import CompatibilityError

EXACT = {"activations": {"pack": "exact", "min_size": 32}}


def language_run(folder, callbacks, **settings):
    """Train a language model of two layers, whose attention drops out, with the Hugging Face Trainer."""
    torch.manual_seed(0)
    batch = padded(documents(32))
    rows = [{name: value[row] for name, value in batch.items()} for row in range(32)]
    arguments = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", logging_steps=2, **settings,
    )  # fmt: skip
    trainer = Trainer(llama(0, attention_dropout=0.2), arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{"policy": "block"}, {"policy": "sqrt"}, {"policy": "selective"}], ids=str)
def test_a_language_model_is_checkpointed_by_a_callback(options, tmp_path):
    callback = hf_eff.ActivationCheckpointing(**options)
    models = [language_run(tmp_path, callbacks).model for callbacks in ([], [callback])]
    for model in models:
        assert not any("forward" in vars(module) for layer in model.model.layers for module in layer.modules())
    assert difference(*(dict(model.state_dict()) for model in models)) is None
    told = callback.session.receipt()["techniques"]["checkpointing"]
    assert told["modules"] == ["model.layers.0", "model.layers.1"]
    assert told["saved_bytes"] > 0


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_trainers_own_checkpointing_is_refused(name, tmp_path):
    with pytest.raises(CompatibilityError, match="the trainer's own activation checkpointing: blocks would be"):
        hf_trainer(recipe_of("checkpointing"), tmp_path, **{name: True})


@pytest.mark.parametrize("pack", ["exact", "int8"])
def test_activations_of_a_language_model_are_packed_beside_gradient_checkpointing(pack, tmp_path):
    callback = hf_eff.ActivationCompression(pack=pack, min_size=32)
    plain, packed = (language_run(tmp_path, one, gradient_checkpointing=True) for one in ([], [callback]))
    losses = [trainer.state.log_history[0]["loss"] for trainer in (plain, packed)]
    assert losses[1] == losses[0] if pack == "exact" else losses[1] == pytest.approx(losses[0], rel=0.05)
    assert callback.session.receipt()["techniques"]["activations"]["share_saved"] > 0
    assert "activations/saved" in packed.state.log_history[0]


def test_evaluation_is_left_alone(tmp_path):
    receipt = run_hf(EXACT, tmp_path, eval_strategy="steps", eval_steps=2).receipt
    assert receipt["techniques"]["activations"]["forwards"] == 8


def test_a_loss_outside_of_the_model_is_packed_too(tmp_path):
    class NoLoss(DigitsNet):
        def forward(self, x, labels=None):
            return super().forward(x)

    seen = []
    for recipe in ({}, EXACT):
        trainer = hf_trainer(recipe, tmp_path, plugin=bool(recipe))
        torch.manual_seed(0)
        trainer.model = trainer.model_wrapped = NoLoss()
        trainer.compute_loss_func = lambda outputs, labels, **_: nn.functional.cross_entropy(outputs["logits"], labels)
        torch.manual_seed(0)
        trainer.train()
        seen.append(dict(trainer.model.state_dict()))
    assert difference(*seen) is None


class Adversaries(pl.LightningModule):
    """Two optimizers by hand: the first step's loss is not that of the blocks."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4))
        self.critic = nn.Linear(4, 1)

    def make(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch, index):
        for optimizer, made in zip(self.optimizers(), (self.make(batch).detach(), self.make(batch)), strict=True):
            optimizer.zero_grad()
            self.manual_backward(self.critic(made).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.critic, self.layers)]


def test_two_optimizers_by_hand(tmp_path):
    weights = []
    for callbacks in ([], [lightning_eff.ActivationCheckpointing(policy="sqrt")]):
        pl.seed_everything(0)
        module = Adversaries()
        trainer = make_trainer(tmp_path, callbacks=callbacks, max_epochs=1)
        trainer.fit(module, DataLoader(torch.randn(24, 4), batch_size=8))
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    told = callbacks[0].session.receipt()["techniques"]["checkpointing"]
    assert (told["segments"], told["recomputations"]) == (2, 2 * 3)


def fit(module, folder, *callbacks):
    trainer = make_trainer(folder, callbacks=list(callbacks), max_steps=4)
    torch.manual_seed(0)
    trainer.fit(module, DataLoader(train_examples(), batch_size=8))
    return {name: value.clone() for name, value in module.state_dict().items()}


class Manual(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.net = False, make_net(0.3)

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.net(**batch)["loss"])
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_manual_optimization_trains_the_same_weights(tmp_path):
    callback = lightning_eff.ActivationCompression(pack="exact", min_size=32)
    assert difference(fit(Manual(), tmp_path), fit(Manual(), tmp_path, callback)) is None
    assert callback.receipt.values["techniques"]["activations"]["forwards"] == 2


@pytest.mark.slow
def test_a_compiled_module(tmp_path):
    def module():
        return torch.compile(lightning_module(0.3), backend="aot_eager_decomp_partition")

    callback = lightning_eff.ActivationCompression(pack="exact", min_size=32)
    assert difference(fit(module(), tmp_path), fit(module(), tmp_path, callback)) is None
    assert callback.receipt.values["techniques"]["activations"]["kinds"]


def test_offloading_is_refused_on_a_cpu_and_the_module_stays_as_it_was(tmp_path):
    module = lightning_module()
    with pytest.raises(CompatibilityError, match="already in host memory"):
        fit(module, tmp_path, lightning_eff.ActivationCompression(pack="none", offload=True))
    assert type(module.net.head) is nn.Linear
    assert "training_step" not in vars(module)
