"""Fake quantization, its scales and its ranges for groups, tokens and channels against float64 references."""

import math

import numpy as np
import pytest
import torch
from eff_kernels.quantization import affine as kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.quantization import MappingType, dequantize_affine, quantize_affine
from torchao.quantization import choose_qparams_affine as theirs_qparams

from shared_core.errors import ConfigError
from shared_core.modules.weight_views import output_channels_first
from shared_core.numerics import round_to
from shared_core.quantization import (
    choose_qparams_activation,
    choose_qparams_affine,
    choose_qparams_symmetric,
    dequantize_groups,
    fake_quantize,
    fake_quantize_groups,
    fake_quantize_tokens,
    fake_quantize_weight,
    fp8_fake_quantize,
    quantize_groups,
)


def reference(x, scale, zero_point, qmin, qmax):
    """Values and gate of the formula, in float64."""
    exact = np.asarray(x, np.float64) / scale
    codes = np.clip(np.rint(exact) + zero_point, qmin, qmax)
    inside = (exact + zero_point >= qmin) & (exact + zero_point <= qmax)
    return scale * (codes - zero_point), inside


@pytest.mark.parametrize(("scale", "zero_point", "qmin", "qmax"), [
    (0.0625, 0, -127, 127), (0.03125, 17, -128, 127), (0.25, 0, 0, 15), (0.5, -2, -2, 1),
    (0.125, 200, 0, 255), (1.0, 9, 4, 16), (1.0, -9, -16, -4),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_formula_in_every_type(scale, zero_point, qmin, qmax, dtype):
    torch.manual_seed(0)
    x = torch.cat([torch.randn(2000) * 6, torch.arange(-300, 300) * scale / 2]).to(dtype).requires_grad_()
    y = fake_quantize(x, scale, zero_point, qmin, qmax)
    grad_out = torch.randn(x.shape).to(dtype)
    y.backward(grad_out)
    value, inside = reference(x.detach().double().numpy(), scale, zero_point, qmin, qmax)
    assert y.dtype == dtype
    assert x.grad.dtype == dtype
    assert torch.equal(y.detach(), torch.from_numpy(value).to(dtype))
    # powers of two keep x/s + z exact, so the gate must be right at its very edges
    assert torch.equal(x.grad != 0, torch.from_numpy(inside) & (grad_out != 0))
    assert torch.equal(x.grad[torch.from_numpy(inside)], grad_out[torch.from_numpy(inside)])


def test_arbitrary_scales_against_float64():
    torch.manual_seed(1)
    x = torch.randn(20_000) * 3
    for scale, zero_point in ((0.0173, 5), (0.1, -128), (3.3e-3, 100)):
        s = float(np.float32(scale))
        value, _ = reference(x.double().numpy(), s, zero_point, -128, 127)
        y = fake_quantize(x, scale, zero_point, -128, 127).double().numpy()
        wrong = np.abs(y - value) > 1e-6 * np.abs(value) + 1e-12
        # float32 division may round onto a tie; there both neighbors are as near
        assert wrong.mean() < 1e-4
        assert np.abs(y - value).max() <= s * 1.0001


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_per_channel_equals_each_channel_alone(axis):
    torch.manual_seed(2)
    x = torch.randn(4, 5, 6)
    channels = x.shape[axis]
    scale, zero_point = torch.rand(channels) * 0.1 + 0.01, torch.arange(channels)
    whole = fake_quantize(x, scale, zero_point, -8, 7, axis=axis)
    for index in range(channels):
        alone = fake_quantize(x.select(axis, index), scale[index], zero_point[index], -8, 7)
        assert torch.equal(whole.select(axis, index), alone)


def test_agrees_with_torch_away_from_the_edge_and_at_it_with_the_rounded_gate():
    torch.manual_seed(3)
    start = torch.randn(5000) * 6
    ours, rounded, theirs = (start.clone().requires_grad_() for _ in range(3))
    y = fake_quantize(ours, 0.0625, 3, -128, 127)
    z = fake_quantize(rounded, 0.0625, 3, -128, 127, gate="rounded")
    t = torch.fake_quantize_per_tensor_affine(theirs, 0.0625, 3, -128, 127)
    for out in (y, z, t):
        out.sum().backward()
    assert torch.equal(y, t)
    assert torch.equal(z, t)
    assert torch.equal(rounded.grad, theirs.grad)
    exact = start / 0.0625 + 3
    edge = ((exact > 127) & (exact <= 127.5)) | ((exact < -128) & (exact >= -128.5))
    assert edge.any()
    assert torch.equal(ours.grad[~edge], theirs.grad[~edge])
    assert not ours.grad[edge].any()
    assert theirs.grad[edge].all()


def test_per_channel_agrees_with_torch():
    torch.manual_seed(4)
    x = torch.randn(8, 30, requires_grad=True)
    scale = torch.tensor([2.0**-k for k in range(3, 11)])
    y = fake_quantize(x, scale, 0, -127, 127, axis=0)
    t = torch.fake_quantize_per_channel_affine(x, scale, torch.zeros(8, dtype=torch.int32), 0, -127, 127)
    assert torch.equal(y, t)


def test_codes_are_those_of_onnx_quantize_linear():
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(5)
    x = torch.cat([torch.randn(3000), torch.arange(-400, 400) * 0.005])
    scale, zero_point = choose_qparams_affine(x.min(), x.max(), -128, 127)
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])
    back = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])
    infos = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("x", 1), ("s", 1), ("z", 3))]
    graph = helper.make_graph([node, back], "qdq", infos, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    feed = {"x": x.numpy(), "s": scale.numpy(), "z": zero_point.numpy().astype(np.int8)}
    (theirs,) = ReferenceEvaluator(model).run(None, feed)
    assert np.array_equal(fake_quantize(x, scale, zero_point, -128, 127).numpy(), theirs)


def test_nan_and_infinity_are_not_swallowed():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], requires_grad=True)
    y = fake_quantize(x, 0.5, 0, -4, 3)
    assert y[0].isnan()
    assert y[1:].tolist() == [1.5, -2.0, 1.0]
    y.backward(torch.tensor([float("nan"), 1.0, 1.0, 1.0]))
    assert x.grad[0].isnan()
    assert x.grad[1:].tolist() == [0.0, 0.0, 1.0]
    weight = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    assert kernels.fake_quantize_symmetric(weight, 0, 127)[0].isnan().all()


