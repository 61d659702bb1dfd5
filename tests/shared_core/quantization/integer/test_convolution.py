"""Converted convolutions on oneDNN: the reference's sums, NaN kept, copies and files, a truthful report."""

import copy
import io

import pytest
import torch
from codes import WIDEST
from torch import nn

from shared_core.quantization import conversion_report, convert, quantize
from shared_core.quantization.integer import convert as fast_convert
from shared_core.quantization.integer.layers import IntConv2d
from shared_core.quantization.integer.onednn import OneDnnConv2d

SHAPES = {
    "plain": {},
    "padding": {"padding": (1, 2)},
    "strides and groups": {"stride": (2, 1), "padding": 1, "groups": 4},
    "depthwise without bias": {"groups": 8, "bias": False},
    "dilation": {"dilation": 2, "padding": 2},
}


def images(batch=5, dtype=torch.float32):
    return (torch.randn(batch, 8, 12, 10, generator=torch.Generator().manual_seed(1)) + 0.7).to(dtype)


def both(model, dtype=torch.float32, **options):
    torch.manual_seed(0)
    quantized = quantize(
        model().to(dtype), {"scheme": "int8", "weight_bits": WIDEST["convolution"], **options}, [images(dtype=dtype)]
    )
    return convert(quantized), convert(quantized, backend="torchao")


def run(model, x):
    with torch.no_grad():
        return model(x)


def exact_sums(layer, x):
    """``s_x·s_w·Σ(q_x − z)·q_w + b`` in float64."""
    codes = (x / layer.input_scale).round() + layer.input_zero_point
    centred = (codes.clamp(layer.qmin, layer.qmax) - layer.input_zero_point).double()
    total = nn.functional.conv2d(
        centred, layer.weight_codes.double(), None, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    y = total * (layer.input_scale.double() * layer.weight_scale.double()).view(-1, 1, 1)
    return y if layer.bias is None else y + layer.bias.double().view(-1, 1, 1)


@pytest.mark.parametrize("bits", [WIDEST["convolution"], 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_the_reference(shape, bits):
    reference, fast = both(
        lambda: nn.Sequential(nn.Conv2d(8, 16, 3, **SHAPES[shape])), weight_bits=bits, activation_bits=bits
    )
    assert type(reference[0]) is IntConv2d
    assert type(fast[0]) is OneDnnConv2d
    x = 2 * images()  # some of it is outside the range
    y = run(fast, x)
    expected = exact_sums(fast[0], x)
    assert (y - expected).abs().max() <= 1e-6 * expected.abs().max()
    torch.testing.assert_close(y, run(reference, x), rtol=1e-6, atol=1e-6)
    assert torch.equal(fast[0].weight_codes, reference[0].weight_codes)


def test_bfloat16_channels_last_and_other_shapes():
    reference, fast = both(lambda: nn.Sequential(nn.Conv2d(8, 16, 3)), torch.bfloat16)
    x = images(dtype=torch.bfloat16)
    assert run(fast, x).dtype == torch.bfloat16
    torch.testing.assert_close(run(fast, x), run(reference, x), rtol=1e-2, atol=1e-2)
    reference, fast = both(lambda: nn.Sequential(nn.Conv2d(8, 16, 3)))
    x = images()
    y = run(fast, x)
    assert torch.equal(run(fast, x.contiguous(memory_format=torch.channels_last)), y)
    torch.testing.assert_close(run(fast, x[0]), y[0], rtol=1e-6, atol=1e-6)  # no batch
    assert run(fast, x[:0]).shape == (0, 16, 10, 8)
    assert torch.equal(run(fast, x[2:3]), y[2:3])
    assert torch.equal(x, images())


def test_an_example_with_nan_comes_out_as_nan_and_infinity_saturates():
    reference, fast = both(lambda: nn.Sequential(nn.Conv2d(8, 16, 3)))
    x = images()
    x[1, 3, 4, 5] = float("nan")
    x[2, 0, 0, 0], x[2, 0, 0, 1] = float("inf"), -float("inf")
    y, expected = run(fast, x), run(reference, x)
    assert y[1].isnan().all()
    assert expected[1].isnan().any()
    assert torch.isfinite(y[[0, 2, 3, 4]]).all()
    torch.testing.assert_close(y[[0, 2, 3, 4]], expected[[0, 2, 3, 4]], rtol=1e-6, atol=1e-6)


def test_copies_files_and_casts():
    _, fast = both(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)))
    x = images()
    y = run(fast, x)
    assert torch.equal(run(copy.deepcopy(fast), x), y)
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    assert torch.equal(run(torch.load(buffer, weights_only=False), x), y)
    _, other = both(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)), weight_bits=3)
    assert not torch.equal(run(other, x), y)
    other.load_state_dict(fast.state_dict())
    assert torch.equal(run(other, x), y)
    assert run(fast.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(run(fast, x), y)


def test_it_compiles_without_a_break():
    torch._dynamo.reset()
    _, fast = both(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)))
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    assert torch.equal(run(compiled, images()), run(fast, images()))


def test_the_report_says_what_runs_and_why_not(monkeypatch):
    def net():
        return nn.Sequential(
            nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(8, 8, 3, padding="same"), nn.Conv2d(8, 8, 1),
        )  # fmt: skip

    _, fast = both(net)
    report = conversion_report(fast)
    assert [entry["type"] for entry in report.values()] == ["Conv2d"] * 4
    assert report["0"]["kernel"].startswith("oneDNN int8 static: int8 x int8 -> int32 (onednn.qconv2d)")
    assert report["0"]["why"] == report["3"]["why"] == ""
    assert report["1"] == {
        "type": "Conv2d",
        "kernel": "reference: whole numbers, summed in float64",
        "why": "oneDNN pads with zeros by numbers, not reflect by (1, 1)",
    }
    assert report["2"]["why"] == "oneDNN pads with zeros by numbers, not zeros by same"
    reference = both(net)[0]
    torch.testing.assert_close(run(fast, images()), run(reference, images()), rtol=1e-3, atol=1e-2)
    monkeypatch.setattr(fast_convert, "sums_exactly", lambda kernel: kernel != "convolution")
    assert all("saturates" in entry["why"] for entry in conversion_report(both(net, weight_bits=8)[1]).values())
