"""The command eff export: files that either trainer saved become ONNX, and what it refuses."""

import functools
import json
import runpy

import commands
import numpy as np
import onnxruntime
import pytest
import torch
from quantization_export_runs import examples, expected, mlp, run, trained
from reports import report_of, row
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shared_core import training
from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.engine.saving.state_file import save_state
from shared_core.errors import CheckpointError, ConfigError
from shared_core.quantization import apply_ranges

TASK = """
import torch
from torch import nn
def build():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 40), nn.GELU(), nn.Linear(40, 10))
    return net, torch.ones(2, 24)
class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
    def forward(self, x):
        x = torch.relu(self.one(x))
        return self.head(torch.relu(self.two(x) + x).mean((2, 3)))
def residual():
    torch.manual_seed(1)
    return Residual(), batches()[0]
def batches():
    return torch.randn(3, 4, 3, 8, 8, generator=torch.Generator().manual_seed(2)).unbind()
def alone():
    return build()[0]
def none():
    pass
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    commands.user_module(tmp_path, monkeypatch, "export_task", TASK)
    return tmp_path


eff = functools.partial(commands.eff, "export")


@pytest.mark.slow
def test_the_command_exports_what_either_trainer_saved(room):
    model, ranges = trained(mlp, finish=True)
    deployment = {"qat": {"ranges": ranges}}
    (room / "run").mkdir()
    save_file(model.state_dict(), room / "run" / "model.safetensors")
    write_deployment(room / "run", deployment)
    prefixed = {"net." + key: value for key, value in model.state_dict().items()}
    latent = {key: value + 1 for key, value in prefixed.items()}
    inner = {"qat": {"ranges": {"net." + key: value for key, value in ranges.items()}}}
    torch.save({"state_dict": prefixed, "eff_raw_state_dict": latent, "eff_deployment": inner}, room / "last.ckpt")
    x = examples(mlp)
    reference = expected(apply_ranges(model, ranges), x)
    for weights in ("run/model.safetensors", "last.ckpt"):
        result = eff("export_task:build", "--weights", weights, "--out", "model.onnx", "--format", "onnx")
        assert "3 layers quantized" in result.output
        assert "3 QGemm" in result.output
        assert "ms in float" in result.output
        assert np.allclose(run("model.onnx", x), reference, atol=1e-5)
    report = json.loads(eff("export_task:build", "--weights", "run", "--out", "model.onnx", "--json").output)
    assert report["integer_nodes"] == {"QGemm": 3}
    assert report["largest_difference"] <= 1e-5
    assert all(time > 0 for time in report["milliseconds"])
    assert len(report["milliseconds"]) == 2
    assert row(report_of(room / "model.onnx"), "bytes of model.onnx")[1] == f"{report['bytes']:,}"


@pytest.mark.slow
def test_eff_quantize_keeps_the_codes_between_convolutions_that_eff_export_takes(room):
    asked = ["quantize", "export_task:residual", "--calibration", "export_task:batches", "--out", "small"]
    assert not commands.eff(*asked).exit_code
    saved = ["export_task:residual", "--weights", "small"]
    plain = json.loads(eff(*saved, "--out", "kept.onnx", "--json").output)
    assert plain["integer_nodes"] == {"QGemm": 1, "QLinearAdd": 1, "QLinearConv": 2}
    eff(*saved, "--out", "calibrated.onnx", "--calibration", "export_task:batches")
    assert (room / "kept.onnx").read_bytes() == (room / "calibrated.onnx").read_bytes()
    file = room / "small" / "eff_deployment.json"
    deployment = json.loads(file.read_text())
    deployment["qat"]["between_layers"].popitem()  # as of another graph: the ranges of the outputs are used
    write_deployment(room / "small", deployment)
    observed = json.loads(eff(*saved, "--out", "observed.onnx", "--json").output)
    assert observed["integer_nodes"] == plain["integer_nodes"]
    assert observed["quantized_activations"] != plain["quantized_activations"]
    for entry in deployment["qat"]["ranges"].values():
        entry.pop("output", None)
    write_deployment(room / "small", deployment)
    told = eff(*saved, "--out", "float.onnx").output
    assert "2 tensors between convolutions stay in float" in told
    assert "--calibration" in told
    assert "QLinearAdd" not in told


def test_a_sharded_checkpoint_of_lightning_gives_its_baked_weights_and_ranges(room):
    model, ranges = trained(mlp, finish=True)
    baked = {"net." + key: value for key, value in model.state_dict().items()}
    save({"state_dict": baked}, storage_writer=FileSystemWriter(room / "last.ckpt"), no_dist=True)
    latent = {key: value + 1 for key, value in baked.items()}
    inner = {"qat": {"ranges": {"net." + key: value for key, value in ranges.items()}}}
    torch.save({"eff_raw_state_dict": latent, "eff_deployment": inner}, room / "last.ckpt" / "meta.pt")
    assert "3 layers quantized" in eff("export_task:build", "--weights", "last.ckpt", "--out", "model.onnx").output
    x = examples(mlp)
    assert np.allclose(run("model.onnx", x), expected(apply_ranges(model, ranges), x), atol=1e-5)


def test_the_command_writes_over_nothing_but_its_own_kind(room):
    weights = room / "model.safetensors"
    save_file(mlp().state_dict(), weights)
    before = weights.read_bytes()
    with pytest.raises(ConfigError, match=r"--out must be a new file, .*exists"):
        eff("export_task:build", "--weights", weights, "--out", weights)
    assert weights.read_bytes() == before


def test_the_command_refuses(room):
    model, ranges = trained(mlp, finish=True)
    for arguments, error, message in (
        (["export_task:build", "--out", "m", "--opset", "9"], ConfigError, r"--opset must be in \[21, 23\], got 9"),
        (["export_task:build", "--out", "no/m.onnx"], ConfigError, "--out must be in"),
        (["export_task:build", "--out", "."], ConfigError, "--out must be a file, got the folder"),
        (["export_task:build", "--out", "m", "--calibration", "export_task:none"], ConfigError, "must return batches"),
        (["export_task:build", "--out", "m", "--format", "pt"], ConfigError,
         "--format must be one of onnx, executorch, compressed-tensors, torchao, gguf, released, got 'pt'"),
        (["export_task", "--out", "m"], ConfigError, "MODEL must be module:function"),
        (["missing:build", "--out", "m"], ConfigError, "MODEL must name an importable module"),
        (["missing.py:build", "--out", "m"], ConfigError, "there is no file missing.py"),
        (["export_task:nothing", "--out", "m"], ConfigError, "must name a function of export_task"),
        (["export_task:alone", "--out", "m"], ConfigError, "must return .model, example_inputs., got a model alone"),
        (["export_task:build", "--out", "m", "--length", "4"], ConfigError, "--length .*a folder"),
        ([".", "--out", "m", "--weights", "."], ConfigError, "--weights must be left out for a folder"),
        (["export_task:build", "--out", "m", "--weights", "absent"], CheckpointError, "absent"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            eff(*arguments)
    save_file({"0.weight": model[0].weight.detach()}, room / "model.safetensors")
    for deployment in ({}, {"qat": {"ranges": ranges}}):
        if deployment:
            write_deployment(room, deployment)
        with pytest.raises(CheckpointError, match="model: missing"):
            eff("export_task:build", "--out", "m", "--weights", "model.safetensors")
    assert not (room / "m").exists()


def test_weights_that_qat_did_not_write_are_exported_in_float_and_that_is_told(room):
    plain, inputs = runpy.run_path("export_task.py")["build"]()
    with torch.no_grad():
        plain[0].weight.mul_(2)
    save_file(plain.state_dict(), room / "model.safetensors")
    result = eff("export_task:build", "--weights", "model.safetensors", "--out", "m.onnx")
    assert "all layers in float" in result.output
    session = onnxruntime.InferenceSession(room / "m.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    assert np.allclose(found, plain(inputs).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("begin", [0, 3])
def test_a_checkpoint_from_before_the_end_of_qat_is_refused_and_not_written_in_float(room, begin):
    (plain, inputs), folder = runpy.run_path("export_task.py")["build"](), room / "checkpoint-2"
    folder.mkdir()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with training({"qat": {"scheme": "int8", "begin": begin}}, plain, optimizer, total_steps=4) as loop:
        for step in range(4):
            with loop.forward():
                loss = plain(inputs).square().mean()
            loop.backward(loss)
            loop.step()
            loop.zero_grad()
            if step == 1:
                save_state(folder, loop.session.state_dict())
                weights = runpy.run_path("export_task.py")["build"]()[0].state_dict()
                save_file(weights, folder / "model.safetensors")
    arguments = ("export_task:build", "--weights", "checkpoint-2", "--out", "m.onnx")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2.*save_model"):
        eff(*arguments)
    assert not (room / "m.onnx").exists()
    # a run without qat has nothing to finish
    save_state(folder, {"step": 2, "recipe": {"prune": {}}})
    assert "all layers in float" in eff(*arguments).output
