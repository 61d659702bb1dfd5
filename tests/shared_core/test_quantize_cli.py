"""`eff quantize`: what is written, that it loads, that it deploys, and what is refused before any work."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from shared_core.cli import app
from shared_core.errors import CheckpointError, ConfigError
from shared_core.plain_checkpoint import read_deployment
from shared_core.quantization import BitPlan, apply_ranges, quantize

TASK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

def batches():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(8, 64, generator=generator) for _ in range(1000))

def quality(model):
    return model(torch.ones(1, 64)).sum().item()

def nothing():
    return None

def model_and_inputs():
    return model(), torch.ones(4, 64)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "quantize_task.py").write_text(TASK)
    import quantize_task

    def invoke(*args):
        return CliRunner().invoke(app, ["quantize", *args], catch_exceptions=False)

    invoke.task = quantize_task
    return invoke


def test_the_folder_holds_plain_weights_ranges_and_a_report(run, tmp_path):
    result = run(
        "quantize_task:model", "--out", "out", "--calibration", "quantize_task:batches", "--batches", "5",
        "--eval", "quantize_task:quality", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    report = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())
    assert json.loads(result.stdout[result.stdout.index("{") :]) == report
    assert report["batches"] == 5
    assert report["config"]["range"] == "mse"
    assert report["bytes"]["quantized"] == 64 * 32 + 32 * 10 + 4 * (32 + 10) + 4 * (32 + 10)
    model = run.task.model()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    ranges = read_deployment(tmp_path / "out")["qat"]["ranges"]
    batches = [batch for batch, _ in zip(run.task.batches(), range(5), strict=False)]
    x = torch.randn(4, 64)
    with torch.no_grad():
        expected = quantize(run.task.model(), "int8", batches)(x)
        assert torch.equal(apply_ranges(model, ranges).eval()(x), expected)
    assert report["quality"]["quantized"] != report["quality"]["float"]


def test_weights_plan_and_options_are_taken(run, tmp_path):
    torch.manual_seed(3)
    trained = {f"net.{key}": torch.randn_like(value) for key, value in run.task.model().state_dict().items()}
    save_file(trained, tmp_path / "trained.safetensors")
    BitPlan({"0": 4, "2": 16}, {"0": 2048, "2": 320}).to_yaml(tmp_path / "plan.yaml", scheme="int8_weight")
    result = run(
        "quantize_task:model", "--out", "out", "--weights", "trained.safetensors", "--scheme", "int8_weight",
        "--plan", "plan.yaml", "--set", "rounding=nearest",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "times smaller" in result.stdout
    written = load_file(tmp_path / "out" / "model.safetensors")
    scale = trained["net.0.weight"].abs().amax(1, keepdim=True) / 7
    assert torch.allclose(written["0.weight"], (trained["net.0.weight"] / scale).round() * scale, atol=1e-5)
    assert torch.equal(written["2.weight"], trained["net.2.weight"])


@pytest.mark.parametrize(("args", "error", "message"), [
    (["quantize_task:model", "--out", "full"], CheckpointError, "--out must be a new or empty folder"),
    (["quantize_task", "--out", "out"], ConfigError, "MODEL must be module:function"),
    (["quantize_task:nobody", "--out", "out"], ConfigError, "must name a function of quantize_task"),
    (["no_such_module:f", "--out", "out"], ConfigError, "must name an importable module"),
    (["quantize_task:nothing", "--out", "out"], ConfigError, "must return a model"),
    (["quantize_task:model", "--out", "out"], ConfigError, "calibration must be given"),
    (["quantize_task:model", "--out", "out", "--latency"], ConfigError, "for --latency, got a model alone"),
    (["quantize_task:model", "--out", "out", "--scheme", "int7"], ConfigError, "scheme must be one of"),
    (["quantize_task:model", "--out", "out", "--set", "range"], ConfigError, "--set must be NAME=VALUE"),
    (["quantize_task:model", "--out", "out", "--set", "rnge=kl"], ConfigError, "did you mean 'range'"),
])  # fmt: skip
def test_refusals_write_nothing(run, tmp_path, args, error, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    with pytest.raises(error, match=message):
        run(*args)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["kept"]


def test_a_model_with_a_shared_weight_is_saved_once(run, tmp_path, monkeypatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 16), nn.Linear(16, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    monkeypatch.setattr(run.task, "model", Tied)
    assert run("quantize_task:model", "--out", "out", "--scheme", "int8_weight").exit_code == 0
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["embed.weight"]


def test_latencies_are_told_of_every_form_that_runs(run, tmp_path):
    result = run("quantize_task:model_and_inputs", "--out", "out", "--scheme", "int8_dynamic", "--latency")
    assert result.exit_code == 0
    told = json.loads((tmp_path / "out" / "eff_quantization.json").read_text())["milliseconds"]
    assert set(told) == {"float32", "bfloat16", "int8 reference", "torchao"}
    assert all(value > 0 for value in told.values())
    assert "one forward, one thread: float32" in result.stdout
    assert torch.get_num_threads() >= 1


def test_a_form_without_kernels_is_left_out():
    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())  # a bf16 weight meets a float32 input

    from shared_core.quantization.latency import latencies

    model = nn.Sequential(Wide(8, 8), nn.Linear(8, 4))
    found = latencies(model, quantize(model, "int8_weight"), torch.ones(2, 8), repeats=1)
    assert "bfloat16" not in found
    assert "float32" in found
