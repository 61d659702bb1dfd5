"""torch's attention under quantization: against float64, in training, evaluation, conversion and ONNX files."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError
from shared_core.modules.attention import OpenAttention
from shared_core.quantization import apply_ranges, conversion_report, convert, quantize
from shared_core.quantization.ranges.saved_ranges import layer_entry
from shared_core.tools.export import export_onnx


class Net(nn.Module):
    """Self-attention in torch's encoder, attention to a memory, packed and with separate weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.separate = nn.MultiheadAttention(32, 2, kdim=16, vdim=16, batch_first=True, bias=False)
        self.memory = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x, m):
        x = self.encoder(x)
        y = self.separate(x, m, m)[0]
        y, _ = self.memory(y, x, x, need_weights=False)
        return self.head(y.mean(1))


ATTENTION = ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "separate", "memory")
WEIGHTS = {
    "encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.1.self_attn.in_proj_weight", "memory.in_proj_weight",
    "separate.q_proj_weight", "separate.k_proj_weight", "separate.v_proj_weight",
    *(f"{name}.out_proj.weight" for name in ATTENTION),
}  # fmt: skip


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 5, 32, generator=generator), torch.randn(8, 7, 16, generator=generator)


def on_grid(rows):
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


@pytest.mark.parametrize("kind", ["self", "memory", "separate"])
@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_weight"])
def test_it_multiplies_by_the_quantized_weights_and_inputs(scheme, kind):
    torch.manual_seed(0)
    width = 6 if kind == "separate" else 8
    layer = nn.MultiheadAttention(8, 2, kdim=width, vdim=width, batch_first=True)
    nn.init.normal_(layer.in_proj_bias)
    query = torch.randn(2, 3, 8)
    memory = query if kind == "self" else torch.randn(2, 5, width)
    quantized = quantize(nn.ModuleList([copy.deepcopy(layer)]).eval(), scheme)[0]
    with torch.no_grad():
        found, scores = quantized(query, memory, memory)

    rounds = on_grid if scheme == "int8_dynamic" else lambda x: x
    weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    weights = weights if kind == "separate" else layer.in_proj_weight.chunk(3)
    q, k, v = (
        (rounds(x.double()) @ on_grid(weight.detach().double()).T + bias.detach().double())
        .view(2, -1, 2, 4).transpose(1, 2)
        for x, weight, bias in zip((query, memory, memory), weights, layer.in_proj_bias.chunk(3), strict=True)
    )  # fmt: skip
    expected = (q @ k.mT / 2).softmax(-1)
    y = (expected @ v).transpose(1, 2).reshape(2, 3, 8)
    y = rounds(y) @ on_grid(layer.out_proj.weight.detach().double()).T + layer.out_proj.bias.detach().double()
    torch.testing.assert_close(scores.double(), expected.mean(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.double(), y, atol=1e-5 if scheme == "int8_weight" else 5e-3, rtol=0)


def train(net, options, steps, state=None):
    session = Session({"qat": options})
    session.attach(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if state is not None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=8)
    net.train()
    for step in range(session.step, steps):
        torch.manual_seed(step)
        plain_step(session, optimizer, net(*batch(step)).square().mean())
    return session, optimizer


@pytest.mark.parametrize("options", [
    {"scheme": "int8"}, {"scheme": "int8", "range": "lsq"}, {"scheme": "int4_weight", "recompute_weights": True},
    {"scheme": "fp8"},
], ids=str)  # fmt: skip
def test_training_bakes_every_weight_and_resumes_exactly(options):
    whole, first, second = Net(), Net(), Net()
    session, _ = train(whole, options, 8)
    assert session.coverage["qat"].share == 1
    named = session.techniques["qat"].layers.items()
    assert WEIGHTS.issubset(f"{name}.{own}" for name, layer in named for own, _ in layer.named_parameters())
    session.finish()
    assert all(type(one) is nn.MultiheadAttention for one in (whole.memory, whole.encoder.layers[0].self_attn))
    if options["scheme"] != "fp8":
        for name in WEIGHTS:
            rows = whole.get_parameter(name).detach()
            rows = rows.view(-1, 16 if options["scheme"] == "int4_weight" else rows.shape[1])
            assert max(len(row.unique()) for row in rows) <= (16 if options["scheme"] == "int4_weight" else 256), name
    fresh = nn.ModuleDict(dict(Net().named_children()))
    fresh.load_state_dict(whole.state_dict())  # the keys are torch's

    one, optimizer = train(first, options, 5)
    state = {"net": first.state_dict(), "optimizer": optimizer.state_dict(), "session": one.state_dict()}
    resumed, _ = train(second, options, 8, copy.deepcopy(state))
    resumed.finish()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items())


