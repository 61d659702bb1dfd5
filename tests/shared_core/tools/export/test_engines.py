"""Rules of engines: a graph that breaks each one is refused by the node's name, and exported files keep all of them."""

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import nn

from shared_core.errors import CompatibilityError
from shared_core.quantization import quantize
from shared_core.tools.export import export_onnx
from shared_core.tools.export.engines import RULES, check_target

CONSTANTS = """
    float s = {0.5}, float none = {0.0}, float[2] two = {0.5, 0.5}, float[2] off = {1, 1}, float[2] bias = {1, 2},
    int8 z = {0}, uint8 u = {128}, int8[2] zeros = {0, 0}, int32[2] b = {1, 2}, int8[2,2] m = {1, 2, 3, 4},
    int8[2,2,1,1] k = {1, 2, 3, 4}, int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}
"""
X = "c = QuantizeLinear(x, s, z) x1 = DequantizeLinear(c, s, z)"
W = "w = DequantizeLinear<axis = 0>(k, two, zeros)"
M = "w = DequantizeLinear<axis = 0>(m, two, zeros)"
IMAGE, ROWS = "float[1,2,4,4]", "float[1,2]"
BROKEN = {
    "zero_points_are_zero": ("tensorrt", IMAGE, "c = QuantizeLinear(x, s, u) y = DequantizeLinear(c, s, u)", 0),
    "scales_are_constant_and_positive": (
        "tensorrt", IMAGE, "c = QuantizeLinear(x, none, z) y = DequantizeLinear(c, none, z)", 0),
    "activations_have_one_scale": (
        "openvino", ROWS, "c = QuantizeLinear(x, two, zeros) y = DequantizeLinear(c, two, zeros)", 0),
    "codes_are_dequantized": (
        "tensorrt", IMAGE, "c = QuantizeLinear(x, s, z) d = Clip(c) y = DequantizeLinear(d, s, z)", 1),
    "products_are_of_floats": (
        "openvino", ROWS, "c = QuantizeLinear(x, s, z) i = MatMulInteger(c, m) y = Cast<to = 1>(i)", 1),
    "weights_are_per_output_channel": (
        "tensorrt", ROWS, f"{X} w = DequantizeLinear<axis = 1>(m, two, zeros) y = Gemm<transB = 1>(x1, w, bias)", 2),
    "operands_are_both_codes": ("tensorrt", IMAGE, f"{W} y = Conv(x, w)", 1),
    "biases_are_float": (
        "tensorrt", ROWS, f"{X} {M} d = DequantizeLinear<axis = 0>(b, two) y = Gemm<transB = 1>(x1, w, d)", 4),
    "shortcuts_are_codes": ("tensorrt", IMAGE, f"{X} {W} v = Conv(x1, w) y = Add(v, x)", 4),
    "padding_is_part_of_convolutions": (
        "tensorrt", IMAGE,
        f"p = Pad(x, pads) c = QuantizeLinear(p, s, z) x1 = DequantizeLinear(c, s, z) {W} y = Conv(x1, w)", 4),
    "codes_of_shared_tensors_are_unsigned": ("onnxruntime", ROWS, f"{X} v = Sigmoid(x1) y = Mul(x1, v)", 0),
    "convolutions_pass_on_codes": ("onnxruntime", IMAGE, f"{X} {W} v = Conv(x1, w) y = Sigmoid(v)", 3),
    "quantizers_absorb_relu": (
        "onnxruntime", IMAGE,
        f"{X} {W} v = Conv(x1, w) r = Relu(v) d = QuantizeLinear(r, s, z) y = DequantizeLinear(d, s, z)", 5),
    "sums_are_of_codes": ("onnxruntime", IMAGE, f"{X} y = Add(x1, x)", 2),
    "weights_are_signed_with_a_zero_point": (
        "onnxruntime", ROWS, f"{X} w = DequantizeLinear<axis = 0>(m, two) y = Gemm<transB = 1>(x1, w)", 2),
    "biases_have_the_scale_of_the_sums": (
        "onnxruntime", IMAGE, f"{X} {W} d = DequantizeLinear<axis = 0>(b, off) y = Conv(x1, w, d)", 4),
}  # fmt: skip