@settings(max_examples=60, deadline=None)
@given(
    st.floats(2.0**-13, 1024.0, width=32), st.integers(-128, 127), st.integers(2, 8), st.integers(0, 2**31),
)  # fmt: skip
def test_idempotent_and_within_half_a_step(scale, zero_point, bits, seed):
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    zero_point = max(qmin, min(qmax, zero_point))
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * scale * 2 ** (bits - 1)
    once = fake_quantize(x, scale, zero_point, qmin, qmax)
    assert torch.equal(fake_quantize(once, scale, zero_point, qmin, qmax), once)
    inside = (x / scale + zero_point >= qmin) & (x / scale + zero_point <= qmax)
    assert ((once - x).abs()[inside] <= scale * 0.5001).all()
    assert len(once.unique()) <= 2**bits


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=8),
       st.sampled_from([1, 3, 7, 31, 63, 127]))  # fmt: skip
def test_largest_weight_is_never_outside(values, qmax):
    weight = torch.tensor([values])
    scale = choose_qparams_symmetric(weight, 0, qmax)
    assert (scale > 0).all()
    assert (weight.abs() / scale[:, None]).max() <= qmax
    amax = np.abs(np.float64(weight.numpy())).max()
    if amax > 1e-30:
        assert scale.item() == pytest.approx(amax / qmax, rel=2e-7)


