"""`eff quantize --method`: torchao's methods by the command line."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from shared_core.cli import app
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.quantization.post_training.torchao_calibration import quantize_with_torchao

TASK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

def batches():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(8, 64, generator=generator) * torch.logspace(-1, 1, 64) for _ in range(1000))

def quality(model):
    return model(torch.ones(1, 64)).sum().item()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torchao_task.py").write_text(TASK)
    import torchao_task

    def invoke(*args):
        given = ["quantize", "torchao_task:model", "--out", "out", *args]
        return CliRunner().invoke(app, given, catch_exceptions=False)

    invoke.task = torchao_task
    return invoke


CALIBRATED = ["--calibration", "torchao_task:batches", "--batches", "5"]


def test_the_command_writes_plain_weights_and_tells_the_gain(run, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(
        "--method", "awq", *CALIBRATED, "--set", "group_size=32", "--eval", "torchao_task:quality", "--report",
        "page.html", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    values = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())
    assert json.loads(result.stdout) == values
    assert (values["config"]["method"], values["config"]["scheme"], values["batches"]) == ("awq", "int4_weight", 5)
    assert values["layers"][0]["group_size"] == 32
    assert list(values["left_out"]) == ["2"]
    assert values["bytes"]["float"] - values["bytes"]["quantized"] == 64 * 32 * 4 - values["layer_bytes"]["0"][1]
    assert values["quality"]["quantized"] != values["quality"]["float"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["eff_quantization.json", "model.safetensors"]
    data = [batch for batch, _ in zip(run.task.batches(), range(5), strict=False)]
    expected, report = quantize_with_torchao(run.task.model(), "awq", data, group_size=32, plain_weights=True)
    model = run.task.model()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(model[0].weight, expected[0].weight)
    assert report.output_error == values["output_error"]
    page = (tmp_path / "page.md").read_text()
    assert "## What awq gained" in page
    assert f"{report.layers[0]['output_sqnr_db']:.2f}" in page


def test_the_command_prints_the_gain(run, tmp_path):
    result = run("--method", "smoothquant", *CALIBRATED, "--set", "alpha=0.4", "--set", "skip=last")
    assert result.exit_code == 0
    assert "with plain rounding to the same grid" in " ".join(result.stdout.split())
    assert "times smaller" in result.stdout
    values = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())
    assert values["output_sqnr_db"] == pytest.approx(-20 * math.log10(values["output_error"]["quantized"]))
    assert f"SQNR of the model's output: {values['output_sqnr_db']:.1f} dB" in result.stdout


@pytest.mark.parametrize(("args", "error", "message"), [
    (["--method", "awq"], ConfigError, "--method must come with --calibration"),
    (["--method", "gptq", *CALIBRATED], CompatibilityError, "what runs here: awq"),
    (["--method", "awq", *CALIBRATED, "--scheme", "int8"], ConfigError, "scheme must be one of"),
    (["--method", "awq", *CALIBRATED, "--set", "range=kl"], ConfigError, "torchao.range is not an option"),
    (["--method", "awq", *CALIBRATED, "--equalize", "--latency"], ConfigError, "without --equalize, --latency"),
    (["--method", "awq", *CALIBRATED, "--eval", "torchao_task:quality", "--largest-loss", "0"], ConfigError,
     "--method must stand without --largest-loss"),
])  # fmt: skip
def test_the_command_refuses_flags_of_other_ways(run, tmp_path, args, error, message):
    with pytest.raises(error, match=message):
        run(*args)
    assert not (tmp_path / "out").exists()