def graph_of(inputs, body):
    text = f'<ir_version: 10, opset_import: ["" : 21]> net ({inputs} x) => (float y) <{CONSTANTS}> {{ {body} }}'
    found = onnx_ir.serde.deserialize_model(onnx.parser.parse_model(text))
    for number, node in enumerate(found.graph):
        node.name = f"number_{number}"
    return found.graph


@pytest.mark.parametrize("name", BROKEN)
def test_a_graph_that_breaks_a_rule_is_refused_with_the_node(name):
    target, inputs, body, place = BROKEN[name]
    graph = graph_of(inputs, body)
    rule = next(rule for rule in RULES[target] if rule.__name__ == name)
    assert [broken.node.name for broken in rule(graph)] == [f"number_{place}"]
    with pytest.raises(CompatibilityError, match=f"breaks rules of {target}: .*number_{place} ") as caught:
        check_target(graph, target)
    assert caught.value.remedy


def test_every_rule_has_a_graph_that_breaks_it():
    assert {rule.__name__ for rules in RULES.values() for rule in rules} == {*BROKEN}


class Residual(nn.Module):
    """Sums whose shortcut is the input of a layer, and the output of another convolution."""

    def __init__(self):
        super().__init__()
        self.stem, self.one = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.two, self.down = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 1)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.one(x))
        x = torch.relu(self.two(x) + self.down(x))
        return self.head(x.mean((2, 3)))


class Plain(nn.Module):
    """Layers that TensorRT takes in codes, and those whose weights it takes as floats."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.lstm, self.up = nn.LSTM(8, 4, batch_first=True), nn.ConvTranspose1d(4, 3, 2, stride=2)

    def forward(self, tokens):
        x = self.lstm(torch.relu(self.linear(self.embed(tokens))))[0]
        return self.up(x.transpose(1, 2))


def images():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 6, 6, generator=generator) for _ in range(3)]


def run(path, x):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize(("target", "symmetric"), [("tensorrt", True), ("onnxruntime", False), ("openvino", False)])
def test_an_exported_file_keeps_the_rules(tmp_path, target, symmetric):
    torch.manual_seed(0)
    model = quantize(Residual().eval(), {"scheme": "int8", "symmetric": symmetric}, images())
    report = export_onnx(model, images()[0], tmp_path / "net.onnx", target=target)
    assert report.target == target
    graph = onnx_ir.load(tmp_path / "net.onnx").graph
    assert not [broken for rule in RULES[target] for broken in rule(graph)]
    assert report.relative_change < 0.05
    if target != "tensorrt":
        return
    kinds = {node.inputs[2].const_value.numpy().dtype for node in graph if node.op_type == "QuantizeLinear"}
    assert kinds == {np.dtype(np.int8)}
    assert len(report.quantized_activations) == 1  # the other shortcut has the codes of a layer that reads it
    expected = model(images()[1]).detach().numpy()
    assert np.abs(run(tmp_path / "net.onnx", images()[1]) - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_the_file_for_tensorrt_computes_the_same_without_residual_sums(tmp_path):
    torch.manual_seed(0)
    tokens = torch.randint(9, (2, 5))
    model = quantize(Plain().eval(), {"scheme": "int8", "symmetric": True}, [tokens])
    for target in (None, "tensorrt"):
        export_onnx(model, tokens, tmp_path / f"{target}.onnx", target=target)
    assert np.array_equal(run(tmp_path / "None.onnx", tokens), run(tmp_path / "tensorrt.onnx", tokens))
    codes = [node for node in onnx.load(tmp_path / "tensorrt.onnx").graph.node if node.op_type == "DequantizeLinear"]
    assert len(codes) == 3 + 1  # the inputs of three layers and the weight of one


@pytest.mark.parametrize(("config", "remedy"), [
    ({"scheme": "int8"}, "qat_symmetric"), ({"scheme": "int8_weight"}, "symmetric"),
    ({"scheme": "int8", "symmetric": True, "activation_bits": 6}, "8 bits per activation"),
])  # fmt: skip
def test_other_schemes_are_refused_for_tensorrt_and_nothing_is_written(tmp_path, config, remedy):
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(4, 4)), config, [torch.randn(4, 4)])
    with pytest.raises(CompatibilityError, match="rules of tensorrt") as caught:
        export_onnx(model, torch.randn(4, 4), tmp_path / "net.onnx", target="tensorrt")
    assert remedy in caught.value.remedy
    assert not [*tmp_path.iterdir()]
