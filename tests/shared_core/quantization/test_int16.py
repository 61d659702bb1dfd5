"""Static int16 inputs with int8 weights, against float64 and int64 references: training, conversion and ONNX."""

import copy

import numpy as np
import onnx
import pytest
import torch
from plain_loop import begun_session, plain_step
from quantization_export_runs import Tokens, constants, conv2d, examples, expected, mlp, run, trained
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError
from shared_core.quantization import QatConfig, apply_ranges, conversion_report, convert, quantize_with_report
from shared_core.quantization.schemes import LayerScheme
from shared_core.quantization.starting import _options_of
from shared_core.tools.export import export_onnx

SCHEME = LayerScheme(activation_bits=16, symmetric=True)
ENTRY = {"weight_bits": 8, "input": "static", "activation_bits": 16, "symmetric": True}


def codes_of(x, largest):
    """Codes and scale of an input: s = max|x| / 32767, without a zero point."""
    scale = np.float64(np.float32(np.float32(largest) / np.float32(32767)))
    return np.clip(np.rint(x / scale), -32768, 32767), scale


@pytest.mark.parametrize("options", [{"scheme": "int16"}, {"weights": "int8", "inputs": "int16_static"}])
def test_the_names_give_this_scheme(options):
    config = QatConfig(**options)
    assert config.layer_scheme == SCHEME
    assert (SCHEME.input_range, SCHEME.has_wide_inputs) == ((-32768, 32767), True)
    assert "int16 inputs with fixed symmetric ranges" in config.formats


@pytest.mark.parametrize("largest", [3.0, 0.011])
def test_inputs_round_to_the_grid_and_pass_gradients_inside(largest):
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    made = apply_ranges(layer, {"": {**ENTRY, "min": -0.5 * largest, "max": largest}})
    x = torch.linspace(-1.5 * largest, 1.5 * largest, 20001).view(-1, 1).requires_grad_()
    y = made(x)
    y.sum().backward()
    codes, scale = codes_of(x.detach().double().numpy(), largest)
    np.testing.assert_allclose(y.detach().double().numpy(), codes * scale, atol=1.001 * scale)
    near = np.abs(y.detach().double().numpy() - codes * scale) < 0.01 * scale
    assert near.mean() > 0.99  # float32 may round a tie to either side
    outside = np.abs(x.detach().numpy()) > largest * (1 + 1e-4)
    assert not x.grad.numpy()[outside].any()
    assert (x.grad.numpy()[np.abs(x.detach().numpy()) < largest] == 1).all()


def test_training_observes_the_largest_magnitude():
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    session, optimizer = begun_session({"qat": {"scheme": "int16", "range": "minmax"}}, net, 3)
    largest = 0.0
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) - 0.5
        largest = max(largest, x.abs().max().item())
        with session.forward():
            plain_step(session, optimizer, net(x).square().mean())
    scale, zero_point = net[0].quantizer.qparams(net[0])
    assert float(scale) == pytest.approx(largest / 32767, rel=1e-6)
    assert int(zero_point) == 0
    session.finish()
    entry = session.receipt()["techniques"]["qat"]["per_layer"][0]
    assert (entry["weight_bits"], entry["activation_bits"]) == (8, 16)
    assert _options_of(session.techniques["qat"].ranges()) == {
        "weights": "int8", "inputs": "int16_static", "weight_bits": 8, "include": ["0", "2"], "overrides": [],
    }  # fmt: skip


def test_after_training_the_error_is_that_of_the_weights():
    torch.manual_seed(0)
    net = conv2d().eval()
    data = [examples(conv2d, 16) for _ in range(3)]
    x = data[0]  # not clipped
    with torch.no_grad():
        exact = net(x)
        found = {name: quantize_with_report(net, name, data)[0](x) for name in ("int8", "int16", "int8_weight")}
    errors = {name: (y - exact).double().norm().item() for name, y in found.items()}
    assert errors["int16"] < errors["int8"]
    assert errors["int16"] == pytest.approx(errors["int8_weight"], rel=0.02)
    assert quantize_with_report(net, "int16", data)[1].ranges["0"]["symmetric"] is True


