"""Activation checkpointing in Lightning: the same weights, from one optimizer or two, and what is counted."""

import pytorch_lightning as pl
import torch
from promise_drivers import difference, run_lightning
from promise_table import recipe_of
from torch import nn
from torch.utils.data import DataLoader

from lightning_eff import ActivationCheckpointing


def test_a_run_with_dropout_and_shuffling_is_the_same_to_the_bit(tmp_path):
    runs = []
    for recipe in ({}, recipe_of("checkpointing")):
        torch.manual_seed(0)
        folder = tmp_path / str(len(recipe))
        runs.append(run_lightning(recipe, folder, dropout=0.3, shuffle=True, accumulate=2, batch=4))
    assert difference(runs[0].weights, runs[1].weights) is None
    told = runs[1].receipt["techniques"]["checkpointing"]
    assert told["never_recomputed"] == []
    assert told["recomputations_per_step"] == 2 * 3


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
    for callbacks in ([], [ActivationCheckpointing(policy="sqrt")]):
        pl.seed_everything(0)
        module = Adversaries()
        trainer = pl.Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
            default_root_dir=tmp_path, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(module, DataLoader(torch.randn(24, 4), batch_size=8))
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    told = callbacks[0].session.receipt()["techniques"]["checkpointing"]
    assert (told["segments"], told["recomputations"]) == (2, 2 * 3)
