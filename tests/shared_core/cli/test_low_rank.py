"""`eff low-rank`: what is written loads, the report is true and can be trained with, wrong input is refused."""

import functools
import json

import pytest
import torch
from commands import eff, user_module
from reports import report_of, row
from torch import nn

from shared_core import Session
from shared_core.cli.smaller_models import LOW_RANK_FILE
from shared_core.errors import CheckpointError, ConfigError
from shared_core.low_rank import LowRankLayer, load

TASK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

def model_and_inputs():
    return model(), torch.ones(2, 64)

def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 64, generator=generator) for _ in range(3)]

def narrow():
    return [torch.ones(2, 63)]

def quality(model):
    return float(model(torch.ones(1, 64)).sum())

def quality_of_parts(model):
    return [0.5]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "low_rank_task", TASK)
    return functools.partial(eff, "low-rank", "low_rank_task:model_and_inputs")


def test_the_folder_loads_and_its_report_is_true(run, tmp_path):
    from low_rank_task import model, quality

    result = run("--rank", "budget:0.5", "--decomposition", "whitened", "--calibration", "low_rank_task:batches",
                 "--eval", "low_rank_task:quality", "--out", "small", "--repeats", "1", "--json")  # fmt: skip
    report = json.loads((tmp_path / "small" / LOW_RANK_FILE).read_text())
    assert json.loads(result.stdout) == report
    small = load(model(), tmp_path / "small")
    numel = sum(parameter.numel() for parameter in small.parameters())
    assert report["parameters"]["after"] == numel < report["parameters"]["before"]
    multiplied = sum(parameter.numel() for parameter in small.parameters() if parameter.dim() == 2)
    assert report["flops"]["after"] == 2 * 2 * multiplied  # of two inputs
    assert report["quality"]["low_rank"] == pytest.approx(quality(small))
    text = report_of(tmp_path / "small")
    assert row(text, "parameters")[:2] == [f"{report['parameters'][when]:,}" for when in ("before", "after")]
    assert row(text, report["layers"][0]["name"])
    assert isinstance(small[4], nn.Linear)  # the head
    # its ranks are those of a run that is given it
    fresh = model()
    Session({"low_rank": {"rank": str(tmp_path / "small" / LOW_RANK_FILE)}}).attach(fresh)
    ranks = [each.rank for each in fresh if isinstance(each, LowRankLayer)]
    assert ranks == [layer["rank"] for layer in report["layers"]]


def test_merged_weights_load_in_the_plain_model(run, tmp_path):
    from low_rank_task import model
    from safetensors.torch import load_file

    assert run("--rank", "4", "--skip", "", "--min-size", "0", "--merged", "--out", "whole").exit_code == 0
    plain = model()
    plain.load_state_dict(load_file(tmp_path / "whole" / "model.safetensors"))
    assert [int(torch.linalg.matrix_rank(plain[i].weight)) for i in (0, 2, 4)] == [4, 4, 4]


def test_wrong_input_is_refused_before_any_work(run, tmp_path):
    with pytest.raises(ConfigError, match="--calibration must be given with sensitivity"):
        run("--rank", "sensitivity:0.5", "--out", "small")
    with pytest.raises(ConfigError, match="rank must be"):
        run("--rank", "many", "--out", "small")
    assert not (tmp_path / "small").exists()
    with pytest.raises(ConfigError, match="eff low-rank: --eval must return a number, got list"):
        run("--rank", "2", "--out", "small", "--eval", "low_rank_task:quality_of_parts")
    with pytest.raises(ConfigError, match=r"batches must hold what the model takes: .*, got Tensor .RuntimeError: "):
        run("--rank", "2", "--out", "small", "--decomposition", "scaled", "--calibration", "low_rank_task:narrow")
    assert not (tmp_path / "small").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="new or empty folder"):
        run("--rank", "2", "--out", "full")


@pytest.mark.parametrize("switch", [["--force"], ["--force", "true"]])
def test_a_switch_needs_no_value(run, tmp_path, switch):
    result = run("--rank", "64", *switch, "--out", "whole", "--repeats", "1", "--json")
    assert [layer["rank"] for layer in json.loads(result.stdout)["layers"]] == [64, 64]
