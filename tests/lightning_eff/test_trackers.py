"""Figures of techniques arrive under the names of docs/logging.md in whatever keeps them, without a network."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import loggers
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import Pruning

FIGURE = "prune/sparsity"


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def run(logger):
        trainer = pl.Trainer(
            max_epochs=1, log_every_n_steps=1, logger=logger, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, accelerator="cpu", callbacks=[Pruning(sparsity=0.5, begin=0.0, end=1.0)],
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2))

    return run


def test_tensorboard(train, tmp_path):
    pytest.importorskip("tensorboard")
    from shared_core.reports.run_folder import event_curves

    train(loggers.TensorBoardLogger(tmp_path))
    (folder,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    assert len(event_curves([folder])[FIGURE]) == 3


def test_mlflow(train, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    logger = loggers.MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns")
    train(logger)
    found = mlflow.MlflowClient(f"file:{tmp_path}/mlruns").get_metric_history(logger.run_id, FIGURE)
    assert len(found) == 3


def test_wandb(train, tmp_path):
    wandb = pytest.importorskip("wandb")
    train(loggers.WandbLogger(save_dir=tmp_path, offline=True))
    wandb.finish()
    (file,) = tmp_path.rglob("run-*.wandb")
    assert FIGURE.encode() in file.read_bytes()