def test_symmetric_shortcut_equals_the_general_op():
    torch.manual_seed(6)
    for shape in ((7, 9), (4, 3, 2, 2), (5,)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            weight = torch.randn(shape).to(dtype)
            weight[0] = 0
            general = fake_quantize(weight, choose_qparams_symmetric(weight), 0, -127, 127, axis=0)
            assert torch.equal(kernels.fake_quantize_symmetric(weight, 0, 127), general)


@settings(max_examples=200, deadline=None)
@given(
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(0, 2.0**100, width=32),
    st.sampled_from([(-128, 127), (0, 255), (-2, 1)]),
)
def test_affine_scale_and_zero_point(minimum, span, codes):
    qmin, qmax = codes
    maximum = float(np.float32(minimum + span))
    scale, zero_point = choose_qparams_affine(minimum, maximum, qmin, qmax)
    low, high = min(minimum, 0.0), max(maximum, 0.0)
    exact = np.float32((high - low) / (qmax - qmin))
    assert scale.item() == (exact if exact else 1.0)
    assert zero_point.item() == np.clip(np.rint(qmin - low / np.float64(scale.item())), qmin, qmax)
    assert fake_quantize(torch.zeros(1), scale, zero_point, qmin, qmax).item() == 0.0


def test_degenerate_and_extreme_ranges():
    assert choose_qparams_affine(0.0, 0.0, -128, 127) == (torch.tensor(1.0), torch.tensor(-128))
    big = 3.4e38
    scale, _ = choose_qparams_affine(-big, big, -128, 127)
    assert scale.item() == pytest.approx(2 * big / 255)
    assert choose_qparams_affine(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 5.0]), 0, 255)[0].shape == (2,)


def test_compiles_as_one_graph():
    scale, zero_point = torch.tensor(0.0625), torch.tensor(3, dtype=torch.int32)

    def step(x, w):
        y = fake_quantize(x, scale, zero_point, -128, 127)
        return (y @ kernels.fake_quantize_symmetric(w, 0, 127).T).square().sum()

    torch.manual_seed(7)
    x, w = torch.randn(8, 16) * 6, torch.randn(4, 16)
    grads = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        run(*leaves).backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def group_reference(group, bits, symmetric):
    """Values of one group by the formulas, with the scale as float32 stores it."""
    exact = np.asarray(group, np.float64)
    if symmetric:
        qmax = 2 ** (bits - 1) - 1
        s = float(np.float32(np.abs(exact).max() / qmax)) or 1.0
        return s * np.rint(exact / s)
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = min(exact.min(), 0.0), max(exact.max(), 0.0)
    s = float(np.float32((high - low) / (qmax - qmin))) or 1.0
    z = np.clip(np.rint(qmin - low / s), qmin, qmax)
    return s * (np.clip(np.rint(exact / s) + z, qmin, qmax) - z)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 128), (2, 16), (3, 64)])
def test_groups_equal_the_formula(bits, group_size, symmetric):
    torch.manual_seed(0)
    x = torch.randn(6, 256) * torch.logspace(-3, 3, 6)[:, None]
    x[0, :group_size] = 0
    x[1] = x[1].abs()
    x[2] = -x[2].abs()
    y = fake_quantize_groups(x, group_size, bits, symmetric=symmetric).double().numpy()
    for row in range(6):
        for start in range(0, 256, group_size):
            group = x[row, start : start + group_size].numpy()
            expected = group_reference(group, bits, symmetric)
            step = np.abs(group).max() / (2 ** (bits - 1) - 1) + 1e-30
            wrong = np.abs(y[row, start : start + group_size] - expected) > 1e-5 * step
            # float32 division may round onto a tie; there both neighbors are as near
            assert wrong.sum() <= 1
            assert np.abs(y[row, start : start + group_size] - group).max() <= step * 1.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradient_passes_everywhere_and_codes_stand_for_the_values(dtype, symmetric):
    torch.manual_seed(1)
    x = torch.randn(3, 5, 64).to(dtype).requires_grad_()
    y = fake_quantize_groups(x, 32, 4, symmetric=symmetric)
    grad = torch.randn(x.shape).to(dtype)
    y.backward(grad)
    assert y.dtype == dtype
    assert torch.equal(x.grad, grad)
    codes, scale, zero_point = quantize_groups(x, 32, 4, symmetric=symmetric)
    assert codes.dtype == zero_point.dtype == torch.int8
    assert codes.shape == x.shape
    assert scale.shape == zero_point.shape == (3, 5, 2)
    assert codes.min() == (-7 if symmetric else -8)
    assert codes.max() == 7
    assert torch.equal(dequantize_groups(codes, scale, zero_point, dtype), y.detach())


