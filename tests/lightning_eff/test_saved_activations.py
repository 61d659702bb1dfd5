"""Packed activations in Lightning."""

import pytest
import pytorch_lightning as pl
import torch
from promise_drivers import difference, lightning_module, run_lightning
from promise_table import make_net, train_examples
from torch import nn
from torch.utils.data import DataLoader

from lightning_eff import ActivationCompression
from shared_core.errors import CompatibilityError, TrainingError

EXACT = {"activations": {"pack": "exact", "min_size": 32}}


@pytest.mark.parametrize(
    "settings",
    [{"accumulate": 2, "dropout": 0.4, "shuffle": True}, {"precision": "bf16-mixed"}],
    ids=lambda settings: "+".join(settings),
)
def test_exact_packing_changes_no_bit(settings, tmp_path):
    found = []
    for recipe in ({}, EXACT):
        torch.manual_seed(0)
        found.append(run_lightning(recipe, tmp_path, plugin=bool(recipe), **settings))
    assert difference(found[0].weights, found[1].weights) is None
    assert found[1].receipt["techniques"]["activations"]["kinds"]


def fit(module, folder, *callbacks):
    trainer = pl.Trainer(
        max_steps=4, default_root_dir=folder, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
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


def test_a_run_that_packs_nothing_fails_in_its_first_step(tmp_path):
    with pytest.raises(TrainingError, match="activations: the first step must have packed a tensor, got none"):
        fit(lightning_module(), tmp_path, ActivationCompression(pack="exact", min_size=10**6))


def test_offloading_is_refused_on_a_cpu_and_the_module_stays_as_it_was(tmp_path):
    module = lightning_module()
    with pytest.raises(CompatibilityError, match="there is nothing to offload"):
        fit(module, tmp_path, ActivationCompression(pack="none", offload=True))
    assert type(module.net.head) is nn.Linear
    assert "training_step" not in vars(module)
