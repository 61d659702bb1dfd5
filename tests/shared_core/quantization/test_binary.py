"""Binary inputs: signs and XNOR-Net's scales, against float64 references written from the papers."""

import copy
import pickle

import numpy as np
import pytest
import torch
from plain_loop import begun_session, plain_step
from quantization_export_runs import constants, kinds, run
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.quantization import QatConfig, apply_ranges, conversion_report, convert
from shared_core.quantization.schemes import INPUTS, WEIGHTS, LayerScheme
from shared_core.tools.export import export_onnx, onnx_layers

# (layer, shape of its input)
CONVOLUTIONS = {
    "plain": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 7, 7)),
    "padding": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 7)),
    "stride": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), (2, 4, 7, 8)),
    "dilation": (lambda: nn.Conv2d(4, 6, (3, 2), dilation=2, padding=2), (2, 4, 7, 7)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), (2, 4, 7, 7)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 7, 7)),
    "same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), (2, 4, 9)),
    "three axes": (lambda: nn.Conv3d(2, 4, 2, padding=1), (1, 2, 3, 4, 3)),
    "one example": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 7, 7)),
}


def signs(values):
    return np.where(values >= 0, 1.0, -1.0)


def padded(x, layer):
    """The input as a convolution sees it, zeros added after the sign for padding with zeros."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def reference(layer, x, scaled):
    """Rastegari et al., section 3: (sign(I) * sign(W)) ⊙ K α, one output at a time; without K if not `scaled`."""
    dims = len(layer.kernel_size)
    batch = x.double() if x.dim() == dims + 2 else x.double()[None]
    sign = padded(torch.from_numpy(signs(batch.numpy())), layer).numpy()
    magnitude = padded(batch.abs(), layer).numpy()
    weight = layer.weight.detach().double().numpy()
    alpha = np.abs(weight).reshape(len(weight), -1).mean(1)
    extent = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    sizes = [(n - e) // s + 1 for n, e, s in zip(sign.shape[2:], extent, layer.stride, strict=True)]
    width = layer.in_channels // layer.groups
    out = np.zeros((len(sign), len(weight), *sizes))
    for place in np.ndindex(len(sign), len(weight), *sizes):
        image, channel, *at = place
        begin = channel // (layer.out_channels // layer.groups) * width
        window = tuple(
            slice(p * s, p * s + e, d) for p, s, e, d in zip(at, layer.stride, extent, layer.dilation, strict=True)
        )
        part = (image, slice(begin, begin + width), *window)
        found = (sign[part] * signs(weight[channel])).sum() * alpha[channel]
        found *= magnitude[part].mean(0).mean() if scaled else 1.0
        out[place] = found + (0.0 if layer.bias is None else layer.bias[channel].item())
    return out if x.dim() == dims + 2 else out[0]


def fake_quant(layer, inputs, weights="binary"):
    """The layer with formats, as training computes it."""
    weight, weight_bits, *_ = WEIGHTS[weights]
    kind, bits, *_ = INPUTS[inputs]
    entry = {"weight": weight, "weight_bits": weight_bits, "input": kind, "activation_bits": bits}
    made = apply_ranges(layer, {"": entry})
    made.quantizer.baked = False
    return made


@pytest.mark.parametrize("inputs", ["binary", "binary_scaled"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_equal_the_paper(name, inputs):
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    x.view(-1)[:5] = 0
    expected = reference(layer, x, inputs == "binary_scaled")
    np.testing.assert_allclose(fake_quant(layer, inputs)(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inputs", ["binary", "binary_scaled"])
def test_linear_layers_and_their_gradients_equal_the_paper(inputs):
    torch.manual_seed(1)
    layer = nn.Linear(7, 5).double()
    with torch.no_grad():
        layer.weight[0, :2] = torch.tensor([1.5, -1.0])
    x = (torch.randn(3, 4, 7, dtype=torch.float64) * 1.5).requires_grad_()
    y = fake_quant(layer, inputs)(x)
    values, weight = x.detach().numpy(), layer.weight.detach().numpy()
    beta = np.abs(values).mean(-1, keepdims=True) if inputs == "binary_scaled" else np.ones((3, 4, 1))
    alpha = np.abs(weight).mean(1, keepdims=True)
    rounded = alpha * signs(weight)
    np.testing.assert_allclose(y.detach().numpy(), beta * signs(values) @ rounded.T + layer.bias.detach().numpy())
    grad = torch.randn_like(y)
    y.backward(grad)
    expected = grad.numpy() @ rounded * beta * (np.abs(values) <= 1)
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12, atol=1e-14)
    rows = grad.numpy().reshape(-1, 5).T @ (beta * signs(values)).reshape(-1, 7)
    np.testing.assert_allclose(layer.weight.grad.numpy(), rows * (np.abs(weight) <= 1), rtol=1e-12, atol=1e-14)


def test_gradients_of_a_scaled_convolution_pass_through_signs_and_not_through_scales():
    torch.manual_seed(2)
    layer = nn.Conv1d(3, 4, 2, padding=1).double()
    x = (torch.randn(2, 3, 6, dtype=torch.float64) * 1.5).requires_grad_()
    fake_quant(layer, "binary_scaled")(x).square().sum().backward()
    # the same with K and α as numbers, and the signs as leaves
    sign, weight = (torch.from_numpy(signs(v.detach().numpy())).requires_grad_() for v in (x, layer.weight))
    box = torch.full((1, 1, 2), 0.5, dtype=torch.float64)
    scale = nn.functional.conv1d(x.detach().abs().mean(1, keepdim=True), box, padding=1)
    alpha = layer.weight.detach().abs().mean((1, 2), keepdim=True)
    y = nn.functional.conv1d(sign, weight * alpha, padding=1) * scale + layer.bias.detach().view(-1, 1)
    y.square().sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), (sign.grad * (x.detach().abs() <= 1)).numpy(), rtol=1e-12, atol=1e-13)
    # the gradient of binary weights passes as if α were 1
    np.testing.assert_allclose(layer.weight.grad.numpy(), (weight.grad / alpha).numpy(), rtol=1e-12, atol=1e-13)


def test_a_transposed_convolution_scales_each_position_of_its_input():
    torch.manual_seed(3)
    layer = nn.ConvTranspose1d(4, 3, 2, stride=2).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    values = signs(x.numpy()) * x.abs().mean(1, keepdim=True).numpy()
    weight = layer.weight.detach()
    rounded = torch.from_numpy(signs(weight.numpy())) * weight.abs().mean((0, 2), keepdim=True)
    expected = nn.functional.conv_transpose1d(torch.from_numpy(values), rounded, layer.bias.detach(), stride=2)
    np.testing.assert_allclose(fake_quant(layer, "binary_scaled")(x).detach(), expected, rtol=1e-12)


def test_nan_stays_nan_and_empty_batches_pass():
    layer = fake_quant(nn.Conv2d(2, 3, 3), "binary_scaled")
    x = torch.randn(2, 2, 4, 4)
    x[0, 0, 0, 0] = torch.nan
    assert layer(x).flatten(1).isnan().any(1).tolist() == [True, False]
    assert layer(x[:0]).shape == (0, 3, 2, 2)


@pytest.mark.parametrize(("options", "scheme"), [
    ({"scheme": "xnor_net"}, LayerScheme("binary", 1, input="binary_scaled", activation_bits=1)),
    ({"weights": "binary", "inputs": "binary"}, LayerScheme("binary", 1, input="binary", activation_bits=1)),
    ({"scheme": "binary", "activation_bits": 1}, LayerScheme("binary", 1, input="binary", activation_bits=1)),
    ({"weights": "ternary", "activation_bits": 1}, LayerScheme("ternary", 2, input="binary", activation_bits=1)),
    ({"weights": "int8", "inputs": "binary", "weight_bits": 4}, LayerScheme("channel", 4, input="binary",
                                                                           activation_bits=1)),
    ({"scheme": "binary", "activation_bits": 4}, LayerScheme("binary", 1, activation_bits=4)),
])  # fmt: skip
def test_flags_give_these_schemes(options, scheme):
    assert QatConfig(**options).layer_scheme == scheme


@pytest.mark.parametrize(("options", "message"), [
    ({"weights": "int8", "inputs": "binary_scaled"}, "binary_scaled inputs are those of XNOR-Net"),
    ({"weights": "bf16", "inputs": "binary"}, "bf16 weights multiply only float inputs"),
    ({"scheme": "int8", "activation_bits": 1}, "one bit stands for signs"),
    ({"weights": "binary", "inputs": "binary", "activation_bits": 4}, "activation_bits needs .* binary alone"),
    ({"weights": "int8", "inputs": "binary", "activation_bits": 1}, "activation_bits needs inputs of int8_static"),
    ({"scheme": "xnor_net", "range": "mse"}, "range needs inputs of int8_static"),
])  # fmt: skip
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        QatConfig(**options)


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_tells_that_signs_of_inputs_are_not_in_the_final_model(keep):
    session = Session({"qat": {"scheme": "xnor_net", "keep": keep}})
    session.attach(xnor_net())
    assert any("the final model reads float inputs" in note for note in session.notes) is not keep


@pytest.mark.parametrize("options", [
    {"scheme": "xnor_net"}, {"weights": "binary"}, {"scheme": "int8", "overrides": ["0:weights=binary"]},
], ids=str)  # fmt: skip
def test_pruning_is_refused_as_binary_weights_are_never_zero(options):
    with pytest.raises(CompatibilityError, match="qat with binary weights cannot be combined with prune"):
        Session({"qat": options, "prune": {"sparsity": 0.5}}).attach(xnor_net())


def xnor_net():
    """Blocks of XNOR-Net: batch norm, binary convolution, pool; the first and last layers are in float."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2),
        nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, padding=1), nn.MaxPool2d(2),
        nn.Flatten(), nn.BatchNorm1d(128), nn.Linear(128, 64), nn.BatchNorm1d(64), nn.Linear(64, 4),
    )  # fmt: skip


