"""A teacher that is an earlier state of the student, from files that tell weights but not how to build the model."""

import copy
import pathlib

import pytest
import pytorch_lightning
import torch
from lightning_world import difference, everything, fit, make_module, make_trainer
from safetensors.torch import save_file
from torch.nn import functional as F

from lightning_eff import EffCallback
from shared_core.errors import CheckpointError


class Unbuildable(pytorch_lightning.LightningModule):
    """A module that is given its net: Lightning cannot build it from a checkpoint."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.save_hyperparameters({"source": pathlib.Path("data")})

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Whole(Unbuildable):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


def trained(folder, module, **distill):
    trainer = make_trainer(folder, max_epochs=1, callbacks=[EffCallback({"distill": distill} if distill else {})])
    return trainer, fit(trainer, module)


@pytest.fixture
def earlier(tmp_path):
    """The net of an earlier generation, which earlier.ckpt and model.safetensors hold."""
    trainer, module = trained(tmp_path, Unbuildable(make_module(seed=3).net))
    trainer.save_checkpoint(tmp_path / "earlier.ckpt")
    save_file(module.net.state_dict(), tmp_path / "model.safetensors")
    return module.net


@pytest.mark.parametrize("file", ["earlier.ckpt", "model.safetensors", "."])
def test_it_teaches_like_the_model_itself(tmp_path, earlier, file):
    results = [
        everything(*trained(tmp_path / "run", Unbuildable(make_module().net), student="net", teacher=teacher))
        for teacher in (str(tmp_path / file), copy.deepcopy(earlier))
    ]
    assert difference(*results) == []


def test_the_student_may_be_the_lightning_module(tmp_path, earlier):
    teacher = str(tmp_path / "earlier.ckpt")
    results = [
        everything(*trained(tmp_path / "run", Whole(make_module().net), teacher=found))
        for found in (teacher, Whole(copy.deepcopy(earlier)))
    ]
    assert difference(*results) == []


def test_another_size_or_part_is_refused(tmp_path, earlier):
    teacher = str(tmp_path / "earlier.ckpt")
    with pytest.raises(CheckpointError, match=r"of a Sequential of .*Unbuildable was not built from"):
        trained(tmp_path, Unbuildable(make_module(width=8).net), student="net", teacher=teacher)
    with pytest.raises(CheckpointError, match=r"missing \['weight', 'bias'\]"):
        trained(tmp_path, Unbuildable(torch.nn.Sequential(make_module().net)), student="net.0.0", teacher=teacher)
