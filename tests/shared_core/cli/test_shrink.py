"""`eff shrink` on a model that a function builds: what is written and what is refused before any work."""

import functools
import json

import pytest
import torch
from commands import eff, user_module
from reports import report_of, row
from safetensors.torch import load_file, save_file
from torch import nn

from shared_core.cli.smaller_models import SHRINK_FILE
from shared_core.errors import CheckpointError, ConfigError

TASK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

def model_and_inputs():
    return model(), torch.randn(2, 8)

def inputs():
    return torch.randn(4, 8)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "shrink_task", TASK)
    import shrink_task

    weights = shrink_task.model().state_dict()
    for name in ("0.weight", "0.bias"):
        weights[name][:2] = 0
    save_file(weights, tmp_path / "pruned.safetensors")
    return functools.partial(eff, "shrink")


def test_the_weights_load_into_a_smaller_model(run, tmp_path):
    result = run("shrink_task:model_and_inputs", "--weights", "pruned.safetensors", "--out", "small", "--json")
    assert result.exit_code == 0
    report = json.loads((tmp_path / "small" / SHRINK_FILE).read_text())
    assert json.loads(result.stdout) == report
    assert report["removed"] == {"0": 2}
    assert report["tensors"]["2.weight"] == [[3, 6], [3, 4]]
    assert report["bytes"] == {"before": 4 * (48 + 6 + 18 + 3), "after": 4 * (32 + 4 + 12 + 3)}
    assert report["flops"]["after"] < report["flops"]["before"]
    small = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    small.load_state_dict(load_file(tmp_path / "small" / "model.safetensors"))
    whole = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    whole.load_state_dict(load_file(tmp_path / "pruned.safetensors"))
    x = torch.randn(5, 8)
    assert torch.allclose(small(x), whole(x), atol=1e-6)
    text = report_of(tmp_path / "small")
    assert row(text, "bytes") == ["300", "204", "0.68×", "eff shrink"]
    assert row(text, "0") == ["6", "2"]


def test_inputs_can_come_from_a_function_of_their_own_and_are_told_as_a_table(run):
    result = run(
        "shrink_task:model", "--weights", "pruned.safetensors", "--inputs", "shrink_task:inputs", "--out", "small",
        "--multiple-of", "5",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "Removed 1 unit in 1 group" in result.stdout


def test_nothing_to_remove_is_said(run):
    assert "no unit is zero" in run("shrink_task:model_and_inputs", "--out", "small").stdout


def test_wrong_input_is_refused_and_nothing_is_written(run, tmp_path):
    with pytest.raises(ConfigError, match="example_inputs"):
        run("shrink_task:model", "--out", "small")
    with pytest.raises(ConfigError, match="--multiple-of"):
        run("shrink_task:model_and_inputs", "--out", "small", "--multiple-of", "0")
    with pytest.raises(ConfigError, match="module:function"):
        run("nowhere", "--out", "small")
    assert not (tmp_path / "small").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(CheckpointError, match="new or empty"):
        run("shrink_task:model_and_inputs", "--out", "full")
