"""What a finished training left behind is found, counted and measured, whichever trainer wrote it."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shared_core.checkpoint_formats.opening import is_bare_weights, same_class_teacher, teacher_from_weights
from shared_core.errors import CheckpointError
from shared_core.runs.trained_model import count_parameters, find_model, model_metrics


def weights(folder, **state):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
    if state:
        (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def lightning(file, step, **monitor):
    file.parent.mkdir(parents=True, exist_ok=True)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = {f"net.{name}": value for name, value in net.state_dict().items()} | {"other": torch.ones(5)}
    callbacks = {"ModelCheckpoint{'monitor': None}": {"monitor": None}, "ModelCheckpoint{1}": monitor}
    torch.save({"state_dict": state, "global_step": step, "callbacks": callbacks}, file)
    return file


def test_the_best_checkpoint_of_a_trainer_or_the_newest(tmp_path):
    log = [{"step": 2, "eval_loss": 0.5}, {"step": 4, "loss": 9.0}, {"step": 4, "eval_loss": 0.7, "eval_runtime": 1.0}]
    second, first = weights(tmp_path / "checkpoint-10", log_history=log), weights(tmp_path / "checkpoint-2")
    assert find_model(tmp_path) == second
    weights(second, log_history=log, best_model_checkpoint="elsewhere/checkpoint-2")
    assert find_model(tmp_path) == first
    assert model_metrics(tmp_path, first, {}) == {"eval_loss": 0.5}  # and not what later steps reached
    assert model_metrics(tmp_path, second, {}) == {"eval_loss": 0.7, "loss": 9.0}
    weights(tmp_path)
    assert find_model(tmp_path) == tmp_path
    (tmp_path / "eval_results.json").write_text('{"eval_loss": 0.1}')
    (tmp_path / "odd_results.json").write_text("[1]")
    receipt = {"validation": {"eval_loss": 3.0, "eval_f1": 0.6}}
    assert model_metrics(tmp_path, tmp_path, receipt) == {"eval_f1": 0.6, "eval_loss": 0.1, "loss": 9.0}
    assert find_model(tmp_path, "*-2") == first
    with pytest.raises(CheckpointError, match="under 'best'"):
        find_model(tmp_path, "best")


def test_the_best_checkpoint_of_lightning_or_the_newest(tmp_path):
    folder = tmp_path / "lightning_logs" / "version_0"
    best = lightning(folder / "checkpoints" / "best.ckpt", 4)
    newest = lightning(folder / "checkpoints" / "last.ckpt", 8)
    assert find_model(tmp_path) == newest
    watched = {"monitor": "val_f1", "best_model_path": str(best), "best_model_score": torch.tensor(0.75)}
    lightning(best, 4, **watched)
    lightning(newest, 8, current_score=torch.tensor(0.5), **watched)
    assert find_model(tmp_path) == best
    (folder / "metrics.csv").write_text("epoch,step,val_acc,note\n0,3,0.25,a\n1,7,0.5,b\n")
    assert model_metrics(tmp_path, best, {}) == {"val_acc": 0.25, "val_f1": 0.75}
    assert model_metrics(tmp_path, newest, {}) == {"val_acc": 0.5, "val_f1": 0.5}
    assert count_parameters(best, "net") == 2 * 3 + 3 + 3 + 3  # no statistics of the batch norm
    assert count_parameters(best) == count_parameters(best, "nothing") == 15 + 5


def test_a_receipt_tells_the_last_validation_and_is_written_where_it_is_asked_for(tmp_path, monkeypatch):
    from shared_core import Session

    model = nn.Linear(8, 4)
    session = Session({"prune": {"sparsity": 0.5}})
    session.attach(model)
    session.evaluated({"eval_loss": 9.0})
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=4)
    assert session.receipt()["validation"] == {}
    session.evaluated({"eval_loss": 2.0, "eval_runtime": 1.0})
    session.evaluated({"eval_loss": torch.tensor(0.5), "eval_f1": 0.25})
    monkeypatch.setenv("EFF_RECEIPT", str(tmp_path / "copy.json"))
    written = session.receipt().write(tmp_path / "run")
    assert json.loads(written.read_text())["validation"] == {"eval_loss": 0.5, "eval_f1": 0.25}
    assert (tmp_path / "copy.json").read_text() == written.read_text()


def test_a_teacher_is_the_student_with_other_weights(tmp_path):
    torch.manual_seed(0)
    student, earlier = nn.Linear(3, 2), nn.Linear(3, 2)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    save_file(earlier.state_dict(), tmp_path / "model.safetensors")
    assert is_bare_weights(tmp_path)
    assert is_bare_weights(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        teacher = teacher_from_weights(path, student)
        assert all(torch.equal(value, earlier.state_dict()[name]) for name, value in teacher.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    (tmp_path / "config.json").touch()
    assert not is_bare_weights(tmp_path)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once():
    earlier = Tied()
    teacher = same_class_teacher({"head.weight": earlier.head.weight.detach()}, Tied(), "earlier")
    assert torch.equal(teacher.embedding.weight, earlier.head.weight)
    assert teacher.embedding.weight is teacher.head.weight


@pytest.mark.parametrize(("stored", "message"), [
    ({"weight": torch.ones(2, 3)}, r"missing \['bias'\] and others \[\]"),
    ({"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)}, r"others \['more'\]"),
    ({"weight": torch.ones(4, 3), "bias": torch.ones(2)}, r"weight of shape \(4, 3\), the student's is \(2, 3\)"),
    ({}, "missing"),
])  # fmt: skip
def test_other_weights_are_refused(stored, message):
    with pytest.raises(CheckpointError, match=message):
        same_class_teacher(stored, nn.Linear(3, 2), "runs/x")


def test_weights_of_a_part_of_the_student_are_refused_with_the_name_of_that_part():
    student = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match="fit its submodule 1: add student='1'"):
        same_class_teacher(nn.Linear(3, 2).state_dict(), student, "runs/x")


def test_a_student_whose_layers_are_replaced_is_not_copied():
    from shared_core import Session

    student = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    plain = student.state_dict()
    Session({"qat": {"scheme": "int8"}}).attach(student)
    with pytest.raises(CheckpointError, match="by FakeQuantLinear"):
        same_class_teacher(plain, student, "runs/x")
