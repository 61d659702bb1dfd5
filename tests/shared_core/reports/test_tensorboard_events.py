"""`eff report` reads what was logged to TensorBoard, by TensorBoard's own package if it is there."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shared_core.reports.run_folder import read_run

RECEIPT = {"front_end": "hf", "history": {"figures": [{"step": 5, "prune/sparsity": 0.25}]}}


class Accumulator:
    def __init__(self, folder, size_guidance):
        self.read = json.loads(next(Path(folder).glob("events.*")).read_text())
        assert size_guidance == {"scalars": 0}

    def Reload(self):
        return self

    def Tags(self):
        return {"scalars": list(self.read)}

    def Scalars(self, tag):
        return [SimpleNamespace(step=step, value=value) for step, value in self.read[tag]]


@pytest.fixture
def tensorboard(monkeypatch):
    for name in ("tensorboard", "tensorboard.backend", "tensorboard.backend.event_processing"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = SimpleNamespace(EventAccumulator=Accumulator, SCALARS="scalars")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", module)


def write(folder, receipt, **events):
    folder.mkdir(parents=True, exist_ok=True)
    if receipt:
        (folder / "eff_receipt.json").write_text(json.dumps(receipt))
    for number, (name, scalars) in enumerate(events.items(), 1):
        at = folder / "runs" / name if receipt else folder / "lightning_logs" / name
        at.mkdir(parents=True)
        (at / f"events.out.tfevents.{number}").write_text(json.dumps(scalars))
    return folder


def test_a_hugging_face_run_has_its_own_names_and_a_resumed_one_all_its_steps(tmp_path, tensorboard):
    first = {
        "train/prune/sparsity": [(5, 0.25), (10, 0.5), (15, 9.0)],
        "eval/loss": [(10, 2.0)],
        "train/epoch": [(5, 1)],
    }
    second = {"train/prune/sparsity": [(15, 0.75), (20, float("nan"))]}
    run = read_run(write(tmp_path / "run", RECEIPT, Nov30=first, Dec01=second))
    assert run.curves == {"prune/sparsity": [(5, 0.25), (10, 0.5), (15, 0.75)], "eval_loss": [(10, 2.0)]}
    assert run.files[1:] == ["runs/Nov30/events.out.tfevents.1", "runs/Dec01/events.out.tfevents.2"]


def test_lightning_tags_stay_and_no_receipt_is_needed(tmp_path, tensorboard):
    run = read_run(write(tmp_path / "run", None, version_0={"train/loss": [(1, 3.0), (2, 1.0)]}))
    assert run.curves == {"train/loss": [(1, 3.0), (2, 1.0)]}


def test_without_tensorboard_one_line_says_so_and_the_receipt_is_read(tmp_path, monkeypatch):
    for name in [*filter(lambda name: name.startswith("tensorboard."), sys.modules), "tensorboard"]:
        monkeypatch.setitem(sys.modules, name, None)
    run = read_run(write(tmp_path / "run", RECEIPT, Nov01={}))
    assert run.curves == {"prune/sparsity": [(5, 0.25)]}
    assert sum("pip install tensorboard" in note for note in run.notes) == 1


def test_real_events_are_read(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "run") as writer:
        for step in range(3):
            writer.add_scalar("prune/sparsity", 0.25 * step, step)
    assert read_run(tmp_path / "run").curves["prune/sparsity"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
