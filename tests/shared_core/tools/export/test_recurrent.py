"""Recurrent layers in ONNX files: the codes of training, recounted, and their outputs in onnxruntime."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from shared_core.quantization import quantize
from shared_core.quantization.ranges.saved_ranges import layer_entry
from shared_core.tools.export import export_onnx

SHAPES = {
    "one layer": {"batch_first": True},
    "both ways, two layers": {"bidirectional": True, "num_layers": 2},
    "no bias": {"bidirectional": True, "bias": False, "batch_first": True},
}


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(24, 32, **options)

    def forward(self, x):
        y, state = self.rnn(x)
        return {"y": y, **{f"state_{n}": s for n, s in enumerate(state if isinstance(state, tuple) else (state,))}}


class Rectified(nn.RNN):
    """An RNN of a user, with ReLU."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, nonlinearity="relu", **options)


def net(kind, shape):
    torch.manual_seed(0)
    return Net(kind, **SHAPES[shape]).eval()


@pytest.mark.parametrize("scheme", ["int8_weight", "int4_weight", "int8", "int8_dynamic"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, Rectified])
def test_all_weights_are_codes_in_the_file_and_give_the_models_outputs(kind, shape, scheme, tmp_path):
    model, x = net(kind, shape), torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    small = quantize(model, scheme, [x])
    report = export_onnx(small, x, tmp_path / "model.onnx", dynamic_batch="batch_first" in SHAPES[shape])
    assert report.quantized == ("rnn",)
    assert report.largest_difference < 1e-5

    graph = onnx.load(report.path).graph
    zeros = {TensorProto.INT8: 0, TensorProto.UINT8: 128}  # unsigned where the processor sums signed codes with errors
    found = [numpy_helper.to_array(one) - zeros[one.data_type] for one in graph.initializer if one.data_type in zeros]
    codes = [value for value in found if value.ndim > 1 and value.any()]
    weights = {key: value for key, value in model.named_parameters() if "weight" in key}
    assert sum(value.size for value in codes) == sum(value.numel() for value in weights.values())
    assert sum(len(np.unique(value)) > 1 for value in codes) == len(weights)
    floats = sum(numpy_helper.to_array(v).size for v in graph.initializer if v.data_type == TensorProto.FLOAT)
    assert floats < 0.2 * sum(value.numel() for value in weights.values())  # scales and biases
    assert layer_entry(small.rnn)["weight_bits"] == (4 if scheme == "int4_weight" else 8)

    session = onnxruntime.InferenceSession(report.path)
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = small(x)
    assert [output.name for output in session.get_outputs()] == list(expected)
    for mine, theirs in zip(expected.values(), got, strict=True):
        assert np.abs(mine.numpy() - theirs).max() < 2e-2  # a code of the input may move by one
        assert np.abs(mine.numpy() - theirs).mean() < 1e-3


def test_one_sequence_and_given_states_are_those_of_the_stock_layer(tmp_path):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 6)

        def forward(self, x, h, c):
            y, (h, c) = self.rnn(x, (h, c))
            return y, h, c

    torch.manual_seed(0)
    inputs = torch.randn(5, 8), torch.randn(1, 6), torch.randn(1, 6)
    report = export_onnx(
        quantize(Stateful().eval(), "int8_weight"), inputs, tmp_path / "model.onnx", dynamic_batch=False
    )
    assert report.quantized == ("rnn",)
    assert report.largest_difference < 1e-6
