"""Activation checkpointing in Lightning with two optimizers that step by hand."""

import pytorch_lightning as pl
import torch
from lightning_world import make_trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_eff import ActivationCheckpointing


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
        trainer = make_trainer(tmp_path, callbacks=callbacks, max_epochs=1)
        trainer.fit(module, DataLoader(torch.randn(24, 4), batch_size=8))
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    told = callbacks[0].session.receipt()["techniques"]["checkpointing"]
    assert (told["segments"], told["recomputations"]) == (2, 2 * 3)
