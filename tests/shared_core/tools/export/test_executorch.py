"""Programs for ExecuTorch: exact where arithmetic on codes says so, on XNNPACK's integers where they fit."""

import sys

import pytest
import torch
from commands import eff, told_by
from quantization_export_runs import Tokens, conv2d, conv3d, examples, expected, mlp, trained
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError
from shared_core.quantization import apply_ranges
from shared_core.tools.export import export_executorch

pytest.importorskip("executorch", reason="pip install 'efftrain[executorch]'")


def outputs(file, x):
    from executorch.runtime import Runtime

    return Runtime.get().load_program(str(file)).load_method("forward").execute([x])[0]


def quantized(build, **options):
    model, ranges = trained(build, finish=True, **options)
    return apply_ranges(model, ranges)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (mlp, {"scheme": "int8"}),
        (conv2d, {"scheme": "int8"}),
        (Tokens, {"scheme": "int8"}),
        (mlp, {"scheme": "int8_weight"}),
        (mlp, {"scheme": "int8", "activation_bits": 4}),
        (mlp, {"scheme": "int4_weight", "group_size": 8}),
    ],
)
def test_without_calibration_a_program_computes_what_the_model_does(build, options, tmp_path):
    model, x = quantized(build, **options), examples(build)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_executorch(model, x, tmp_path / "model.pte")
    assert torch.allclose(outputs(tmp_path / "model.pte", x), torch.from_numpy(expected(model, x)), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("build", [mlp, conv2d])
def test_calibration_brings_every_layer_onto_integer_kernels(build, tmp_path):
    model, x = quantized(build, scheme="int8"), examples(build)
    without = export_executorch(model, x, tmp_path / "exact.pte")
    report = export_executorch(model, x, tmp_path / "model.pte", calibration=[examples(build) for _ in range(3)])
    assert set(report.integer) == set(report.quantized) > set(without.integer)
    assert report.other_operators == {}
    exact = torch.from_numpy(expected(model, x))
    change = (outputs(tmp_path / "model.pte", x) - exact).abs().max() / exact.abs().max()
    assert 0 < change < 0.03
    assert report.relative_change == pytest.approx(change.item(), rel=1e-3)


def test_ranges_of_tokens_run_on_integers(tmp_path):
    report = export_executorch(quantized(mlp, scheme="int8_dynamic"), examples(mlp), tmp_path / "model.pte")
    assert report.integer == ("0", "2", "4")
    assert report.relative_change < 0.03


def test_codes_make_a_quarter_of_the_file_and_a_float_model_goes_too(tmp_path):
    def wide():
        return nn.Sequential(nn.Linear(24, 400), nn.ReLU(), nn.Linear(400, 400))

    x = torch.randn(2, 24)
    plain = export_executorch(wide(), x, tmp_path / "float.pte")
    assert plain.quantized == ()
    assert plain.relative_change < 1e-5
    codes = export_executorch(quantized(wide, shape=(24,), scheme="int8"), x, tmp_path / "codes.pte")
    assert codes.bytes < 0.3 * plain.bytes


def test_refusals_write_nothing(tmp_path):
    file = tmp_path / "model.pte"
    with pytest.raises(ConfigError, match="example_inputs must hold a tensor"):
        export_executorch(quantized(mlp, scheme="int8"), None, file)
    with pytest.raises(CompatibilityError, match="ExecuTorch's runtime"):
        export_executorch(quantized(conv3d, scheme="int8"), examples(conv3d), file)
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_program_that_agrees(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "program_task.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 2), torch.ones(1, 4)\n"
    )
    line = ["export", "program_task:build", "--out", str(tmp_path / "m.pte"), "--format", "executorch"]
    assert told_by(*line)["relative_change"] < 1e-5
    assert "portable kernels: none" in eff(*line).stdout
    sys.modules.pop("program_task")
