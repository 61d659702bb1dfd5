"""Fake quantisation and its scales against float64 references written from the formulas."""

import numpy as np
import pytest
import torch
from eff_kernels.quantization import affine as kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import ConfigError
from shared_core.quantization import choose_qparams_affine, choose_qparams_symmetric, fake_quantize


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
        # float32 division may round onto a tie; there both neighbours are as near
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


def test_the_plain_quotient_would_lose_the_largest_weight():
    amax = torch.rand(10_000, generator=torch.Generator().manual_seed(0))[:, None]
    naive = amax / 127
    assert (amax / naive > 127).any()
    x = amax.clone().requires_grad_()
    fake_quantize(x, choose_qparams_symmetric(amax), 0, -127, 127, axis=0).sum().backward()
    assert (x.grad == 1).all()


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


@pytest.mark.parametrize(("change", "message"), [
    ({"x": torch.ones(2, dtype=torch.int8)}, "x must be a floating-point tensor"),
    ({"scale": 0.0}, "scale must be positive and finite"),
    ({"scale": float("nan")}, "scale must be positive and finite"),
    ({"scale": float("inf")}, "scale must be positive and finite"),
    ({"zero_point": 300}, "zero_point must be a whole number in"),
    ({"zero_point": 0.5}, "zero_point must be a whole number in"),
    ({"qmin": 127}, "qmin must be below qmax"),
    ({"qmax": 1.5}, "qmax must be a whole number"),
    ({"scale": torch.ones(3)}, "scale must be one number without an axis"),
    ({"scale": torch.ones(3), "axis": 0}, "one value for each of the 2 channels"),
    ({"axis": 1}, "axis must name one of the 1 axes"),
    ({"gate": "soft"}, "gate must be"),
])  # fmt: skip
def test_refusals(change, message):
    arguments = {"x": torch.ones(2), "scale": 0.1, "zero_point": 0, "qmin": -128, "qmax": 127} | change
    with pytest.raises(ConfigError, match=message):
        fake_quantize(**arguments)


def test_qparam_refusals():
    with pytest.raises(ConfigError, match="weight must be finite"):
        choose_qparams_symmetric(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ConfigError, match="weight must be a floating-point"):
        choose_qparams_symmetric(torch.zeros(0, 3))
    with pytest.raises(ConfigError, match="axis must name"):
        choose_qparams_symmetric(torch.ones(2), 1)
    for low, high in ((1.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(ConfigError, match="finite and in this order"):
            choose_qparams_affine(low, high, -128, 127)