def test_no_fused_evaluation_passes_the_quantizers_by():
    net = Net()
    session, _ = train(net, {"scheme": "int8", "begin": 0}, 3)
    net.encoder.layers[0].dropout.p = 0.0
    x, m = batch(9)
    with torch.no_grad():
        evaluated = net.eval()(x, m)
        session.techniques["qat"].bank.quantizing = False
        in_float = net(x, m)
        session.techniques["qat"].bank.quantizing = True
        for module in net.modules():
            module.training = not isinstance(module, (nn.Dropout, nn.MultiheadAttention))
        session.techniques["qat"].bank.observing = False
        trained = net(x, m)
    assert not torch.allclose(evaluated, in_float, atol=1e-4)
    torch.testing.assert_close(evaluated, trained, atol=1e-6, rtol=0)


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int8_weight", "int4_weight"])
def test_files_and_integers_compute_what_was_trained(scheme, tmp_path):
    net = Net()
    session, _ = train(net, {"scheme": scheme}, 8)
    x, m = batch(9)
    with torch.no_grad():
        expected = net.eval()(x, m)
    session.finish()
    with torch.no_grad():
        integers = convert(net)(x, m)
    told = conversion_report(convert(net, backend="auto"))["memory"]
    assert (told["type"], "ONNX files multiply them in integers" in told["why"]) == ("MultiheadAttention", True)
    ranges = {name: layer_entry(net.get_submodule(name)) for name in (*ATTENTION, "head", "memory.out_proj")}
    assert all(ranges.values())
    assert {"min", "max"} <= ranges["memory"].keys() or scheme != "int8"
    torch.testing.assert_close(integers, expected, atol=1e-2, rtol=0)  # a code of an input may move by one

    restored = Net().eval()
    restored.load_state_dict(net.state_dict())
    everything = {name: entry for name, module in net.named_modules() if (entry := layer_entry(module)) is not None}
    with torch.no_grad():
        torch.testing.assert_close(apply_ranges(restored, everything)(x, m), expected, atol=1e-2, rtol=0)

    report = export_onnx(net, (x, m), tmp_path / "net.onnx")
    assert {*ATTENTION} < {*report.quantized}
    assert not report.float_layers
    assert report.largest_difference < 1e-5
    if scheme == "int8":
        assert report.integer_nodes == {"QGemm": 4 + 2 + 3 + 2 + 4 + 1}  # of the encoder's layers, of attention
    session = onnxruntime.InferenceSession(report.path)
    (found,) = session.run(
        None, dict(zip((one.name for one in session.get_inputs()), (x.numpy(), m.numpy()), strict=True))
    )
    assert np.abs(found - expected.numpy()).max() < 2e-2


def test_a_projection_quantized_alone_is_called_everywhere(tmp_path):
    net = Net()
    options = {"scheme": "int8_weight", "keep": True, "skip": ["*attn", "separate", "memory"]}
    session, _ = train(net, options, 8)
    session.finish()
    net.eval()
    x, m = batch(9)
    with torch.no_grad():
        expected = net(x, m)
        torch.testing.assert_close(convert(net)(x, m), expected, atol=1e-5, rtol=0)
    assert {type(one) for one in net.modules() if isinstance(one, nn.MultiheadAttention)} == {OpenAttention}
    report = export_onnx(net, (x, m), tmp_path / "net.onnx")
    assert "memory.out_proj" in report.quantized
    assert report.largest_difference < 1e-5
    session = onnxruntime.InferenceSession(report.path)
    names = [one.name for one in session.get_inputs()]
    (found,) = session.run(None, {names[0]: x.numpy(), names[1]: m.numpy()})
    assert np.abs(found - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_files_keep_the_rules_of_engines(target, tmp_path):
    net, x = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), batch(0)[0]
    nn.init.normal_(net.self_attn.in_proj_bias)
    small = quantize(net, {"scheme": "int8", "symmetric": target == "tensorrt"}, [x])
    data = [x] if target == "tensorrt" else None  # it reads shortcuts as codes
    report = export_onnx(small, x, tmp_path / "net.onnx", target=target, calibration=data)
    assert {"self_attn", "self_attn.out_proj"} < {*report.quantized}
    assert report.largest_difference < 1e-5


class Doubled(nn.MultiheadAttention):
    """A user's with another forward."""

    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)[0]


def test_attention_with_another_forward_stays_in_float_by_name():
    net = nn.ModuleDict({"own": Doubled(16, 2), "wide": nn.Linear(64, 64)})
    session = Session({"qat": {"scheme": "int8"}})
    session.attach(net)
    told = session.coverage["qat"].line()
    assert "Doubled (Doubled has a forward of its own" in told
    assert "Doubled computes with its weight itself" in told
    session.detach()
    with pytest.raises(CompatibilityError, match="include must name only layers that can be quantized, not own"):
        Session({"qat": {"scheme": "int8", "include": ["own", "wide"]}}).attach(net)


def test_nested_tensors_are_refused_while_attention_is_quantized():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    found = quantize(layer, "int8_weight").eval()
    nested = torch.nested.nested_tensor([torch.ones(3, 16), torch.ones(2, 16)])
    with pytest.raises(CompatibilityError, match=r"padded tensors .* pass key_padding_mask"):
        found(nested)
