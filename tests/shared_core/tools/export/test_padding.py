"""Padding of its own operator before convolutions: part of the convolution in the file, where that is the same."""

from collections import Counter

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core.quantization import quantize
from shared_core.tools.export import export_onnx


class Padded(nn.Module):
    """Convolutions, the second and third of which read a padded tensor."""

    def __init__(self, pad, also_elsewhere=False):
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 8, 3, 2, 1)
        self.head, self.pad, self.also_elsewhere = nn.Linear(8, 5), pad, also_elsewhere

    def forward(self, x):
        x = self.pad(torch.relu(self.stem(x)))
        y = self.one(x).mean((2, 3)) + self.two(x).mean((2, 3))
        return self.head(y + x.mean((2, 3)) if self.also_elsewhere else y)


def padding(*sizes, **options):
    return lambda x: F.pad(x, sizes, **options)


def kinds_after(net, scheme, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12)
    model = net.eval() if scheme is None else quantize(net.eval(), scheme, [x])
    report = export_onnx(model, x, tmp_path / "model.onnx", calibration=None if scheme is None else [x])
    assert report.largest_difference < 1e-4
    return Counter(node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node), report


@pytest.mark.parametrize("scheme", [None, "int8", {"scheme": "int8", "activation_bits": 6}, "int8_weight"])
@pytest.mark.parametrize("sizes", [(0, 1, 0, 1), (1, 2, 0, 3), (0, 0, 0, 0)])
def test_zeros_become_padding_of_the_convolutions(sizes, scheme, tmp_path):
    kinds, report = kinds_after(Padded(padding(*sizes)), scheme, tmp_path)
    assert kinds["Pad"] == 0
    if scheme == "int8":
        assert report.integer_nodes["QLinearConv"] == 3


@pytest.mark.parametrize(
    "net",
    [
        Padded(padding(1, 1, 1, 1, value=0.5)),
        Padded(padding(1, 1, 1, 1, mode="reflect")),
        Padded(padding(-1, 0, 0, 1)),
        Padded(padding(1, 1, 1, 1), also_elsewhere=True),
    ],
    ids=["other_value", "reflect", "crop", "read_elsewhere"],
)
def test_other_padding_stays(net, tmp_path):
    kinds, _ = kinds_after(net, "int8", tmp_path)
    assert kinds["Pad"] == 1


def test_padded_channels_stay(tmp_path):
    class Wider(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.one = nn.Conv2d(3, 6, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return self.one(F.pad(torch.relu(self.stem(x)), (0, 0, 0, 0, 1, 1)))

    kinds, _ = kinds_after(Wider(), "int8", tmp_path)
    assert kinds["Pad"] == 1


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(64, ceil_mode=True),
        nn.AvgPool2d(4, ceil_mode=True),
        nn.AvgPool2d(3, 2, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    ],
    ids=["all_pixels", "windows_that_end_outside", "pad_not_counted", "padded", "padded_not_counted"],
)
def test_average_pools_on_integers_are_those_of_the_model(pool, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), pool, nn.Conv2d(8, 8, 1), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(4, 3, 12, 12)
    net(x)
    model = quantize(net.eval(), "int8", [x])
    report = export_onnx(model, x, tmp_path / "model.onnx", calibration=[x])
    assert report.integer_nodes["QLinearAveragePool"] == 1
    found = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"input": x.numpy()})[0]
    expected = model(x).detach()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    assert report.relative_change <= 0.05