@pytest.mark.parametrize(("group_size", "bits"), [(32, 4), (128, 4), (256, 8)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_equals_torchao(group_size, bits, symmetric, exact):
    torch.manual_seed(2)
    x = torch.randn(16, 256)
    qmax = 2 ** (bits - 1) - 1
    qmin = -qmax if symmetric else -qmax - 1
    if exact:
        # ranges that make the scale a power of two: no rounding separates x/s from x·(1/s)
        groups = (x * qmax / 4).clamp_(qmin, qmax).view(16, -1, group_size)
        groups[..., 0], groups[..., 1] = qmin, qmax
        x = (groups * 2.0 ** -torch.arange(16.0)[:, None, None]).view(16, 256)
    kind = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    scale, zero_point = theirs_qparams(x, kind, (1, group_size), torch.int8, qmin, qmax)
    codes = quantize_affine(x, (1, group_size), scale, zero_point, torch.int8, qmin, qmax)
    theirs = dequantize_affine(codes, (1, group_size), scale, zero_point, torch.int8, qmin, qmax)
    ours = fake_quantize_groups(x, group_size, bits, symmetric=symmetric)
    our_codes, our_scale, our_zero_point = quantize_groups(x, group_size, bits, symmetric=symmetric)
    torch.testing.assert_close(our_scale.flatten(), scale.flatten(), rtol=0 if exact else 3e-7, atol=0)
    assert torch.equal(our_zero_point.flatten().int(), zero_point.flatten())
    if exact:
        assert torch.equal(our_codes, codes)
        assert torch.equal(ours, theirs)
    else:
        assert (our_codes != codes).float().mean() < 1e-3
        assert (our_codes.int() - codes).abs().max() <= 1
        torch.testing.assert_close(ours[our_codes == codes], theirs[our_codes == codes], rtol=1e-6, atol=0)


def test_tokens_are_rows_and_do_not_see_each_other():
    torch.manual_seed(3)
    x = torch.randn(4, 7, 48)
    for symmetric in (True, False):
        y = fake_quantize_tokens(x, symmetric=symmetric)
        assert torch.equal(y, fake_quantize_groups(x, 48, 8, symmetric=symmetric))
        assert torch.equal(y[2, 3], fake_quantize_tokens(x[2, 3], symmetric=symmetric))
    assert fake_quantize_tokens(torch.zeros(0, 48)).shape == (0, 48)
    scaled = fake_quantize_tokens(x * torch.tensor([1.0, 1024.0, 0.125, 1.0])[:, None, None])
    assert torch.equal(scaled[1], fake_quantize_tokens(x)[1] * 1024)


@pytest.mark.parametrize(("layer", "groups"), [
    (nn.ConvTranspose1d(6, 4, 3, groups=2), 2), (nn.ConvTranspose2d(6, 5, 3), 1),
    (nn.ConvTranspose2d(6, 9, 2, groups=3), 3), (nn.ConvTranspose3d(4, 4, 2, groups=4), 4),
])  # fmt: skip
def test_transposed_convolutions_share_a_scale_within_an_output_channel(layer, groups):
    torch.manual_seed(4)
    weight = torch.randn(layer.weight.shape)
    y = fake_quantize_weight(weight, 4, transposed=True, groups=groups)
    inputs, outputs = layer.in_channels // groups, layer.out_channels // groups
    for g in range(groups):
        for j in range(outputs):
            part = weight[g * inputs : (g + 1) * inputs, j]
            s = part.abs().max() / 7
            torch.testing.assert_close(y[g * inputs : (g + 1) * inputs, j], (part / s).round() * s)
    first = output_channels_first(weight, groups)
    assert first.shape[0] == layer.out_channels
    assert torch.equal(output_channels_first(first, groups), weight)
    # what one output channel is computed from: only its slice moves it
    channel = 1
    changed = first.clone()
    changed[channel] += 1
    x = torch.randn(2, layer.in_channels, *[3] * (weight.dim() - 2))
    with torch.no_grad():
        layer.weight.copy_(weight)
        before = layer(x)
        layer.weight.copy_(output_channels_first(changed, groups))
        moved = (layer(x) != before).flatten(2).any(2).any(0)
    assert moved.nonzero().flatten().tolist() == [channel]
    weight.requires_grad_()
    grad = torch.randn(weight.shape)
    fake_quantize_weight(weight, 4, transposed=True, groups=groups).backward(grad)
    assert torch.equal(weight.grad, grad)


@pytest.mark.parametrize("layer", [
    nn.Linear(5, 3), nn.Conv1d(4, 6, 3, groups=2), nn.Conv2d(3, 4, 3), nn.Conv3d(2, 3, 2), nn.Embedding(7, 5),
])  # fmt: skip
def test_other_layers_have_a_scale_for_each_row(layer):
    weight = layer.weight.detach()
    y = fake_quantize_weight(weight)
    for row in range(len(weight)):
        s = weight[row].abs().max() / 127
        torch.testing.assert_close(y[row], (weight[row] / s).round() * s)
    assert len(fake_quantize_weight(weight, 2)[0].unique()) <= 3


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fp8_equals_rounding_to_the_format(format, axis, dtype):
    torch.manual_seed(5)
    x = (torch.randn(5, 40, 6) * torch.logspace(-6, 4, 5)[:, None, None]).to(dtype)
    x[:, :, 0] = 0
    largest = 448.0 if format == "fp8_e4m3" else 57344.0
    dims = [dim for dim in range(3) if axis is None or dim != axis % 3]
    s = x.float().abs().amax(dims, keepdim=True).clamp_min(2.0**-126 * largest) / largest
    expected = (round_to((x.float() / s).clamp(-largest, largest), format) * s).to(dtype)
    x.requires_grad_()
    y = fp8_fake_quantize(x, format, axis)
    assert torch.equal(y.detach(), expected)
    grad = torch.randn(x.shape).to(dtype)
    y.backward(grad)
    assert torch.equal(x.grad, grad)
    relative = ((y - x).abs() / x.abs().clamp_min(1e-30))[x.abs() > s * 2.0**-4]
    assert relative.max() <= (2**-4 if format == "fp8_e4m3" else 2**-3) * 1.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_groups_do_not_swallow_what_is_not_finite(bad):
    x = torch.ones(2, 8)
    x[0, 3] = bad
    for symmetric in (True, False):
        assert fake_quantize_groups(x, 4, symmetric=symmetric).isnan().tolist() == [
            [True] * 4 + [False] * 4,
            [False] * 8,
        ]
        assert fake_quantize_tokens(x, symmetric=symmetric).isnan().all(1).tolist() == [True, False]
        with pytest.raises(ConfigError, match="x must be finite"):
            quantize_groups(x, 4, symmetric=symmetric)
    assert fake_quantize_weight(x).isnan().all(1).tolist() == [True, False]
    assert fp8_fake_quantize(x, axis=0).isnan().all(1).tolist() == [True, False]
    assert fp8_fake_quantize(x).isnan().all()


def stochastic_ops():
    generator = torch.Generator().manual_seed(6)
    options = {"rounding": "stochastic", "generator": generator}
    return {
        "tensor": lambda x: fake_quantize(x, 0.25, 3, -128, 127, **options),
        "channel": lambda x: fake_quantize(x, torch.full((len(x),), 0.25), 0, -128, 127, axis=0, **options),
        "group": lambda x: fake_quantize_groups(x, 16, 6, symmetric=True, **options),
        "affine": lambda x: fake_quantize_groups(x, 16, 6, **options),
        "token": lambda x: fake_quantize_tokens(x, 6, **options),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "channel", "group", "affine", "token"])
def test_stochastic_rounding_has_the_right_mean_and_only_the_two_neighbors(name):
    op = stochastic_ops()[name]
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(7))
    draws = torch.stack([op(x) for _ in range(4000)]).double()
    step = (draws.amax(0) - draws.amin(0)).max().item()
    # what an affine range cuts off at its ends has another mean
    inside = (draws.amax(0) > x) & (draws.amin(0) < x)
    assert inside.float().mean() > 0.8
    error = (draws.mean(0) - x)[inside].abs() / step
    assert error.max() < 5 * 0.5 / math.sqrt(4000)
    assert ((draws - x).abs() <= step * 1.0001).all()
    for column in draws.flatten(1).unbind(1):
        assert len(column.unique()) <= 2


