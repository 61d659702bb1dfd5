"""The graph in float that `eff export` times beside the integers: the same network, without quantizers."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from shared_core.quantization import quantize
from shared_core.tools.export import export_onnx
from shared_core.tools.export.onnx_files import feeds, session_of
from shared_core.tools.export.onnx_speed import graph_in_float, milliseconds

SCHEMES = ("int8", "int8_dynamic", "int8_weight")
INTEGER = {"QuantizeLinear", "DequantizeLinear", "MatMulInteger"}


class Encoder(nn.Module):
    """Tokens, a tied head without bias, which ends the graph."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.up(self.embed(tokens))))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9), nn.ReLU(), nn.Conv2d(9, 9, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 5),
    )  # fmt: skip


def mlp():
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32, bias=False))


class Gated(nn.Module):
    """Products without bias whose results are multiplied, as in Llama."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x):
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


NETS = {
    "gated": (Gated, lambda: torch.randn(4, 32)),
    "convolutions": (convolutions, lambda: torch.randn(4, 3, 8, 8)),
    "mlp": (mlp, lambda: torch.randn(4, 64)),
    "encoder": (Encoder, lambda: torch.randint(50, (2, 6))),
}


@pytest.mark.parametrize(
    ("net", "scheme"), [*itertools.product(NETS, SCHEMES), ("mlp", "int4_weight"), ("encoder", "int4_weight")]
)
def test_the_float_graph_is_the_quantized_weights_without_any_rounding_of_activations(net, scheme, tmp_path):
    torch.manual_seed(0)
    build, make_inputs = NETS[net]
    inputs = make_inputs()
    options = {"scheme": scheme, **({"group_size": 8} if scheme == "int4_weight" else {})}
    quantized = quantize(build().eval(), options, [inputs])
    export_onnx(quantized, inputs, tmp_path / "model.onnx", weight_codes="unsigned")
    graph = graph_in_float(tmp_path / "model.onnx")
    folded = session_of(graph, optimize=True, save=tmp_path / "float.onnx", fold_weights=True)
    left = {node.op_type for node in onnx.load(tmp_path / "float.onnx", load_external_data=False).graph.node} & INTEGER
    assert left <= ({"DequantizeLinear"} if net == "encoder" else set())  # rows of the embedding
    for module in quantized.modules():
        if hasattr(module, "quantizer"):
            vars(module.quantizer)["input"] = lambda layer, x: x
    with torch.no_grad():
        expected = quantized(inputs).numpy()
    for session in (folded, session_of(graph, optimize=False)):
        np.testing.assert_allclose(session.run(None, feeds(session, inputs))[0], expected, rtol=1e-4, atol=1e-5)
    assert all(0 < time < 1e4 for time in milliseconds(tmp_path / "model.onnx", inputs))
