"""Converted models on torchao's kernels: the same codes, the same outputs, and a truthful report."""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from codes import WIDEST
from plain_loop import plain_step
from torch import nn
from torchao.quantization import Int8Tensor

from shared_core import Session
from shared_core.errors import ConfigError, MissingExtraError
from shared_core.quantization import conversion_report, convert, quantize
from shared_core.quantization.integer import convert as fast_convert
from shared_core.quantization.integer.convert import TorchaoLinear, grid_of_groups
from shared_core.quantization.integer.layers import IntLinear


@pytest.fixture(autouse=True)
def no_onednn(monkeypatch):
    """torchao's kernels, which run where oneDNN's do not."""
    monkeypatch.setattr(fast_convert, "_is_of_onednn", lambda device: False)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32, bias=False), nn.GELU(), nn.Linear(32, 16))


def inputs(rows=24):
    return torch.randn(rows, 3, 128, generator=torch.Generator().manual_seed(1)) + 0.3


def both(scheme, dtype=torch.float32, x=None):
    x = inputs() if x is None else x
    quantized = quantize(make_net().to(dtype), scheme, [x.to(dtype)])
    return quantized, convert(quantized), convert(quantized, backend="torchao")


def run(model, x):
    with torch.no_grad():
        return model(x)


def decibels(exact, other):
    noise = (exact.double() - other.double()).square().mean()
    return 10 * torch.log10(exact.double().square().mean() / noise).item()


@pytest.mark.parametrize("bits", [WIDEST["matmul"], 4, 2])
def test_static_int8_has_the_references_codes_and_output(bits):
    quantized, reference, fast = both({"scheme": "int8", "weight_bits": bits})
    for name in ("0", "2", "4"):
        layer, exact = fast.get_submodule(name), reference.get_submodule(name)
        assert type(layer) is TorchaoLinear
        assert type(exact) is IntLinear
        assert torch.equal(layer.weight.qdata, exact.weight_codes)
        assert torch.equal(layer.weight.scale.flatten(), exact.weight_scale)
        torch.testing.assert_close(layer.weight.dequantize(), quantized.get_submodule(name).weight.detach())
    # torchao multiplies by the scale's reciprocal: a code may move where a value lies between two
    assert decibels(run(reference, inputs()), run(fast, inputs())) > 60
    report = conversion_report(fast)
    assert all("int8 static: int8 x int8 -> int32" in entry["kernel"] for entry in report.values())
    assert all(entry["why"] == "" for entry in report.values())


def test_one_static_layer_equals_its_formula_in_float64():
    x = inputs()
    layer = quantize(make_net()[:1], "int8", [x])
    fast, exact = convert(layer, backend="torchao")[0], convert(layer)[0]
    scale, zero = exact.input_scale.double(), exact.input_zero_point.double()
    codes = ((x.double() / scale).round() + zero).clamp(-128, 127) - zero
    expected = codes @ exact.weight_codes.double().T * scale * exact.weight_scale.double() + exact.bias.double()
    step = (scale * exact.weight_scale.double() * 127).max().item()  # of one code
    difference = (run(fast, x).double() - expected).abs()
    assert difference.max() <= 1.01 * step
    assert (difference > 1e-5 * expected.abs().max()).double().mean() < 0.01


def test_dynamic_int8_has_the_weights_codes_and_quantizes_each_row_by_its_own_largest_value():
    quantized, _, fast = both({"scheme": "int8_dynamic", "weight_bits": WIDEST["matmul"]})
    for name in ("0", "2", "4"):
        weight, baked = fast.get_submodule(name).weight, quantized.get_submodule(name).weight.detach()
        assert isinstance(weight.data, Int8Tensor)
        torch.testing.assert_close(weight.dequantize(), baked, rtol=1e-6, atol=0)
    first, x = fast[0], inputs()
    peaks = torch.logspace(-3, 3, 24)[:, None, None]
    with torch.no_grad():
        exact = F.linear(x * peaks, quantized[0].weight)
        # each row keeps its digits, whatever the others hold; beside the bias, which does not grow with it
        rows = first(x * peaks) - first.bias
    for one, other in zip(exact, rows, strict=True):
        assert decibels(one, other) > 35
    # torchao's step is amax/127.5, the reference's amax/127
    assert decibels(run(quantized, x), run(fast, x)) > 35
    assert "int8 dynamic" in conversion_report(fast)["0"]["kernel"]


@pytest.mark.parametrize(("scheme", "least"), [("int8_weight", 100), ("int4_weight", 100)])
def test_weight_only_computes_what_the_reference_does(scheme, least):
    quantized, reference, fast = both(scheme)
    assert torch.equal(run(quantized, inputs()), run(reference, inputs()))
    assert decibels(run(reference, inputs()), run(fast, inputs())) > least
    report = conversion_report(fast)
    assert ("int8 weight-only" if scheme == "int8_weight" else "_weight_int4pack_mm") in report["0"]["kernel"]


@pytest.mark.parametrize("scheme", ["int8", "int8_weight", "int8_dynamic", "int4_weight"])
def test_a_bf16_model_answers_in_bf16_as_near_as_bf16_can(scheme):
    _, reference, fast = both(scheme, torch.bfloat16)
    x = inputs().bfloat16()
    assert run(fast, x).dtype == torch.bfloat16
    assert decibels(run(reference, x), run(fast, x)) > 35


