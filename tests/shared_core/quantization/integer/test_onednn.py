"""Converted layers on oneDNN: the reference's codes and sums, NaN kept, copies and files, a truthful report."""

import copy
import importlib.util
import io

import pytest
import torch
from codes import WIDEST
from torch import nn

from shared_core.quantization import conversion_report, convert, quantize
from shared_core.quantization.integer import convert as fast_convert
from shared_core.quantization.integer import onednn as onednn_layer
from shared_core.quantization.integer.layers import IntConv2d, IntLinear
from shared_core.quantization.integer.onednn import (
    OneDnnConv2d,
    OneDnnLinear,
    OneDnnTokenLinear,
    few_row_codes,
    row_codes,
)

SCHEMES = {"int8": OneDnnLinear, "int8_dynamic": OneDnnTokenLinear}
DYNAMIC = {"scheme": "int8_dynamic", "weight_bits": WIDEST["linear"]}


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(130, 63), nn.ReLU(), nn.Linear(63, 32, bias=False), nn.GELU(), nn.Linear(32, 17))


def inputs(rows=24, dtype=torch.float32):
    return (torch.randn(rows, 3, 130, generator=torch.Generator().manual_seed(1)) + 0.3).to(dtype)


def three(scheme, dtype=torch.float32, net=make_net, **options):
    quantized = quantize(
        net().to(dtype), {"scheme": scheme, "weight_bits": WIDEST["linear"], **options}, [inputs(dtype=dtype)]
    )
    return quantized, convert(quantized), convert(quantized, backend="torchao")


def run(model, x):
    with torch.no_grad():
        return model(x)


def static_in_float64(layer, x):
    """``s_x·s_w·Σ(q_x − z)·q_w + b``."""
    scale, zero = layer.input_scale, layer.input_zero_point
    codes = ((x / scale).round() + zero).clamp(layer.qmin, layer.qmax).double() - zero
    y = codes @ layer.weight_codes.double().T * (scale.double() * layer.weight_scale.double())
    return y if layer.bias is None else y + layer.bias.double()


def by_token_in_float64(layer, x):
    largest = 2 ** (layer.activation_bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale == 0, 1, scale)
    codes = (x / scale).round().double()
    y = codes @ layer.weight_codes.double().T * scale.double() * layer.weight_scale.double()
    return y if layer.bias is None else y + layer.bias.double()


EXACT = {"int8": static_in_float64, "int8_dynamic": by_token_in_float64}