def patterns(count, seed):
    """Noisy images whose label is the quadrant with a bright spot."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    images = torch.randn(count, 1, 8, 8, generator=generator) * 0.5
    for number, label in enumerate(labels.tolist()):
        row, column = 4 * (label // 2), 4 * (label % 2)
        images[number, 0, row : row + 3, column : column + 3] += 1
    return images, labels


@pytest.mark.parametrize("options", [{"scheme": "xnor_net"}, {"scheme": "binary", "activation_bits": 1}], ids=str)
def test_a_whole_net_trains_and_deploys_bit_for_bit(options):
    net = xnor_net()
    session, optimizer = begun_session({"qat": {**options, "skip": ["first", "last"]}}, net, 60, lr=0.05)
    for step in range(60):
        images, labels = patterns(32, step)
        with session.forward():
            plain_step(session, optimizer, nn.functional.cross_entropy(net(images), labels))
    images, labels = patterns(200, 999)
    net.eval()
    with session.swapped("evaluate"), torch.no_grad():
        trained = net(images)
    session.finish()
    layers = {entry["name"]: entry for entry in session.receipt()["techniques"]["qat"]["per_layer"]}
    assert {*layers} == {"2", "5", "9"}
    assert {entry["activation_bits"] for entry in layers.values()} == {1}
    assert (trained.argmax(1) == labels).float().mean() > 0.9
    for name in layers:
        rows = net[int(name)].weight.flatten(1)
        assert torch.equal(rows.abs(), rows[:, :1].abs().expand_as(rows))  # −α and α
    plain = xnor_net().eval()
    plain.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert torch.equal(apply_ranges(plain, session.files.deployment()["qat"]["ranges"])(images), trained)


LINEAR = {"linear": (lambda: nn.Linear(70, 9), (33, 70)), "tokens": (lambda: nn.Linear(70, 9, bias=False), (2, 3, 70))}


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("inputs", ["binary", "binary_scaled"])
@pytest.mark.parametrize("name", CONVOLUTIONS | LINEAR)
def test_conversion_computes_the_same_on_bits(name, inputs, backend):
    torch.manual_seed(5)
    make, shape = (CONVOLUTIONS | LINEAR)[name]
    layer, x = make(), torch.randn(shape)
    x.view(-1)[:3] = torch.tensor([0.0, -0.0, torch.inf if inputs == "binary" else 0.0])
    with torch.no_grad():
        # α is a power of two: without scales every sum is exact in float32 too
        layer.weight.copy_(torch.where(layer.weight < 0, -0.5, 0.5))
    fake = fake_quant(copy.deepcopy(layer), inputs)
    integer = convert(fake, backend=backend)
    report = conversion_report(integer)[""]
    assert report["type"] == type(layer).__name__
    int8 = backend == "auto" and (name in LINEAR or (isinstance(layer, nn.Conv2d) and name != "reflect"))
    assert ("int8 x int8" if int8 else "XNOR and popcount") in report["kernel"]
    with torch.no_grad():
        expected, found = fake(x), integer(x)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        if inputs == "binary" and layer.bias is None:
            assert torch.equal(found, expected)
        torch.testing.assert_close(convert(fake, backend=backend).double()(x.double()).float(), expected)
    assert torch.equal(integer.weight, layer.weight)
    for copied in (copy.deepcopy(integer), pickle.loads(pickle.dumps(integer))):
        assert torch.equal(copied(x), found)
    other = convert(fake_quant(make(), inputs), backend=backend)
    other.load_state_dict(integer.state_dict())
    assert torch.equal(other(x), found)
    x.view(-1)[0] = torch.nan
    torch.testing.assert_close(integer(x), fake(x), equal_nan=True)


@pytest.mark.parametrize("scheme", ["xnor_net", "binary"])
def test_a_converted_net_holds_a_bit_for_each_weight(scheme):
    options = {"scheme": scheme, "inputs": "binary" if scheme == "binary" else "auto", "skip": ["first", "last"]}
    net = xnor_net()
    session, optimizer = begun_session({"qat": options}, net, 4, lr=0.05)
    for step in range(4):
        images, labels = patterns(32, step)
        with session.forward():
            plain_step(session, optimizer, nn.functional.cross_entropy(net(images), labels))
    during = convert(net)
    session.finish()
    images, _ = patterns(16, 99)
    after = convert(net)
    fake = apply_ranges(copy.deepcopy(net), session.files.deployment()["qat"]["ranges"]).eval()
    with torch.no_grad():
        torch.testing.assert_close(after(images), fake(images), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(after(images), during(images), rtol=1e-4, atol=1e-4)
    for name in ("2", "5", "9"):
        held = after.get_submodule(name).state_dict()
        assert sorted(held) == ["bias", "weight_bits", "weight_scale"]
        assert held["weight_bits"].nbytes * 8 == net.get_submodule(name).weight.numel()
    kernels = {name: entry["kernel"] for name, entry in conversion_report(after).items()}
    assert {name for name, kernel in kernels.items() if kernel == "float"} == {"0", "11"}
    assert "XNOR" in kernels["2"]


def test_weights_that_are_not_binary_are_refused():
    entry = {"weight": "binary", "weight_bits": 1, "input": "binary", "activation_bits": 1}
    with pytest.raises(CompatibilityError, match="binary weights must be −α and α in each channel"):
        convert(nn.Sequential(nn.Linear(4, 3)), {"0": entry})


def test_other_weights_with_binary_inputs_compute_on_their_values():
    fake = fake_quant(nn.Sequential(nn.Linear(8, 3))[0], "binary", "ternary")
    x = torch.randn(5, 8)
    assert torch.equal(convert(fake)(x), fake.eval()(x))
    assert conversion_report(convert(fake))[""]["kernel"] == "reference: quantized values, in float"


class Recurrent(nn.Module):
    """An LSTM and a transposed convolution, whose inputs are scaled token by token."""

    def __init__(self):
        super().__init__()
        self.lstm, self.up = nn.LSTM(12, 8, batch_first=True), nn.ConvTranspose1d(8, 4, 2, stride=2)

    def forward(self, x):
        return self.up(self.lstm(x)[0].transpose(1, 2))


def trained(make, options):
    net = make()
    session, optimizer = begun_session({"qat": options}, net, 6, lr=0.05)
    for step in range(6):
        images, _ = patterns(32, step)
        with session.forward():
            plain_step(session, optimizer, net(example(net, images)).square().mean())
    session.finish()
    return apply_ranges(net.eval(), session.files.deployment()["qat"]["ranges"])


def example(net, images):
    return images.view(len(images), -1)[:, :60].reshape(-1, 5, 12) if isinstance(net, Recurrent) else images


@pytest.mark.parametrize(("make", "options"), [
    (xnor_net, {"scheme": "xnor_net", "skip": ["first", "last"]}),
    (xnor_net, {"weights": "binary", "inputs": "binary"}),
    (xnor_net, {"weights": "int8", "inputs": "binary", "skip": ["first"]}),
    (Recurrent, {"scheme": "xnor_net"}),
])  # fmt: skip
def test_onnx_files_compute_the_same(make, options, tmp_path):
    model = trained(make, options)
    images = example(model, patterns(64, 99)[0]).clone(memory_format=torch.contiguous_format)
    images.view(-1)[:5] = torch.tensor([0.0, -0.0, 0.0, 1.0, -1.0])
    path = tmp_path / "model.onnx"
    report = export_onnx(model, images, path)
    assert report.largest_difference < 1e-5
    assert {"Less", "Where"} <= {*kinds(path)}
    codes = [value for name, value in constants(path).items() if name.endswith("_codes")]
    assert all(value.dtype in (np.int8, np.uint8) for value in codes)
    with torch.no_grad():
        expected = model(images).numpy()
    for optimize in (False, True):
        np.testing.assert_allclose(run(path, images, optimize=optimize), expected, atol=1e-4)


def test_a_file_whose_zeros_are_negative_is_found(tmp_path, monkeypatch):
    model = fake_quant(nn.Linear(6, 3), "binary")
    x = torch.randn(8, 6)
    x[:, 0] = 0
    opposite = lambda x: -torch.where(-x < 0, -1.0, 1.0)  # noqa: E731
    monkeypatch.setattr(onnx_layers, "signs", opposite)
    with pytest.raises(CompatibilityError, match="must equal the model's"):
        export_onnx(nn.Sequential(model), x, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("frozen", [False, True])
def test_steps_clip_binary_weights_once_rounding_is_on(frozen):
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        net[0].weight[0] = torch.tensor([1.4, -1.2, 0.9, -0.95])
    net[0].weight.requires_grad_(not frozen)
    first = net[0].weight.detach().clone()
    options = {"scheme": "binary", "begin": 1, "overrides": {"1": {"weights": "ternary"}}}
    session, optimizer = begun_session({"qat": options}, net, 4, lr=0.5)
    expected = first.double()
    for step in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        net(x).sum().mul(3).backward()
        expected = expected if frozen else expected - 0.5 * net[0].weight.grad.double()
        expected = expected if frozen or not step else expected.clamp(-1, 1)
        plain_step(session, optimizer)
        torch.testing.assert_close(net[0].weight.detach().double(), expected, rtol=0, atol=1e-6)
    assert frozen or (net[0].weight.abs() == 1).any()
    assert net[1].weight.abs().max() > 1  # ternary weights pass all gradients