def test_stochastic_rounding_repeats_from_its_generator_and_keeps_codes_and_gradient():
    x = (torch.randn(8, 32) * 3).requires_grad_()
    first, second = (stochastic_ops()["tensor"](x) for _ in range(2))
    assert torch.equal(first, second)
    grid = torch.arange(-8.0, 8.0).view(1, 16)
    assert torch.equal(fake_quantize(grid * 0.5, 0.5, 0, -8, 7, rounding="stochastic"), grid * 0.5)
    fake_quantize(x, 0.5, 0, -4, 3, rounding="stochastic").sum().backward()
    assert torch.equal(x.grad, ((x / 0.5 >= -4) & (x / 0.5 <= 3)).float())
    x.grad = None
    y = fake_quantize(x, 0.5, 0, -4, 3, gate="rounded", rounding="stochastic")
    y.sum().backward()
    assert not x.grad[(x / 0.5 > 4) | (x / 0.5 < -5)].any()
    undecided = (x / 0.5 > 3) & (x / 0.5 < 4)
    assert 0 < x.grad[undecided].mean() < 1
    special = torch.tensor([float("nan"), float("inf"), -float("inf")])
    out = fake_quantize(special, 0.5, 0, -4, 3, rounding="stochastic")
    assert out.isnan().tolist() == [True, False, False]
    assert out[1:].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("minimum", "maximum", "clip", "expected"), [
    (0.0, 2.55, None, (2.55 / 255, 0, 0, 255)), (0.5, 2.55, None, (2.55 / 255, 0, 0, 255)),
    (-1.0, 1.55, None, (0.01, -28, -128, 127)), (-0.17, 40.0, 10.0, (10.17 / 255, -124, -128, 127)),
    (-0.17, 4.0, 10.0, (4.17 / 255, -118, -128, 127)), (20.0, 40.0, 10.0, (10 / 255, 0, 0, 255)),
])  # fmt: skip
def test_codes_of_activations_follow_range_and_clip(minimum, maximum, clip, expected):
    got = choose_qparams_activation(minimum, maximum, clip=clip)
    assert got.scale.item() == pytest.approx(expected[0], rel=1e-6)
    assert (got.zero_point.item(), got.qmin, got.qmax) == expected[1:]


