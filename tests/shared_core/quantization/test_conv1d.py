"""transformers' Conv1D, GPT-2's linear layer, is quantized as the linear layer that it is."""

import copy

import pytest
import torch
from codes import assert_codes_close, code_step
from plain_loop import begun_session, plain_step
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from shared_core.quantization import apply_ranges, conversion_report, convert
from shared_core.quantization.post_training.quantize import quantize_with_report
from shared_core.quantization.post_training.sensitivity import round_weight, weighted_layers
from shared_core.tools.export import export_onnx

SCHEMES = {
    "int8": {"scheme": "int8"},
    "int8_weight": {"scheme": "int8_weight"},
    "int8_dynamic": {"scheme": "int8_dynamic"},
    "int4_weight": {"scheme": "int4_weight", "group_size": 8},
    "fp8": {"scheme": "fp8"},
    "mxfp4": {"scheme": "mxfp4"},
    "ternary": {"scheme": "ternary"},
    "lsq": {"scheme": "int8", "range": "lsq"},
}
WIDTH, OUT = 32, 6


def twins():
    """Return the same net of Conv1D and of Linear layers."""
    torch.manual_seed(0)
    ours = nn.Sequential(Conv1D(64, WIDTH), nn.GELU(), Conv1D(OUT, 64))
    stock = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, OUT))
    for one, other in zip(ours[::2], stock[::2], strict=True):
        nn.init.normal_(one.bias)
        other.load_state_dict({"weight": one.weight.detach().t(), "bias": one.bias.detach()})
    return ours, stock


def inputs(count=5):
    return torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(net, options, steps=4):
    """Train a net with qat, to its end if that comes within these steps; return its session."""
    session, optimizer = begun_session({"qat": {"begin": 1, **options}}, net, 4)
    for _ in range(steps):
        with session.forward():
            session.loss((net(inputs()) - inputs()[..., :OUT]).square().mean()).backward()
        plain_step(session, optimizer)
    if steps == 4:
        session.finish()
    return session


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_trains_as_the_linear_layer_that_it_is(scheme):
    ours, stock = twins()
    sessions = [trained(net, SCHEMES[scheme]) for net in (ours, stock)]
    told, expected = (session.receipt().values["techniques"]["qat"]["per_layer"] for session in sessions)
    assert [entry["type"] for entry in told] == ["Conv1D", "Conv1D"]
    for one, other in zip(told, expected, strict=True):
        assert one.keys() == other.keys()
        assert one["sqnr_db"] == pytest.approx(other["sqnr_db"], abs=0.05)
    ranges = sessions[1].techniques["qat"].ranges()
    for name in ("0", "2"):
        one, other = ours[int(name)], stock[int(name)]
        assert type(one) is Conv1D
        assert set(one.state_dict()) == {"weight", "bias"}
        assert_codes_close(one.weight.t(), other.weight, code_step(ranges[name], other.weight))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_converts_as_the_linear_layer_that_it_is(scheme):
    ours, stock = twins()
    ranges = trained(ours, SCHEMES[scheme]).techniques["qat"].ranges()
    for one, other in zip(ours[::2], stock[::2], strict=True):
        other.load_state_dict({"weight": one.weight.detach().t(), "bias": one.bias.detach()})
    for backend in ("reference", "auto"):
        one, other = (convert(net, ranges, backend=backend) for net in (ours, stock))
        assert conversion_report(one) == conversion_report(other)
        # each layer from the same values: a sum in another order may turn a code of the next layer's inputs
        x = inputs()
        for layer, exact in zip(one, other, strict=True):
            torch.testing.assert_close(layer(x), exact(x))
            x = exact(x)


def test_nothing_changes_before_it_begins_and_gradients_are_those_of_the_rounded_weight():
    ours, _ = twins()
    before = copy.deepcopy(ours)
    trained(ours, {"scheme": "int8_weight", "begin": 3}, steps=2)
    assert type(ours[0]) is not Conv1D
    plain = torch.optim.SGD(before.parameters(), lr=0.1)
    for _ in range(2):
        (before(inputs()) - inputs()[..., :OUT]).square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert all(map(torch.equal, ours.parameters(), before.parameters()))
    layer = ours[0]
    layer.quantizer.bank.quantizing = True
    x = inputs()
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum((0, 1)).unsqueeze(1).expand(WIDTH, 64))
    assert layer(x[:0]).shape == (0, 3, 64)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_scales_belong_to_outputs():
    layer = Conv1D(2, 2)
    weight = torch.tensor([[3.0, 0.3], [1.4, 0.14]])
    torch.testing.assert_close(round_weight(layer, weight, 3), torch.tensor([[3.0, 0.3], [1.0, 0.1]]))
    assert list(weighted_layers(nn.Sequential(layer), None, "test")) == ["0"]


@pytest.mark.slow
def test_a_small_gpt2_is_quantized_saved_loaded_converted_and_exported(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.arange(12).view(1, 12) * 5 % 64
    quantized, report = quantize_with_report(model, "int8_dynamic")
    layers, ranges = [name for name, module in model.named_modules() if type(module) is Conv1D], report.ranges
    assert len(layers) == 8
    assert set(layers) < set(ranges)
    quantized.save_pretrained(tmp_path / "saved")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved").eval()
    expected = apply_ranges(copy.deepcopy(loaded), ranges)(tokens).logits
    for made in (convert(loaded, ranges), convert(quantized, backend="auto")):
        torch.testing.assert_close(made(tokens).logits, expected, atol=1e-4, rtol=1e-3)
    told = conversion_report(convert(quantized, backend="auto"))
    assert {told[name]["type"] for name in layers} == {"Linear"}
    assert type(loaded.transformer.h[0].attn.c_attn) is Conv1D
    file = export_onnx(quantized, {"input_ids": tokens}, tmp_path / "model.onnx")
    assert set(layers) < set(file.quantized)
    assert file.integer_nodes == {"MatMulIntegerToFloat": 9}
