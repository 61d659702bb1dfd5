"""Weights as unsigned codes: the same values, kept exact by kernels on which signed ones saturate."""

import numpy as np
import onnx
import pytest
import torch
from quantization_export_runs import assert_close_in_steps, constants, expected, run
from torch import nn

from shared_core.errors import CompatibilityError
from shared_core.quantization import quantize
from shared_core.tools.export import export_onnx
from shared_core.tools.export import onnx_files as export_unsigned
from shared_core.tools.export.onnx_files import onnxruntime_sums_exactly, wants_unsigned


def linear():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 6))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 6)
    )


INPUTS = {linear: (50, 32), convolutional: (5, 8, 8, 8)}


def quantized(build, scheme, bits=8):
    """Return a model whose weights are far apart, so that many pairs of products are large, and inputs."""
    torch.manual_seed(0)
    net, x = build(), torch.randn(*INPUTS[build]) * 3
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    calibration = [x] if scheme == "int8" else None
    return quantize(net, {"scheme": scheme, "weight_bits": bits}, calibration), x


@pytest.mark.parametrize("bits", [8, 7, 4])
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int8_weight"])
@pytest.mark.parametrize("build", INPUTS)
def test_what_is_right_for_this_processor_is_exact_on_its_integer_kernels(build, scheme, bits, tmp_path):
    model, x = quantized(build, scheme, bits)
    path = tmp_path / "model.onnx"
    report = export_onnx(model, x, path)
    assert report.unsigned_weights == (bits == 8 and not onnxruntime_sums_exactly())
    assert_close_in_steps(run(path, x, optimize=True), expected(model, x))
    for name, value in constants(path).items():
        if "weight_codes" in name and bits < 8:
            assert np.abs(value.astype(int)).max() <= 64  # 255·64·2 fits 16 bits


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("build", INPUTS)
def test_unsigned_codes_are_the_signed_ones_and_run_on_the_same_kernels(build, scheme, tmp_path):
    model, x = quantized(build, scheme)
    reports, values = {}, {}
    for kind in ("signed", "unsigned"):
        reports[kind] = export_onnx(model, x, tmp_path / kind, weight_codes=kind, verify=kind == "unsigned")
        found = constants(tmp_path / kind)
        values[kind] = [value.astype(int) for value in found.values() if value.dtype == np.int8 and value.ndim > 1]
        moved = [value.astype(int) - 128 for value in found.values() if value.dtype == np.uint8 and value.ndim > 1]
        values[kind] += moved
        assert len(moved) == (0 if kind == "signed" else len(values["signed"]))
    assert reports["signed"].integer_nodes == reports["unsigned"].integer_nodes != {}
    assert not reports["signed"].unsigned_weights
    for one, other in zip(*values.values(), strict=True):
        assert np.array_equal(one, other)
    assert_close_in_steps(run(tmp_path / "unsigned", x, optimize=True), expected(model, x))
    onnx.checker.check_model(tmp_path / "unsigned", full_check=True)


def test_tied_rows_of_an_embedding_stay_signed(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 20)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens).relu())

    torch.manual_seed(0)
    model, tokens = quantize(Tied(), "int8_dynamic"), torch.arange(20).view(4, 5)
    report = export_onnx(model, tokens, tmp_path / "tied", weight_codes="unsigned")
    assert report.unsigned_weights
    assert_close_in_steps(run(tmp_path / "tied", tokens, optimize=True), expected(model, tokens))


def test_large_weights_of_tokens_are_unsigned_too(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1000, 1100), nn.ReLU(), nn.Linear(1100, 4))  # too large to be transposed in advance
    model, x = quantize(net, "int8_dynamic"), torch.randn(3, 1000)
    report = export_onnx(model, x, tmp_path / "model.onnx", weight_codes="unsigned")
    assert report.unsigned_weights
    weights = [value for value in constants(tmp_path / "model.onnx").values() if value.ndim == 2 and value.size > 1000]
    assert [value.dtype for value in weights] == [np.uint8, np.uint8]
    assert_close_in_steps(run(tmp_path / "model.onnx", x, optimize=True), expected(model, x))


@pytest.mark.parametrize("exact", [True, False])
def test_auto_asks_onnxruntime(monkeypatch, tmp_path, exact):
    model, x = quantized(linear, "int8")
    monkeypatch.setattr(export_unsigned, "onnxruntime_sums_exactly", lambda: exact)
    report = export_onnx(model, x, tmp_path / "model.onnx", verify=False)
    assert report.unsigned_weights == (not exact)


def test_without_onnxruntime_weights_are_unsigned(monkeypatch):
    onnxruntime_sums_exactly.cache_clear()
    monkeypatch.setattr(export_unsigned, "find_spec", lambda name: None)
    assert wants_unsigned("auto")
    onnxruntime_sums_exactly.cache_clear()


def test_what_saturates_is_not_written(tmp_path):
    model, x = quantized(linear, "int8_dynamic")
    path = tmp_path / "model.onnx"
    if onnxruntime_sums_exactly():
        export_onnx(model, x, path, weight_codes="signed")
        assert_close_in_steps(run(path, x, optimize=True), expected(model, x))
        return
    with pytest.raises(CompatibilityError, match="must equal the model's"):
        export_onnx(model, x, path, weight_codes="signed")
    assert not any(tmp_path.iterdir())
