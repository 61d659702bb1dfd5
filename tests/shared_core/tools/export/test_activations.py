"""Codes between convolutions in exported files: where quantizers are added, what they change, which kernels run."""

import importlib

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from plain_loop import begun_session, plain_step
from quantization_export_runs import assert_close_in_steps, constants, conv2d, expected, kinds, mlp, run, trained
from torch import nn

from shared_core.checkpoint_formats.plain import read_deployment, write_deployment
from shared_core.errors import ConfigError, MissingExtraError
from shared_core.quantization import apply_ranges, quantize
from shared_core.tools.export import export_onnx

# the package has a function of this name too
export_module = importlib.import_module("shared_core.tools.export.onnx")


class Residual(nn.Module):
    """A stem, two residual blocks, the second with a projection, an average pool and a head."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.up, self.down = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.wide, self.back, self.side = nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 1, 1), nn.Conv2d(8, 12, 1, 2)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.down(torch.relu(self.up(x))) + x)
        x = torch.relu(self.back(torch.relu(self.wide(x))) + self.side(x))
        return self.head(x.mean((2, 3)))


class Skips(nn.Module):
    """Convolutions whose outputs are concatenated, and one that is the output."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = torch.relu(self.one(x))
        return self.three(torch.cat([x, F.relu6(self.two(x))], 1))


class Pyramid(nn.Module):
    """What detectors do: halves of channels, pools of pools, upsampling, shuffled channels, concatenations."""

    def __init__(self):
        super().__init__()
        self.stem, self.narrow, self.down = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(12, 8, 3, 2, 1)
        self.pools, self.up, self.head = nn.Conv2d(24, 8, 1), nn.Conv2d(20, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        one, two = F.leaky_relu(self.stem(x)).chunk(2, 1)
        x = torch.cat([one, two, torch.relu(self.narrow(two))], 1)
        y = torch.relu(self.down(x))
        pooled = F.max_pool2d(y, 3, 1, 1)
        y = torch.relu(self.pools(torch.cat([y, pooled, F.max_pool2d(pooled, 3, 1, 1)], 1)))
        y = F.interpolate(y.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2), scale_factor=2.0)
        return self.head(torch.relu(self.up(torch.cat([y, x], 1))).mean((2, 3)))


class Decoder(nn.Module):
    """A transposed convolution, which stays in float, beside codes that skipped it."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.up = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.three, self.head = nn.Conv2d(16, 8, 3, 1, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.one(x))
        x = torch.cat([x, self.up(torch.relu(self.two(x)))], 1)
        return self.head(torch.relu(self.three(x)).mean((2, 3)))


def pooled():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def images(batch=8):
    return torch.randn(batch, 3, 16, 16) + 0.3


def calibration():
    return [images() for _ in range(4)]


def net(build, **options):
    return trained(build, shape=(3, 16, 16), steps=2, **options)[0]


@pytest.mark.parametrize(
    ("build", "nodes", "added"),
    [
        (pooled, {"QGemm": 1, "QLinearConv": 2}, 1),
        # the codes of the sums are those that training gave the layers behind them
        (Residual, {"QGemm": 1, "QLinearAdd": 2, "QLinearConv": 6}, 4),
        (Skips, {"QLinearConcat": 1, "QLinearConv": 2}, 1),
        (conv2d, {"QGemm": 1, "QLinearConv": 2}, 0),
        (Pyramid, {"QGemm": 1, "QLinearConcat": 3, "QLinearConv": 5, "QLinearLeakyRelu": 1}, 6),
        (Decoder, {"QGemm": 1, "QLinearConcat": 1, "QLinearConv": 3}, 2),
    ],
)
def test_all_convolutions_but_the_output_run_on_integers(build, nodes, added, tmp_path):
    model, path, optimized = net(build), tmp_path / "model.onnx", tmp_path / "optimized.onnx"
    x = images(64)
    exact = expected(model, x)
    for batches in (None, calibration()):  # the ranges that training observed, or those of these batches
        report = export_onnx(model, images(), path, calibration=batches)
        assert report.integer_nodes == nodes
        assert len(report.quantized_activations) == added
        assert report.float_activations == ()
        assert report.largest_difference <= 1e-5
        assert report.relative_change < 0.05
        y = run(path, x)
        assert np.abs(y - exact).max() < 0.05 * np.abs(exact).max()
        assert_close_in_steps(run(path, x, optimize=True, save=optimized), y)
        assert kinds(optimized).count("Conv") == (1 if build is Skips else 0)


class Joins(nn.Module):
    """Two convolutions, of which the second's output is joined with other values before a third reads it."""

    def __init__(self, join):
        super().__init__()
        self.join = join
        # momentum 1: the statistics of evaluation follow the data within two steps
        convolutions = (nn.Conv2d(inputs, 8, 3, 1, 1, bias=False) for inputs in (3, 8))
        self.one, self.two = (nn.Sequential(one, nn.BatchNorm2d(8, momentum=1.0)) for one in convolutions)
        self.squeeze, self.expand = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.last, self.head = nn.Conv2d(16 if join == "concat" else 8, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.one(x))
        y = getattr(self, f"_{self.join}")(x, self.two(x))
        return self.head(F.adaptive_avg_pool2d(torch.relu(self.last(y)), 1).flatten(1)), y.mean((2, 3))

    def _add(self, x, y):
        return torch.relu(y + x)

    def _concat(self, x, y):
        return torch.cat([x, torch.relu(y)], 1)

    def _pool(self, x, y):
        return F.avg_pool2d(torch.relu(y), 2)

    def _hardswish(self, x, y):
        return F.hardswish(y)

    def _silu(self, x, y):
        return F.silu(y)

    def _gate(self, x, y):
        gate = self.expand(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return y * torch.sigmoid(gate)


def trained_in_a_session(join, folder, **options):
    """Train, save what a deployment needs, and return the plain model with it."""
    torch.manual_seed(0)
    model = Joins(join)
    skip = () if join == "gate" else ("squeeze", "expand")
    session, optimizer = begun_session({"qat": {"scheme": "int8", "skip": skip, **options}}, model, 2, lr=0.02)
    for _ in range(2):
        plain_step(session, optimizer, sum(y.square().mean() for y in model(images())))
    session.finish()
    write_deployment(folder, session.files.deployment())
    plain = Joins(join)
    plain.load_state_dict(model.state_dict())
    return apply_ranges(plain, read_deployment(folder)["qat"]["ranges"]).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join", "nodes"),
    [
        ("add", {"QLinearAdd": 1, "QLinearConv": 3}),
        ("concat", {"QLinearConcat": 1, "QLinearConv": 3}),
        ("pool", {"QLinearAveragePool": 1, "QLinearConv": 3}),
        ("hardswish", {"QLinearConv": 3}),
        ("silu", {"QLinearConv": 3, "QLinearMul": 1, "QLinearSigmoid": 1}),
        ("gate", {"QLinearConv": 5, "QLinearMul": 1, "QLinearSigmoid": 1}),
    ],
)
def test_a_session_saves_all_that_a_file_of_integers_needs(join, nodes, tmp_path):
    report = export_onnx(trained_in_a_session(join, tmp_path), images(), tmp_path / "model.onnx")
    assert report.integer_nodes == {"QGemm": 1, **nodes}
    assert report.float_activations == ()
    assert report.relative_change < 0.05