def test_a_clipped_gelu_keeps_codes_for_its_negative_values():
    x = torch.linspace(-4, 100, 20_000)
    y = nn.functional.gelu(x)
    negative = y < -0.1
    counts = []
    for clip in (None, 10.0):
        scale, zero_point, qmin, qmax = choose_qparams_activation(y.min(), y.max(), clip=clip)
        counts.append(len(fake_quantize(y, scale, zero_point, qmin, qmax)[negative].unique()))
    assert counts[0] == 1
    assert counts[1] >= 2
    relu = x.relu()
    scale, zero_point, qmin, qmax = choose_qparams_activation(relu.min(), relu.max(), 4)
    assert len(fake_quantize(relu, scale, zero_point, qmin, qmax).unique()) == 16


@pytest.mark.slow
def test_groups_compile_as_one_graph_and_batch():
    def loss(x):
        parts = (
            fake_quantize_groups(x, 16), fake_quantize_tokens(x), fake_quantize_weight(x), fp8_fake_quantize(x, axis=0),
        )  # fmt: skip
        return sum(part.square().sum() for part in parts)

    torch.manual_seed(8)
    x = torch.randn(3, 4, 32)
    eager = torch.func.grad(loss)(x[0])
    leaf = x[0].clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf).backward()
    torch.testing.assert_close(leaf.grad, eager)
    batched = torch.func.vmap(torch.func.grad(loss))(x)
    for index in range(3):
        torch.testing.assert_close(batched[index], torch.func.grad(loss)(x[index]))


