"""Figures of techniques arrive under the names of docs/reports.md in whatever keeps them, without a network."""

import zipfile

import pytest
import pytorch_lightning as pl
from promise_drivers import hf_trainer, run_lightning
from pytorch_lightning import loggers

FIGURE = "prune/sparsity"
RECIPE = {"prune": {"sparsity": 0.5, "begin": 0.0, "end": 1.0}}
HOUSES = pytest.mark.parametrize("house", ["hf", "lightning"])


@pytest.fixture(autouse=True)
def no_network():
    """Trackers may talk to services of their own on this machine."""


class Logged(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, *_):
        self.values.append(float(trainer.callback_metrics[FIGURE]))


@pytest.fixture
def train(tmp_path, monkeypatch):
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def run(house, tracker):
        """Train three steps with a tracker; return the figures and what the trainer puts before their names."""
        if house == "hf":
            trainer = hf_trainer(RECIPE, tmp_path / "run", max_steps=3, report_to=[tracker])
            trainer.train()
            return [entry[FIGURE] for entry in trainer.state.log_history if FIGURE in entry], "train/"
        made = {
            "tensorboard": lambda: loggers.TensorBoardLogger(tmp_path),
            "mlflow": lambda: loggers.MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns"),
            "wandb": lambda: loggers.WandbLogger(save_dir=tmp_path, offline=True),
            "csv": lambda: loggers.CSVLogger(tmp_path),
        }[tracker]()
        logged = Logged()
        run_lightning(RECIPE, tmp_path, max_steps=3, logger=made, log_every_n_steps=1, callbacks=[logged])
        return logged.values, ""

    return run


@HOUSES
def test_tensorboard(house, train, tmp_path):
    pytest.importorskip("tensorboard")
    from shared_core.reports.run_folder import event_curves

    expected, prefix = train(house, "tensorboard")
    (folder,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    found = [value for _, value in event_curves([folder])[f"{prefix}{FIGURE}"]]
    assert len(found) == 3
    assert found == pytest.approx(expected)


@HOUSES
def test_mlflow(house, train, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    expected, _ = train(house, "mlflow")
    client = mlflow.MlflowClient(f"file:{tmp_path}/mlruns")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    found = [metric.value for run in runs for metric in client.get_metric_history(run.info.run_id, FIGURE)]
    assert len(found) == 3
    assert found == pytest.approx(expected)


@HOUSES
def test_wandb(house, train, tmp_path):
    wandb = pytest.importorskip("wandb")
    expected, prefix = train(house, "wandb")
    wandb.finish()
    (file,) = tmp_path.rglob("run-*.wandb")
    assert f"{prefix}{FIGURE}".encode() in file.read_bytes()
    assert len(expected) == 3


def test_comet(train, tmp_path):
    comet_ml = pytest.importorskip("comet_ml")
    _, prefix = train("hf", "comet_ml")
    if (running := comet_ml.get_running_experiment()) is not None:
        running.end()
    (file,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(file) as kept:
        assert f'"{prefix}{FIGURE}"' in "".join(kept.read(name).decode() for name in kept.namelist())
