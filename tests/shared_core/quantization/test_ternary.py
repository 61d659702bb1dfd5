"""Ternary and binary weights against float64 references written from the papers."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from shared_core.errors import ConfigError
from shared_core.quantization import binarize, binarize_activation, ternarize

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def ternary_reference(values):
    magnitude = np.abs(values)
    survivors = magnitude > 0.7 * magnitude.mean()
    scale = magnitude[survivors].mean() if survivors.any() else 0.0
    return scale * np.sign(values) * survivors


def channels(x, axis):
    """Index tuples of the parts that share a scale."""
    if axis is None:
        return [(slice(None),) * x.dim()]
    return [(slice(None),) * (axis % x.dim()) + (index,) for index in range(x.shape[axis])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_ternary_equals_the_paper(dtype, axis):
    torch.manual_seed(0)
    weight = torch.randn(6, 5, 7).to(dtype)
    weight[2], weight[:, 1], weight[..., 3] = 0, 0, 0
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 1e-2)
    weight.requires_grad_()
    y = ternarize(weight, axis)
    assert y.dtype == dtype
    for part in channels(weight, axis):
        expected = ternary_reference(weight.detach().double().numpy()[part])
        got = y.detach().double().numpy()[part]
        assert np.array_equal(np.sign(got), np.sign(expected))
        np.testing.assert_allclose(got, expected, rtol=tolerance)
        assert len(np.unique(np.abs(got))) <= 2
    grad = torch.randn(weight.shape).to(dtype)
    y.backward(grad)
    assert torch.equal(weight.grad, grad)


def test_ternary_scale_is_the_best_for_its_codes_and_near_the_best_of_all():
    torch.manual_seed(1)
    weight = torch.randn(2000).double()
    y = ternarize(weight, None)
    codes, scale = y.sign(), y.abs().max()
    error = (weight - y).square().sum()
    for factor in (0.95, 1.05):
        assert (weight - codes * scale * factor).square().sum() > error
    # the best threshold by trying all: for a normal distribution the paper's rule is close to it
    ordered = weight.abs().sort(descending=True).values
    kept = torch.arange(1, 2001)
    best = (weight.square().sum() - ordered.cumsum(0).square() / kept).min()
    assert error <= 1.02 * best


def test_ternary_on_every_small_weight():
    for values in itertools.product((-1.0, -0.5, 0.0, 0.25), repeat=3):
        got = ternarize(torch.tensor([values]).double())[0].numpy()
        np.testing.assert_allclose(got, ternary_reference(np.array(values)), rtol=1e-14)


def test_ternary_drops_what_lies_on_the_threshold():
    y = ternarize(torch.tensor([0.5, -1.5, 1.0]), None, threshold=0.5)
    assert y.tolist() == pytest.approx([0.0, -1.25, 1.25])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_binary_equals_the_papers(dtype, axis):
    torch.manual_seed(2)
    weight = (torch.randn(5, 4, 6) * 1.2).to(dtype)
    weight[1, 2, 3], weight[2, 1, 0], weight[3, 3, 3], weight[0, 0, 0] = 0.0, -0.0, 1.0, -1.0
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 1e-2)
    weight.requires_grad_()
    y = binarize(weight, axis)
    assert y.dtype == dtype
    for part in channels(weight, axis):
        exact = weight.detach().double().numpy()[part]
        expected = np.where(exact >= 0, 1.0, -1.0) * np.abs(exact).mean()
        np.testing.assert_allclose(y.detach().double().numpy()[part], expected, rtol=tolerance)
    grad = torch.randn(weight.shape).to(dtype)
    y.backward(grad)
    assert torch.equal(weight.grad, torch.where(weight.detach().abs() <= 1, grad, 0))
    assert weight.grad[3, 3, 3] == grad[3, 3, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_activations_are_signs_with_a_clipped_gradient(dtype):
    just_above = 1 + torch.finfo(dtype).eps
    x = torch.tensor([-2.0, -1.0, -0.1, -0.0, 0.0, 0.5, 1.0, just_above], dtype=dtype, requires_grad=True)
    y = binarize_activation(x)
    assert y.tolist() == [-1, -1, -1, 1, 1, 1, 1, 1]
    y.sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    assert y.dtype == x.grad.dtype == dtype


def test_one_channel_for_each_value_and_zeros():
    weight = torch.tensor([2.0, -3.0, 0.0])
    assert ternarize(weight).tolist() == [2.0, -3.0, 0.0]
    assert binarize(weight).tolist() == [2.0, -3.0, 0.0]
    assert not ternarize(torch.zeros(2, 3)).any()
    assert not binarize(torch.zeros(2, 3)).any()
    assert ternarize(torch.tensor(-2.0), None).item() == -2.0
    # sums of these overflow float16
    large = torch.full((1, 4096), 60000.0, dtype=torch.float16)
    assert torch.equal(ternarize(large), large)
    assert torch.equal(binarize(large), large)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_swallowed(bad):
    weight = torch.ones(2, 5)
    weight[0, 1] = bad
    assert ternarize(weight).isnan().all(1).tolist() == [True, False]
    assert (~binarize(weight).isfinite()).all(1).tolist() == [True, False]
    assert ternarize(weight, None).isnan().all()
    x = torch.tensor([float("nan"), bad, 0.5] * 20)
    y = binarize_activation(x)
    assert y[::3].isnan().all()
    assert (y[2::3] == 1).all()


def test_compiles_as_one_graph_and_batches():
    def loss(x):
        return ternarize(x).square().sum() + (binarize(x) * 3).square().sum() + (binarize_activation(x) * x).sum()

    torch.manual_seed(3)
    x = torch.randn(3, 4, 16)
    leaf = x[0].clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf).backward()
    torch.testing.assert_close(leaf.grad, torch.func.grad(loss)(x[0]))
    batched = torch.func.vmap(torch.func.grad(loss))(x)
    for index in range(3):
        torch.testing.assert_close(batched[index], torch.func.grad(loss)(x[index]))


@pytest.mark.parametrize("function", [binarize, ternarize, binarize_activation])
def test_backward_reads_what_it_saved_once(function):
    """Activation checkpointing computes again what is read a second time."""
    packed, read = [], Counter()

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    def unpack(index):
        read[index] += 1
        return packed[index]

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = function(x)
    y.sum().backward()
    assert read == Counter(range(len(packed)))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ternarize(torch.ones(2, dtype=torch.int8)), "weight must be a floating-point tensor"),
    (lambda: ternarize(torch.ones(2, 2), 2), "axis must name one of the 2 axes"),
    (lambda: ternarize(torch.ones(0, 2)), "weight must be a floating-point tensor with elements"),
    (lambda: ternarize(torch.ones(2, 2), threshold=1.0), "threshold must be in"),
    (lambda: ternarize(torch.ones(2, 2), threshold=float("nan")), "threshold must be in"),
    (lambda: binarize(torch.ones(2), 1), "axis must name"),
    (lambda: binarize_activation([1.0]), "x must be a floating-point tensor, got list"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