@pytest.mark.parametrize("scheme", ["fp8", "mxfp4", "nvfp4", "ternary", "binary", "int8_dynamic_int4_weight"])
def test_schemes_without_a_kernel_stay_on_the_reference_and_say_so(scheme):
    quantized, _, fast = both(scheme)
    assert torch.equal(run(quantized, inputs()), run(fast, inputs()))
    for entry in conversion_report(fast).values():
        assert entry["kernel"].startswith("reference")
        assert "torchao" in entry["why"]


def test_other_layers_and_widths_stay_on_the_reference_and_say_so():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10), nn.Linear(10, 4))
    config = {"scheme": "int8", "skip": ["last"], "overrides": {"3": {"activation_bits": 4}}}
    fast = convert(quantize(net, config, [torch.randn(8, 4, 8)]), backend="torchao")
    report = conversion_report(fast)
    assert (report["0"]["type"], report["0"]["why"]) == ("Conv1d", "")
    assert report["0"]["kernel"].startswith("reference")
    assert "4-bit inputs" in report["3"]["why"]
    assert report["4"] == {"type": "Linear", "kernel": "float", "why": ""}
    narrow = quantize(nn.Linear(30, 10), {"scheme": "int4_weight", "group_size": 10})
    assert "groups of 32, 64 or 128" in conversion_report(convert(narrow, backend="torchao"))[""]["why"]


def test_where_the_kernel_saturates_eight_bit_weights_stay_on_the_reference(monkeypatch):
    monkeypatch.setattr(fast_convert, "sums_exactly", lambda kernel: kernel != "matmul")
    _, _, fast = both("int8")
    assert all("saturates" in entry["why"] for entry in conversion_report(fast).values())
    _, _, fast = both({"scheme": "int8", "weight_bits": 7})
    assert all(entry["why"] == "" for entry in conversion_report(fast).values())


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int8_weight", "int4_weight"])
def test_rows_may_be_one_or_none_and_nan_stays_nan(scheme):
    _, reference, fast = both(scheme)
    for x in (inputs()[0, 0], inputs()[:1], inputs()[:0]):
        assert run(fast, x).shape == run(reference, x).shape
        torch.testing.assert_close(run(fast, x), run(reference, x), rtol=0, atol=0.05)
    x = inputs()
    x[2, 1, 5] = torch.nan
    output = run(fast, x)
    assert output[2, 1].isnan().all()
    assert int(output.isnan().any(-1).sum()) == 1


def test_a_model_in_training_converts_with_its_codes_and_the_model_stays():
    model = make_net()
    session = Session({"qat": {"scheme": "int8", "range": "lsq", "weight_bits": 4}})
    session.attach(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session.begin([optimizer], total_steps=3)
    for _ in range(3):
        plain_step(session, optimizer, model(inputs()).square().mean())
    before = copy.deepcopy(model.state_dict())
    reference, fast = convert(model), convert(model, backend="torchao")
    assert torch.equal(fast[0].weight.qdata, reference[0].weight_codes)
    assert decibels(run(reference, inputs()), run(fast, inputs())) > 40
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_fused_encoder_layer_runs_the_converted_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(4, 6, 32)
    quantized = quantize(layer, {"scheme": "int8_dynamic", "weight_bits": WIDEST["matmul"]})
    fast = convert(quantized, backend="torchao")
    assert type(fast.linear1) is TorchaoLinear
    assert decibels(run(quantized, x), run(fast, x)) > 35
    assert not torch.equal(run(fast, x), run(layer, x))


def test_a_copy_and_a_compiled_model_compute_the_same():
    _, _, fast = both("int8_dynamic")
    assert torch.equal(run(copy.deepcopy(fast), inputs()), run(fast, inputs()))
    before = {name: getattr(torch._inductor.config, name) for name in ("freezing", "coordinate_descent_tuning")}
    compiled = torch.compile(fast, backend="aot_eager")
    assert decibels(run(fast, inputs()), run(compiled, inputs())) > 45
    assert before == {name: getattr(torch._inductor.config, name) for name in before}


def test_grids_are_read_off_baked_weights_and_refused_where_there_is_none():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 128), generator=generator).double()
    scale = 10 ** torch.empty(64, 4).uniform_(-3, 1, generator=generator).double()
    low = -scale * torch.randint(0, 16, (64, 4), generator=generator)
    weight = (codes.view(64, 4, 32) * scale[..., None] + low[..., None]).float()
    weight[0, 0] = 0.25
    found, step, least, exact = grid_of_groups(weight.view(64, 128), 32, 1e-3)
    assert exact
    torch.testing.assert_close(found.view(64, 4, 32) * step[..., None] + least[..., None], weight)
    assert not grid_of_groups(torch.randn(4, 64, generator=generator), 32, 1e-3)[3]


def test_backends_are_refused_by_name_and_torchao_where_it_is_missing(monkeypatch):
    quantized = quantize(make_net(), "int8_weight")
    with pytest.raises(ConfigError, match=r"backend must be .*'torch'"):
        convert(quantized, backend="torch")
    assert conversion_report(convert(quantized, backend="auto"))["0"]["kernel"].startswith("torchao")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    with pytest.raises(MissingExtraError, match=r"pip install 'efftrain\[torchao\]'"):
        convert(quantized, backend="torchao")
    assert conversion_report(convert(quantized, backend="auto"))["0"]["kernel"].startswith("reference")