@pytest.mark.parametrize("bits", [WIDEST["linear"], 4, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_equals_its_formula_in_float64(scheme, bits):
    _, _, fast = three(scheme, weight_bits=bits, activation_bits=bits, net=lambda: make_net()[:1])
    assert type(fast[0]) is SCHEMES[scheme]
    x = 2 * inputs()  # some of it is outside the range
    x[3] = 0
    expected = EXACT[scheme](fast[0], x)
    assert (run(fast, x) - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert torch.equal(x[:3], 2 * inputs()[:3])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_net_computes_what_the_reference_does(scheme):
    quantized, reference, fast = three(scheme)
    for index in (0, 2, 4):
        assert type(fast[index]) is SCHEMES[scheme]
        torch.testing.assert_close(fast[index].weight, quantized[index].weight.detach(), rtol=1e-6, atol=0)
    # a code of a later layer may move where a rounding before it differs
    torch.testing.assert_close(run(fast, inputs()), run(reference, inputs()), rtol=0, atol=2e-3)
    if scheme == "int8":
        assert type(reference[0]) is IntLinear
        assert torch.equal(fast[0].weight_codes, reference[0].weight_codes)
    torch.testing.assert_close(run(fast[:1], inputs()), run(reference[:1], inputs()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_codes_of_both_signs_add_up(scheme):
    net = nn.Linear(256, 2, bias=False)
    net.weight.data = torch.stack([torch.arange(-127.0, 129).clamp(max=127), torch.full((256,), -127.0)]) / 127
    x = torch.stack([torch.full((256,), 1.0), torch.full((256,), -1.0), torch.linspace(-1, 1, 256)])
    fast = convert(quantize(net, {"scheme": scheme, "weight_bits": WIDEST["linear"]}, [x]), backend="torchao")
    expected = EXACT[scheme](fast, x)
    assert (run(fast, x) - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_types_answer_in_their_own(scheme, dtype):
    _, reference, fast = three(scheme, dtype)
    x = inputs(dtype=dtype)
    assert run(fast, x).dtype == dtype
    torch.testing.assert_close(run(fast, x), run(reference, x), rtol=0, atol=0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_may_be_one_or_none_and_lie_anyhow(scheme):
    _, reference, fast = three(scheme)
    for x in (inputs()[0, 0], inputs()[:1], inputs()[:0], inputs().transpose(0, 1)):
        assert run(fast, x).shape == run(reference, x).shape
        torch.testing.assert_close(run(fast, x), run(reference, x), rtol=0, atol=2e-3)
    # sums are integers, but on AMX oneDNN scales those of few rows in another order (torch 2.13)
    torch.testing.assert_close(run(fast[0], inputs()[2:3]), run(fast[0], inputs())[2:3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_with_nan_comes_out_as_nan_and_infinity_saturates_or_does_too(scheme):
    _, _, fast = three(scheme)
    x = inputs()
    x[2, 1, 5] = torch.nan
    x[4, 0, 0], x[4, 2, 0] = torch.inf, -torch.inf
    y = run(fast, x)
    marked = {(2, 1)} if scheme == "int8" else {(2, 1), (4, 0), (4, 2)}
    assert {tuple(place) for place in y.isnan().all(-1).nonzero().tolist()} == marked
    assert {tuple(place) for place in y.isfinite().logical_not().any(-1).nonzero().tolist()} == marked
    assert torch.equal(y[5:], run(fast, inputs())[5:])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_away_from_a_cpu_the_sums_are_those_of_the_reference(scheme):
    _, _, fast = three(scheme)
    y = run(fast, inputs())
    for layer in (fast[0], fast[2], fast[4]):
        layer._packed = None  # as on a device that oneDNN does not know
    torch.testing.assert_close(run(fast, inputs()), y, rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_inductor_compiles_it(scheme):
    torch._dynamo.reset()
    _, _, fast = three(scheme)
    for options in ({}, {"freezing": True}):
        compiled = torch.compile(fast, options=options)
        torch.testing.assert_close(run(compiled, inputs()), run(fast, inputs()), rtol=0, atol=2e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_report_says_what_runs_and_why_not(scheme, monkeypatch):
    kind = "dynamic" if scheme == "int8_dynamic" else "static"
    for entry in conversion_report(three(scheme)[2]).values():
        assert entry["type"] == "Linear"
        assert entry["kernel"].startswith(f"oneDNN int8 {kind}: int8 x int8 -> int32 (onednn.qlinear)")
        assert entry["why"] == ""
    monkeypatch.setattr(fast_convert, "sums_exactly", lambda kernel: kernel != "linear")
    assert all("saturates" in entry["why"] for entry in conversion_report(three(scheme, weight_bits=8)[2]).values())
    assert all(entry["why"] == "" for entry in conversion_report(three(scheme, weight_bits=7)[2]).values())


def test_a_model_in_float64_stays_on_the_reference_and_says_so():
    def net():
        return nn.Sequential(nn.Conv1d(3, 3, 1), nn.Unflatten(1, (1, 3)), nn.Conv2d(1, 2, 1), nn.Linear(130, 2))

    for scheme in ("int8", "int8_dynamic", "int8_weight"):
        _, reference, fast = three(scheme, torch.float64, net)
        x = inputs(dtype=torch.float64)
        assert torch.equal(run(fast, x), run(reference, x))
        report = conversion_report(fast)
        assert report["3"]["why"] == "the kernels compute in float32 at most, the model in float64"
        if scheme == "int8":
            assert report["2"]["why"] == report["3"]["why"]


def test_sums_that_could_overflow_stay_on_the_reference_and_say_so():
    net = nn.Linear(2**31 // (255 * 128) + 1, 1, bias=False)
    nn.init.constant_(net.weight, -1.0)
    quantized = quantize(net, DYNAMIC)
    fast = convert(quantized, backend="torchao")
    x = torch.ones(2, net.in_features)
    assert torch.equal(run(fast, x), run(quantized, x))
    assert "overflow 32 bits" in conversion_report(fast)[""]["why"]
    fewer = nn.Linear(net.in_features - 1, 1, bias=False)
    nn.init.constant_(fewer.weight, -1.0)
    fast = convert(quantize(fewer, DYNAMIC), backend="torchao")
    assert type(fast) is OneDnnTokenLinear
    torch.testing.assert_close(run(fast, x[:, 1:]), torch.full((2, 1), -float(fewer.in_features)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_part_of_a_gradient_gets_through(scheme):
    _, _, fast = three(scheme)
    assert not fast(inputs().requires_grad_()).requires_grad


def test_without_torchao_auto_takes_what_onednn_has(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    for scheme, kernel in {"int8": "oneDNN", "int8_dynamic": "oneDNN", "int8_weight": "", "int4_weight": ""}.items():
        bits = WIDEST["linear"] if kernel else None
        quantized = quantize(
            nn.Sequential(nn.Linear(128, 32)), {"scheme": scheme, "weight_bits": bits}, [torch.randn(4, 128)]
        )
        entry = conversion_report(convert(quantized, backend="auto"))["0"]
        assert entry["kernel"].startswith(kernel or "reference")
        assert ("pip install 'efftrain[torchao]'" in entry["why"]) == (not kernel)


def test_a_fused_encoder_layer_runs_the_converted_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(4, 6, 32)
    quantized = quantize(layer, DYNAMIC)
    fast = convert(quantized, backend="torchao")
    assert type(fast.linear1) is OneDnnTokenLinear
    torch.testing.assert_close(run(fast, x), run(quantized, x), rtol=0, atol=0.02)
    assert not torch.equal(run(fast, x), run(layer, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_large_inputs_are_quantized_in_parts_to_the_same_values(monkeypatch, scheme, dtype):
    fast, x = three(scheme, dtype)[2], inputs(dtype=dtype)
    x[1, 2, 3], x[-1, 0, 5] = torch.nan, torch.inf
    whole = run(fast, x)
    for part in (1, 1000, 130 * 25):
        monkeypatch.setattr(onednn_layer, "_PART", part)
        assert torch.equal(run(fast, x).nan_to_num(7.0), whole.nan_to_num(7.0))
        assert torch.equal(run(fast, x.transpose(0, 1)).nan_to_num(7.0), whole.transpose(0, 1).nan_to_num(7.0))


SHAPES = {
    "plain": {},
    "padding": {"padding": (1, 2)},
    "strides and groups": {"stride": (2, 1), "padding": 1, "groups": 4},
    "depthwise without bias": {"groups": 8, "bias": False},
    "dilation": {"dilation": 2, "padding": 2},
}


def images(batch=5, dtype=torch.float32):
    return (torch.randn(batch, 8, 12, 10, generator=torch.Generator().manual_seed(1)) + 0.7).to(dtype)


def converted(model, dtype=torch.float32, **options):
    torch.manual_seed(0)
    quantized = quantize(
        model().to(dtype), {"scheme": "int8", "weight_bits": WIDEST["convolution"], **options}, [images(dtype=dtype)]
    )
    return convert(quantized), convert(quantized, backend="torchao")


def exact_sums(layer, x):
    """``s_x·s_w·Σ(q_x − z)·q_w + b`` in float64."""
    codes = (x / layer.input_scale).round() + layer.input_zero_point
    centered = (codes.clamp(layer.qmin, layer.qmax) - layer.input_zero_point).double()
    total = nn.functional.conv2d(
        centered, layer.weight_codes.double(), None, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    y = total * (layer.input_scale.double() * layer.weight_scale.double()).view(-1, 1, 1)
    return y if layer.bias is None else y + layer.bias.double().view(-1, 1, 1)


@pytest.mark.parametrize("bits", [WIDEST["convolution"], 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_the_reference(shape, bits):
    reference, fast = converted(
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
    reference, fast = converted(lambda: nn.Sequential(nn.Conv2d(8, 16, 3)), torch.bfloat16)
    x = images(dtype=torch.bfloat16)
    assert run(fast, x).dtype == torch.bfloat16
    torch.testing.assert_close(run(fast, x), run(reference, x), rtol=1e-2, atol=1e-2)
    reference, fast = converted(lambda: nn.Sequential(nn.Conv2d(8, 16, 3)))
    x = images()
    y = run(fast, x)
    assert torch.equal(run(fast, x.contiguous(memory_format=torch.channels_last)), y)
    torch.testing.assert_close(run(fast, x[0]), y[0], rtol=1e-6, atol=1e-6)  # no batch
    assert run(fast, x[:0]).shape == (0, 16, 10, 8)
    assert torch.equal(run(fast, x[2:3]), y[2:3])
    assert torch.equal(x, images())


def test_an_example_with_nan_comes_out_as_nan_and_infinity_saturates():
    reference, fast = converted(lambda: nn.Sequential(nn.Conv2d(8, 16, 3)))
    x = images()
    x[1, 3, 4, 5] = float("nan")
    x[2, 0, 0, 0], x[2, 0, 0, 1] = float("inf"), -float("inf")
    y, expected = run(fast, x), run(reference, x)
    assert y[1].isnan().all()
    assert expected[1].isnan().any()
    assert torch.isfinite(y[[0, 2, 3, 4]]).all()
    torch.testing.assert_close(y[[0, 2, 3, 4]], expected[[0, 2, 3, 4]], rtol=1e-6, atol=1e-6)


def test_the_report_says_which_convolutions_run_and_why_not(monkeypatch):
    def net():
        return nn.Sequential(
            nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
            nn.Conv2d(8, 8, 3, padding="same"), nn.Conv2d(8, 8, 1),
        )  # fmt: skip

    _, fast = converted(net)
    report = conversion_report(fast)
    assert [entry["type"] for entry in report.values()] == ["Conv2d"] * 4
    assert report["0"]["kernel"].startswith("oneDNN int8 static: int8 x int8 -> int32 (onednn.qconv2d)")
    assert report["0"]["why"] == report["3"]["why"] == ""
    assert report["1"]["kernel"].startswith("reference")
    assert report["1"]["why"].endswith("not reflect by (1, 1)")
    assert report["2"]["why"].endswith("not zeros by same")
    reference = converted(net)[0]
    torch.testing.assert_close(run(fast, images()), run(reference, images()), rtol=1e-3, atol=1e-2)
    monkeypatch.setattr(fast_convert, "sums_exactly", lambda kernel: kernel != "convolution")
    assert all("saturates" in entry["why"] for entry in conversion_report(converted(net, weight_bits=8)[1]).values())


def made(kind, **options):
    """Return a reference, a converted model and inputs, of linear layers or of convolutions."""
    if kind == "conv2d":
        nets = converted(lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)), **options)
        return *nets, images()
    return *three(kind, **options)[1:], inputs()


@pytest.mark.parametrize("kind", [*SCHEMES, "conv2d"])
def test_copies_files_and_casts(kind):
    _, fast, x = made(kind)
    y = run(fast, x)
    assert torch.equal(run(copy.deepcopy(fast), x), y)
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    assert torch.equal(run(torch.load(buffer, weights_only=False), x), y)
    _, other, _ = made(kind, weight_bits=3)
    assert not torch.equal(run(other, x), y)
    other.load_state_dict(fast.state_dict())
    assert torch.equal(run(other, x), y)
    assert run(fast.bfloat16(), x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(run(fast, x), y)


@pytest.mark.parametrize("kind", [*SCHEMES, "conv2d"])
def test_it_compiles_without_a_break(kind):
    torch._dynamo.reset()
    _, fast, x = made(kind)
    compiled = torch.compile(fast, backend="eager" if kind == "conv2d" else "aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, x), run(fast, x), rtol=0, atol=2e-3)
    x[2, 1, 5] = torch.nan
    found = run(compiled, x).isnan()
    assert found.any()
    assert torch.equal(found, run(fast, x).isnan())


def test_few_rows_get_the_codes_and_scales_of_many():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 24, generator=generator) * torch.logspace(-46, 38, 2000, dtype=torch.float64)[:, None].float()
    x = torch.cat([x, torch.zeros(1, 24), torch.full((1, 24), torch.inf), torch.full((1, 24), torch.nan)]).bfloat16()
    for largest_code in (7, 127):
        codes, scale = row_codes(x, largest_code)
        centered, few_scale = few_row_codes(x, largest_code)
        assert torch.equal(scale.nan_to_num(-1), few_scale.nan_to_num(-1))
        assert torch.equal(codes[~scale.isnan()[:, 0]].float() - 128, centered[~scale.isnan()[:, 0]])
