"""Ranking by metrics that trainers logged."""

import json
import math
import sys

import pytest
import torch
from commands import eff
from safetensors.torch import save_file

from shared_core.checkpoint_formats import open_ingredient
from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup import logged_metrics, rank_by_logged


def folder_of(root, step, log):
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"w": torch.full((2,), float(step))}, folder / "model.safetensors")
    state = {"global_step": step, "log_history": log}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


TASK = """
import torch
seen = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
def score(model):
    seen.append(float(model.w[0]))
    return -abs(seen[-1] - 2.2)
"""


@pytest.fixture
def run(tmp_path):
    """A run whose accuracy is best in the middle, logged as the Trainer does: all steps so far, losses apart."""
    log = []
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        log += [{"loss": 9.0 / step, "step": step}]
        log += [
            {"eval_accuracy": accuracy, "eval_loss": 1 - accuracy, "eval_fid": accuracy, "step": step, "epoch": 0.1}
        ]
        folder_of(tmp_path / "run", step, log)
    return tmp_path / "run"


def test_the_order_is_that_of_the_own_step(run):
    paths = [run / f"checkpoint-{step}" for step in (1, 2, 3)]
    assert logged_metrics(open_ingredient(paths[1])) == {
        "loss": 4.5, "eval_accuracy": 0.9, "eval_loss": pytest.approx(0.1), "eval_fid": 0.9,
    }  # fmt: skip
    for metric, mode, order in (
        ("eval_accuracy", "auto", "231"),
        ("eval_loss", "auto", "231"),
        ("eval_loss", "max", "132"),
        ("eval_fid", "min", "132"),
    ):
        ranked, values = rank_by_logged(paths, metric, mode)
        assert "".join(item.name[-1] for item in ranked) == order
        assert values == sorted(values, reverse=mode == "max" or metric == "eval_accuracy")


def test_ingredients_without_the_metric_are_refused_by_name(run):
    paths = sorted(run.iterdir())
    late = folder_of(run, 4, json.loads((paths[2] / "trainer_state.json").read_text())["log_history"])
    with pytest.raises(CheckpointError, match=r"checkpoint-4 must be saved with .* no metric of its step"):
        rank_by_logged([*paths, late], "eval_accuracy")
    with pytest.raises(CheckpointError, match=r"checkpoint-1 must be saved with 'eval_acuracy'.*eval_accuracy"):
        rank_by_logged(paths, "eval_acuracy")
    (late / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-4 must"):
        rank_by_logged([*paths, late], "eval_accuracy")
    state = {"global_step": 1, "log_history": [{"step": 1, "eval_accuracy": math.nan}]}
    (paths[0] / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="checkpoint-1 must be saved with a finite"):
        rank_by_logged(paths, "eval_accuracy")
    with pytest.raises(CheckpointError, match="ingredient 0 must be saved with"):
        rank_by_logged([{"w": torch.ones(1)}], "eval_accuracy")


def test_lightning_checkpoints(tmp_path):
    for number, score in enumerate((0.3, 0.8)):
        state = {"monitor": "val_acc", "best_k_models": {f"/elsewhere/{number}.ckpt": torch.tensor(score)}}
        torch.save({"state_dict": {"w": torch.ones(2)}, "callbacks": {"ModelCheckpoint{'monitor': 'val_acc'}": state},
                    "eff_run": {"id": "a", "step": 1, "metrics": {"val_loss": float(number)}}},
                   tmp_path / f"{number}.ckpt")  # fmt: skip
    paths = [tmp_path / "0.ckpt", tmp_path / "1.ckpt"]
    assert rank_by_logged(paths, "val_acc")[1] == [pytest.approx(0.8), pytest.approx(0.3)]
    assert rank_by_logged(paths, "val_loss")[1] == [0.0, 1.0]
    (tmp_path / "0.ckpt").rename(tmp_path / "last.ckpt")  # its own name is not among those scored
    with pytest.raises(CheckpointError, match=r"last\.ckpt must be saved with 'val_acc'"):
        rank_by_logged([tmp_path / "last.ckpt", paths[1]], "val_acc")


def test_the_command(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (run.parent / "ranked_task.py").write_text(TASK)
    scored = ["soup", str(run), "--eval", "ranked_task:score", "--model", "ranked_task:Net"]
    arguments = [*scored, "--json", "--journal", "journal.json", "--rank-by"]
    result = eff(*arguments, "eval_accuracy", "--out", "one")
    assert sys.modules["ranked_task"].seen == [2.0, 2.0, 2.5, 1.5]  # the first one twice, then averages alone
    path = json.loads(result.stdout)
    assert path["ingredients"] == [f"{run}/checkpoint-2"]
    assert [row["logged"] for row in path["history"]] == [0.9, 0.7, 0.5]
    for rank_by, kind, match in (("eval_fid:min", CheckpointError, "its rank_by were 'eval_accuracy'"),
                                 ("eval_fid:low", ConfigError, "metric:min")):  # fmt: skip
        with pytest.raises(kind, match=match):
            eff(*arguments, rank_by, "--out", "two")
    with pytest.raises(ConfigError, match="--rank-by must stand without --order"):
        eff(*arguments, "a", "--order", "given", "--out", "two")
    sys.modules.pop("ranked_task")