@pytest.mark.parametrize("make", [mlp, conv2d], ids=lambda make: make.__name__)
def test_conversion_computes_the_same_codes_and_sums(make):
    model, _ = trained(make, scheme="int16")
    converted = convert(model)
    x = examples(make, 32)
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model.eval()(x), rtol=0, atol=1e-4)
    kernels = {entry["kernel"] for entry in conversion_report(converted).values()}
    assert kernels == {"reference: integers, summed in float64"}
    fast = conversion_report(convert(model, backend="auto"))
    assert all("no kernel here multiplies int16 by int8" in entry["why"] for entry in fast.values())


def test_sums_beyond_32_bits_are_exact():
    width = 1200
    layer = nn.Linear(width, 2, bias=False)
    with torch.no_grad():
        layer.weight[0] = 1.0
        layer.weight[1] = torch.tensor([1.0, -1.0]).repeat(width // 2)
    converted = convert(layer, {"": {**ENTRY, "min": -1.0, "max": 1.0}})
    x = torch.ones(2, width)
    x[1, ::2], x[1, 1::2] = torch.rand(width // 2), -1.0
    x = x.double()
    codes = converted.quantize_input(x)
    assert (codes.dtype, codes.max().item()) == (torch.int16, 32767)
    sums = codes.numpy().astype(np.int64) @ converted.weight_codes.numpy().astype(np.int64).T
    assert sums.max() > 2**31
    exact = sums * converted.input_scale.double().numpy() * converted.weight_scale.double().numpy()
    np.testing.assert_array_equal(converted(x).numpy(), exact)


@pytest.mark.parametrize("make", [mlp, conv2d, Tokens, lambda: Recurrent()], ids=["mlp", "conv2d", "tokens", "lstm"])
def test_onnx_files_have_int16_codes_and_run_in_onnxruntime(make, tmp_path):
    build = make if make in (mlp, conv2d, Tokens) else mlp
    model = trained_on(make, build)
    path = tmp_path / "model.onnx"
    report = export_onnx(model, examples(build), path)
    assert report.largest_difference <= 1e-5
    zeros = {name: value for name, value in constants(path).items() if name.endswith("input_zero_point")}
    assert zeros
    assert all(value.dtype == np.int16 and value == 0 for value in zeros.values())
    onnx.checker.check_model(onnx.load(path), full_check=True)
    x = examples(build, 64)
    for optimize in (False, True):
        np.testing.assert_allclose(run(path, x, optimize=optimize), expected(model, x), atol=1e-4)


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(24, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(1))[0][:, -1])


def trained_on(make, build):
    net = make()
    session, optimizer = begun_session({"qat": {"scheme": "int16"}}, net, 3, lr=0.01)
    for step in range(3):
        torch.manual_seed(step)
        with session.forward():
            plain_step(session, optimizer, net(examples(build, 32)).square().mean())
    session.finish()
    return apply_ranges(copy.deepcopy(net), session.files.deployment()["qat"]["ranges"]).eval()


def test_layers_of_8_and_of_16_bits_go_into_one_file(tmp_path):
    model, _ = trained(conv2d, scheme="int8", overrides={"6": {"inputs": "int16_static"}})
    path = tmp_path / "model.onnx"
    report = export_onnx(model, examples(conv2d), path, calibration=[examples(conv2d, 32)])
    found = constants(path)
    assert found["6.input_zero_point"].dtype == np.int16
    assert found["0.input_zero_point"].dtype == np.uint8
    assert report.integer_nodes["QLinearConv"] == 1  # the other one hands more than 8 bits on
    assert report.relative_change < 0.05


def test_refusals(tmp_path):
    for name in ("kl", "mse", "lsq", "lsq_plus", "pact"):
        with pytest.raises(ConfigError, match=f"range={name} needs inputs other than fp8_static and int16_static"):
            QatConfig(scheme="int16", range=name)
    with pytest.raises(ConfigError, match="activation_bits needs inputs of int8_static"):
        QatConfig(scheme="int16", activation_bits=8)
    for odd in ({"activation_bits": 16, "symmetric": False}, {"activation_bits": 12, "symmetric": True}):
        with pytest.raises(ConfigError, match="activation_bits"):
            apply_ranges(nn.Linear(2, 1), {"": {**ENTRY, "min": 0.0, "max": 1.0, **odd}})
    model, _ = trained(mlp, scheme="int16")
    with pytest.raises(CompatibilityError, match=r"has int16 codes.*use inputs of int8_static"):
        export_onnx(model, examples(mlp), tmp_path / "model.onnx", target="tensorrt")
