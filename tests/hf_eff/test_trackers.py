"""Figures of techniques arrive under the names of docs/logging.md in whatever keeps them, without a network."""

import zipfile

import pytest

from hf_eff import Pruning

FIGURE = "prune/sparsity"


@pytest.fixture
def train(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def run(tracker):
        pruning = Pruning(sparsity=0.5, begin=0.0, end=1.0)
        trainer = make.trainer(tmp_path / "run", max_steps=3, report_to=[tracker], logging_steps=1, callbacks=[pruning])
        trainer.train()
        return [entry[FIGURE] for entry in trainer.state.log_history if FIGURE in entry]

    return run


def test_tensorboard(train, tmp_path):
    pytest.importorskip("tensorboard")
    from shared_core.reports.run_folder import event_curves

    expected = train("tensorboard")
    (folder,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    found = event_curves([folder])[f"train/{FIGURE}"]
    assert [value for _, value in found] == pytest.approx(expected)


def test_mlflow(train):
    mlflow = pytest.importorskip("mlflow")
    expected = train("mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, FIGURE)] == pytest.approx(expected)


def test_wandb(train, tmp_path):
    wandb = pytest.importorskip("wandb")
    expected = train("wandb")
    wandb.finish()
    (file,) = tmp_path.rglob("run-*.wandb")
    assert f"train/{FIGURE}".encode() in file.read_bytes()
    assert expected


def test_comet(train, tmp_path):
    comet_ml = pytest.importorskip("comet_ml")
    train("comet_ml")
    if (running := comet_ml.get_running_experiment()) is not None:
        running.end()
    (file,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(file) as kept:
        assert f'"train/{FIGURE}"' in "".join(kept.read(name).decode() for name in kept.namelist())