@pytest.mark.slow
def test_layers_whose_ranges_are_not_those_in_the_file_stay_in_float(tmp_path):
    # the file has the batch norm in the convolution, whose output training observed without it
    model, path = trained_in_a_session("add", tmp_path, fold_batch_norm=False), tmp_path / "model.onnx"
    assert len(export_onnx(model, images(), path).float_activations) == 1
    assert export_onnx(model, images(), path, calibration=calibration()).float_activations == ()


@pytest.mark.slow
def test_layers_of_equal_codes_share_the_widest_range(tmp_path):
    def build():
        first, second = nn.Conv2d(3, 3, 3, 1, 1, bias=False), nn.Conv2d(3, 3, 3, 1, 1, bias=False)
        return nn.Sequential(
            first, nn.Hardswish(), second, nn.Hardswish(), nn.AvgPool2d(16), nn.Flatten(), nn.Linear(3, 2)
        )

    model = build()
    model[2].load_state_dict(model[0].state_dict())
    ranges = {"0": {"min": -3.0, "max": 3.0, "output": {"min": -1.0, "max": 9.0}},
              "2": {"min": -3.0, "max": 3.0, "output": {"min": -5.0, "max": 2.0}}}  # fmt: skip
    for layer in (model[0], model[2]):
        layer.weight.data = (layer.weight.detach() * 100).round().clamp(-127, 127) / 64
        layer.weight.data[:, 0, 0, 0] = 127 / 64
    report = export_onnx(apply_ranges(model.eval(), ranges), images(), tmp_path / "model.onnx")
    codes = [(0 - zero) * scale for scale, zero in report.quantized_activations.values()]
    assert codes == [pytest.approx(-5, abs=0.06)] * 2


@pytest.mark.slow
def test_the_file_computes_the_model_with_its_new_codes(tmp_path):
    model, path = net(pooled), tmp_path / "model.onnx"
    report = export_onnx(model, images(), path, calibration=calibration())
    (name,) = report.quantized_activations
    found = constants(path)
    scale, zero = torch.tensor(found[f"{name}_scale"]), int(found[f"{name}_zero_point"])
    assert found[f"{name}_zero_point"].dtype == np.uint8
    x = images(32)

    def quantized(values):  # ONNX QuantizeLinear, then DequantizeLinear
        return (torch.clamp(torch.round(values / scale) + zero, 0, 255) - zero) * scale

    with torch.no_grad():
        before = model[:3](x)
        reference = model[4:](F.hardswish(quantized(before))).numpy()
    assert scale * (0 - zero) <= before.min() + 0.2 * before.abs().max()  # the range is that of what was seen
    assert scale * (255 - zero) >= 0.8 * before.max()
    difference = np.abs(run(path, x) - reference)
    assert np.median(difference) < 5e-6  # the biases are rounded, and a code may lie on the other side of a tie
    assert_close_in_steps(run(path, x), reference)