X, PAIR, NAN, INF = torch.ones(2, 12), torch.ones(2), float("nan"), float("inf")


def one(x=PAIR, scale=0.1, zero_point=0, qmin=-128, qmax=127, **options):
    return fake_quantize(x, scale, zero_point, qmin, qmax, **options)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: one(torch.ones(2, dtype=torch.int8)), "x must be a floating-point tensor"),
    *((lambda scale=scale: one(scale=scale), "scale must be positive and finite") for scale in (0.0, NAN, INF)),
    *((lambda zero=zero: one(zero_point=zero), "zero_point must be a whole number in") for zero in (300, 0.5)),
    (lambda: one(qmin=127), "qmin must be below qmax"),
    (lambda: one(qmax=1.5), "qmax must be a whole number"),
    (lambda: one(scale=torch.ones(3)), "scale must be one number"),
    (lambda: one(scale=torch.ones(3), axis=0), "one value for each of the 2 channels"),
    (lambda: one(axis=1), "axis must name one of the 1 axes"),
    (lambda: one(gate="soft"), "gate must be"),
    (lambda: choose_qparams_symmetric(torch.tensor([[1.0, NAN]])), "weight must be finite"),
    (lambda: choose_qparams_symmetric(torch.zeros(0, 3)), "weight must be a floating-point tensor with elements"),
    (lambda: choose_qparams_symmetric(torch.ones(2), 1), "axis must name"),
    *((lambda ends=ends: choose_qparams_affine(*ends, -128, 127), "must have one shape and be finite")
      for ends in ((1.0, 0.0), (NAN, 1.0), (0.0, INF))),
    (lambda: fake_quantize_groups(X, 8), "group_size must be a whole number that divides the last axis, 12, got 8"),
    (lambda: fake_quantize_groups(X, 0), "group_size must be"),
    (lambda: fake_quantize_groups(X, 4, 9), "bits must be a whole number from 2 to 8"),
    (lambda: fake_quantize_groups(X.int(), 4), "x must be a floating-point tensor"),
    (lambda: fake_quantize_groups(X, 4, rounding="up"), "rounding must be one of nearest, stochastic"),
    (lambda: fake_quantize_groups(X, 4, generator=torch.Generator()), "generator must be None"),
    (lambda: fake_quantize_tokens(torch.tensor(1.0)), "x must have values along its last axis"),
    (lambda: fake_quantize_weight(torch.ones(3)), "weight must have at least two axes"),
    (lambda: fake_quantize_weight(X, transposed=True, groups=3), "groups must divide the first axis"),
    (lambda: output_channels_first(X, 0), "groups must divide the first axis"),
    (lambda: dequantize_groups(torch.ones(2, 6), torch.ones(2, 4), torch.ones(2, 4)), "one value for each group"),
    (lambda: fp8_fake_quantize(X, "fp8_e4m4"), "format must be one of"),
    (lambda: fp8_fake_quantize(X, axis=2), "axis must name one of the 2 axes"),
    (lambda: choose_qparams_activation(0.0, 1.0, clip=0.0), r"clip must be in \(0, inf\)"),
    (lambda: choose_qparams_activation(0.0, 1.0, 1), "bits must be"),
    (lambda: choose_qparams_activation(NAN, 1.0), "must have one shape and be finite"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
