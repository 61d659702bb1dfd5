"""Packed activations in Lightning."""

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import make_trainer
from promise_drivers import difference, lightning_module
from promise_table import make_net, train_examples
from torch import nn
from torch.utils.data import DataLoader

from lightning_eff import ActivationCompression
from shared_core.errors import CompatibilityError

EXACT = {"activations": {"pack": "exact", "min_size": 32}}


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


def test_manual_optimisation(tmp_path):
    callback = ActivationCompression(pack="exact", min_size=32)
    assert difference(fit(Manual(), tmp_path), fit(Manual(), tmp_path, callback)) is None
    assert callback.receipt.values["techniques"]["activations"]["forwards"] == 2


@pytest.mark.slow
def test_a_compiled_module(tmp_path):
    def module():
        return torch.compile(lightning_module(0.3), backend="aot_eager_decomp_partition")

    callback = ActivationCompression(pack="exact", min_size=32)
    assert difference(fit(module(), tmp_path), fit(module(), tmp_path, callback)) is None
    assert callback.receipt.values["techniques"]["activations"]["kinds"]


def test_offloading_is_refused_on_a_cpu_and_the_module_stays_as_it_was(tmp_path):
    module = lightning_module()
    with pytest.raises(CompatibilityError, match="there is nothing to offload"):
        fit(module, tmp_path, ActivationCompression(pack="none", offload=True))
    assert type(module.net.head) is nn.Linear
    assert "training_step" not in vars(module)