@pytest.mark.slow
def test_a_tapped_tensor_is_quantized_once_with_the_step_of_the_layer_that_reads_it(tmp_path):
    model, path = net(Residual), tmp_path / "model.onnx"
    export_onnx(model, images(), path, calibration=calibration())
    nodes = onnx.load(path).graph.node
    readers = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node.op_type)
    sums = [node for node in nodes if node.op_type == "Add"]
    makers = {name: node for node in nodes for name in node.output}
    assert len(sums) == 2
    for node in sums:
        assert [makers[name].op_type for name in node.input] == ["DequantizeLinear"] * 2
    tap = makers[makers[sums[0].input[1]].input[0]]
    assert tap.input[1] == "up.input_scale"
    assert readers[tap.input[0]] == ["QuantizeLinear"]
    relu = next(node for node in nodes if node.op_type == "Relu")
    assert relu.output[0] == tap.input[0]


@pytest.mark.slow
def test_biases_go_on_the_grid_of_the_sums_where_steps_are_coarse(tmp_path):
    model, path = net(Residual, range="lsq", activation_bits=8), tmp_path / "model.onnx"
    for batches in (None, calibration()):
        assert export_onnx(model, images(), path, calibration=batches).integer_nodes["QLinearConv"] == 6
    found = constants(path)
    graph = onnx.load(path).graph
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type == "Conv":
            x, weight, bias = (makers[name] for name in node.input)
            step = found[x.input[1]] * found[weight.input[1]]
            assert np.allclose(found[bias.input[1]], step, rtol=1e-6)
    stem = makers[next(node for node in graph.node if node.op_type == "Conv").input[2]]
    assert found[stem.input[0]].dtype == np.int32
    assert not any(name.endswith(".bias_codes") for name in found if not name.startswith("head"))  # no orphans


@pytest.mark.slow
def test_few_bits_keep_their_clip_and_the_tap_gets_eight_bits_of_its_own(tmp_path):
    model, path = net(Residual, activation_bits=4), tmp_path / "model.onnx"
    report = export_onnx(model, images(), path, calibration=calibration())
    assert len(report.quantized_activations) == 5  # that of the tapped stem too
    assert report.integer_nodes["QLinearConv"] >= 3
    x = images(32)
    change = np.abs(run(path, x) - expected(model, x)).max()
    assert change < 0.25 * np.abs(expected(model, x)).max()  # a code of 4 bits that moves is a step of 1/15


@pytest.mark.slow
def test_linear_layers_are_left_as_they_are(tmp_path):
    torch.manual_seed(0)
    model, _ = trained(mlp)
    x = torch.randn(8, 24)
    export_onnx(model, x, tmp_path / "exact.onnx")
    report = export_onnx(model, x, tmp_path / "model.onnx", calibration=[x])
    assert report.quantized_activations == {}
    assert report.relative_change < 0.01
    assert np.array_equal(run(tmp_path / "model.onnx", x), run(tmp_path / "exact.onnx", x))


def test_refusals(tmp_path, monkeypatch):
    model, path = net(pooled), tmp_path / "model.onnx"
    with pytest.raises(ConfigError, match="export_onnx: calibration must hold batches, got none"):
        export_onnx(model, images(), path, calibration=[])
    with pytest.raises(ConfigError, match="calibration must hold what the model takes, got Tensor"):
        export_onnx(model, images(), path, calibration=[torch.zeros(2, 4, 16, 16)])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        export_module.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name)
    )
    with pytest.raises(MissingExtraError, match=r"needs onnxruntime, .* pip install 'efftrain\[onnx\]'"):
        export_onnx(model, images(), path, calibration=calibration())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", [7, 6, 4, 3])
def test_a_batch_norm_that_changes_signs_is_folded_into_weights_of_few_bits(bits, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 3)).eval()
    nn.init.normal_(net[1].weight)
    x = images(8)
    quantized = quantize(
        net,
        {"scheme": "int8", "weight_bits": bits, "fold_batch_norm": False, "overrides": {"3": {"weight_bits": 8}}},
        [x],
    )
    # the scale of least error has one more code below zero than above
    rows = quantized[0].weight.detach().flatten(1)
    assert bool((rows.amin(1) < -1.001 * rows.amax(1)).any())
    report = export_onnx(quantized, x, tmp_path / "model.onnx", calibration=[x])
    assert report.integer_nodes["QLinearConv"] == 1
    assert report.largest_difference <= 1e-5
