"""Sensitivity against exact Hessians and distances."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from shared_core.errors import ConfigError, MatchError, TrainingError
from shared_core.quantization.post_training.sensitivity import hessian_trace, layer_sensitivity, round_weight


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def batches(number=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator).double() * 2, torch.randint(0, 3, (8,), generator=generator))
        for _ in range(number)
    ]


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def exact_hessian(model, names, data):
    """Return the Hessian of the mean loss by all elements of the named layers' weights."""
    held = {name: value.detach() for name, value in model.named_parameters()}
    keys = [f"{name}.weight" for name in names]

    def loss(flat):
        parts = flat.split([held[key].numel() for key in keys])
        weights = {key: part.reshape(held[key].shape) for key, part in zip(keys, parts, strict=True)}
        return sum(F.cross_entropy(functional_call(model, {**held, **weights}, (x,)), y) for x, y in data) / len(data)

    return torch.autograd.functional.hessian(loss, torch.cat([held[key].flatten() for key in keys]))


def test_hutchinson_finds_the_exact_trace_and_its_own_error():
    model, data, probes = small(), batches(), 400
    estimates = hessian_trace(model, cross_entropy, data, probes=probes)
    hessian = exact_hessian(model.eval(), ["0", "3"], data)
    for name, block in (("0", slice(0, 20)), ("3", slice(20, 35))):
        own, estimate = hessian[block, block], estimates[name]
        # signs: the variance is that of the off-diagonal elements, pairs of the block's own counting twice
        cross = hessian[block].square().sum() - own.square().sum()
        variance = 2 * (own.square().sum() - own.diagonal().square().sum()) + cross
        error = (variance / probes).sqrt().item()
        assert abs(estimate.trace - own.trace().item()) < 4 * error
        assert estimate.standard_error == pytest.approx(error, rel=0.25)
        assert estimate.probes == probes
        assert estimate.average == estimate.trace / model.get_submodule(name).weight.numel()


def test_the_error_bar_is_the_spread_of_the_estimate():
    model, data = small(), batches(1)
    runs = [hessian_trace(model, cross_entropy, data, probes=20, seed=seed)["3"] for seed in range(40)]
    spread = torch.tensor([run.trace for run in runs]).std().item()
    told = sum(run.standard_error for run in runs) / len(runs)
    assert 0.6 * spread < told < 1.6 * spread


def test_the_model_is_as_it_was():
    model, data = small(), batches(1)
    model.train()
    model[3].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    first = hessian_trace(model, cross_entropy, data, probes=3)
    layer_sensitivity(model, [x for x, _ in data], metric="rmse")
    assert first["3"].trace != 0
    assert model.training
    assert model[2].training
    assert not model[3].weight.requires_grad
    assert model[0].weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert hessian_trace(model, cross_entropy, data, probes=3) == first
    assert hessian_trace(model, cross_entropy, data, probes=3, seed=1) != first


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.unused = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).mean((1, 2))


def test_attention_is_differentiated_twice_and_an_unused_layer_has_no_curvature():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    found = hessian_trace(Attention(), lambda model, batch: model(batch).square().sum(), [x], probes=5)
    assert found["qkv"].trace != 0
    assert found["unused"].trace == 0


def test_hessian_cost_is_average_trace_times_squared_error():
    model, data = small(), batches()
    traces = hessian_trace(model, cross_entropy, data, probes=10)
    costs = layer_sensitivity(model, data, loss=cross_entropy, bits=[2, 4], probes=10)
    for name, entry in costs.items():
        weight = model.get_submodule(name).weight.detach()
        for bits, cost in entry.items():
            largest = 2 ** (bits - 1) - 1
            scale = weight.abs().amax(1, keepdim=True) / largest
            error = ((weight / scale).round() * scale - weight).square().sum().item()
            assert cost == pytest.approx(max(traces[name].trace, 0) / weight.numel() * error, rel=1e-6)
    assert layer_sensitivity(model, data, traces=traces, bits=[2, 4]) == costs


@pytest.mark.parametrize("metric", ["kl", "rmse"])
def test_output_costs_are_the_distances(metric):
    model, data = small(), [x for x, _ in batches(2)]
    costs = layer_sensitivity(model, [data[0], {"input": data[1]}], metric=metric, bits=[2, 3, 8])
    model.eval()
    exact = torch.cat([model(x) for x in data])
    for name, entry in costs.items():
        for bits, cost in entry.items():
            other = copy.deepcopy(model)
            layer = other.get_submodule(name)
            layer.weight.data = round_weight(layer, layer.weight.data, bits)
            rounded = torch.cat([other(x) for x in data])
            if metric == "rmse":
                expected = ((rounded - exact) ** 2).mean().sqrt()
            else:
                p, q = exact.softmax(-1), rounded.softmax(-1)
                expected = (p * (p / q).log()).sum(-1).mean()
            assert cost == pytest.approx(expected.item(), rel=1e-6)
        assert entry[2] > entry[3] > entry[8] >= 0


def test_transposed_convolutions_and_embeddings_have_channels_of_their_own():
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(4, 6, 2, groups=2)
    weight = layer.weight.detach()
    rounded = round_weight(layer, weight, 3)
    for group in range(2):
        for channel in range(3):
            codes = weight[2 * group : 2 * group + 2, channel]
            scale = codes.abs().max() / 3
            expected = (codes / scale).round() * scale
            torch.testing.assert_close(rounded[2 * group : 2 * group + 2, channel], expected)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    assert set(layer_sensitivity(model, [torch.tensor([[0, 1]])], metric="kl")) == {"0", "1"}


def traced(loss=cross_entropy, data=None, **options):
    return hessian_trace(small(), loss, batches(1) if data is None else data, **options)


def costed(data=None, **options):
    return layer_sensitivity(small(), batches(1) if data is None else data, **options)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: traced(probes=1), ConfigError, "probes"),
    (lambda: traced(data=[]), ConfigError, "at least one batch"),
    (lambda: traced(lambda net, batch: net(batch[0])), ConfigError, "scalar"),
    (lambda: traced(layers=["4"]), MatchError, "'4' is not a Linear"),
    (lambda: hessian_trace(nn.ReLU(), cross_entropy, batches(1)), MatchError, "at least one Linear"),
    (lambda: traced(lambda net, batch: cross_entropy(net, batch) * math.nan, probes=2), TrainingError,
     "curvature of '0'"),
    (lambda: costed(metric="mse"), ConfigError, "metric"),
    (lambda: costed(metric="kl", bits=[1]), ConfigError, "bits"),
    (lambda: costed(metric="kl", bits=[]), ConfigError, "bits"),
    (costed, ConfigError, "needs a loss"),
    (lambda: costed(traces={}), MatchError, "traces has no entry"),
    (lambda: costed([batches(1)[0][0] * math.nan], metric="rmse"), TrainingError, "costs of '0' must be finite"),
])  # fmt: skip
def test_sensitivity_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()
