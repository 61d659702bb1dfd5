"""`eff try` on a script of Lightning, as its user starts it."""

from pathlib import Path

import pytest
from commands import told_by

SCRIPT = """
import torch
import NAME as pl
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, index):
        self.log("train", self.loss(batch))
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


torch.manual_seed(0)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
checkpoints = pl.callbacks.ModelCheckpoint("mine", monitor="val_loss")
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[checkpoints], logger=pl.loggers.CSVLogger("logs"))
trainer.fit(Module(), loader, loader)
trainer.save_checkpoint("saved.ckpt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_a_lightning_script_is_tried_beside_a_plain_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fit.py").write_text(SCRIPT.replace("NAME", name))
    found = told_by("try", "--steps", "12", "fit.py", "--prune_sparsity", "0.8")
    assert sorted(path.name for path in Path().iterdir()) == ["eff_try", "fit.py"]
    assert found["metric"] == "val_loss"
    assert found["rows"][0]["happened"]["prune"].startswith("Pruned 80.0 %")
    assert found["rows"][0]["figures"]["packed"]["verdict"] == "better"
