"""Sensitivity against exact Hessians and distances; plans against every plan there is."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.func import functional_call

from shared_core.errors import CheckpointError, ConfigError, MatchError, TrainingError
from shared_core.quantization import QatConfig
from shared_core.quantization.bit_plan import BitPlan, plan_bits
from shared_core.quantization.selective import keep_high, plan_by_quality, round_layers
from shared_core.quantization.sensitivity import hessian_trace, layer_sensitivity, round_weight


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


def test_sensitivity_refuses():
    model, data = small(), batches(1)
    with pytest.raises(ConfigError, match="probes"):
        hessian_trace(model, cross_entropy, data, probes=1)
    with pytest.raises(ConfigError, match="at least one batch"):
        hessian_trace(model, cross_entropy, [])
    with pytest.raises(ConfigError, match="scalar"):
        hessian_trace(model, lambda net, batch: net(batch[0]), data)
    with pytest.raises(MatchError, match=r"'4' must be a Linear"):
        hessian_trace(model, cross_entropy, data, layers=["4"])
    with pytest.raises(MatchError, match="at least one Linear"):
        hessian_trace(nn.ReLU(), cross_entropy, data)
    with pytest.raises(TrainingError, match="curvature of '0' must be finite"):
        hessian_trace(model, lambda net, batch: cross_entropy(net, batch) * math.nan, data, probes=2)
    with pytest.raises(ConfigError, match="metric"):
        layer_sensitivity(model, data, metric="mse")
    with pytest.raises(ConfigError, match="bits"):
        layer_sensitivity(model, data, metric="kl", bits=[1])
    with pytest.raises(ConfigError, match="loss must be given"):
        layer_sensitivity(model, data)
    with pytest.raises(MatchError, match="traces must hold every layer"):
        layer_sensitivity(model, data, traces={})
    with pytest.raises(TrainingError, match="costs of '0' must be finite"):
        layer_sensitivity(model, [data[0][0] * math.nan], metric="rmse")


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_is_the_best_of_all_plans(seed):
    generator = torch.Generator().manual_seed(seed)
    names, widths = [f"layer{index}" for index in range(6)], [3, 4, 6, 8]
    sizes = {name: int(torch.randint(1, 500, (), generator=generator)) for name in names}
    costs = {
        name: {bits: float(torch.rand((), generator=generator)) * 4.0**-bits * 10 for bits in widths} for name in names
    }
    if seed % 3 == 0:  # not even monotone, and with ties
        costs = {name: {bits: float(round(cost * 40)) for bits, cost in entry.items()} for name, entry in costs.items()}
    budget = 3.0 + 5 * float(torch.rand((), generator=generator))
    capacity = budget * sum(sizes.values())
    best = min(
        sum(costs[name][bits] for name, bits in zip(names, chosen, strict=True))
        for chosen in itertools.product(widths, repeat=6)
        if sum(sizes[name] * bits for name, bits in zip(names, chosen, strict=True)) <= capacity
    )
    plan = plan_bits(costs, sizes, budget)
    assert plan.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert plan.average_bits <= budget
    assert plan.cost == pytest.approx(sum(costs[name][bits] for name, bits in plan.bits.items()))


def test_a_plan_for_many_layers_is_quick_and_beats_uniform():
    generator = torch.Generator().manual_seed(0)
    names = [str(index) for index in range(150)]
    sizes = {name: int(torch.randint(1000, 5_000_000, (), generator=generator)) for name in names}
    costs = {
        name: {bits: float(torch.rand((), generator=generator)) ** 3 * 4.0**-bits for bits in (3, 4, 5, 6, 8)}
        for name in names
    }
    plan = plan_bits(costs, sizes, 4)
    assert plan.average_bits <= 4
    assert plan.cost < sum(entry[4] for entry in costs.values())


def test_the_floor_keeps_two_bits_out_and_fixed_layers_count():
    costs = {"a": {2: 0.0, 3: 0.0, 8: 0.0}, "b": {2: 5.0, 3: 4.0, 8: 0.0}}
    sizes = {"a": 10, "b": 10, "head": 10}
    assert plan_bits(costs, sizes, 3).bits == {"a": 3, "b": 3}
    assert plan_bits(costs, sizes, 5, floor=2).bits == {"a": 2, "b": 8}
    assert plan_bits(costs, sizes, 100).bits["b"] == 8
    plan = plan_bits(costs, sizes, 19 / 3, fixed={"head": 8})
    assert plan.bits == {"a": 3, "b": 8, "head": 8}
    assert plan_bits(costs, sizes, 19 / 3 - 0.01, fixed={"head": 8}).bits["b"] == 3


def test_planning_refuses():
    costs, sizes = {"a": {4: 1.0, 8: 0.0}}, {"a": 10}
    with pytest.raises(ConfigError, match=r"budget must be at least 4 bits.*lower floor"):
        plan_bits(costs, sizes, 3)
    with pytest.raises(ConfigError, match="budget must be a finite"):
        plan_bits(costs, sizes, math.nan)
    with pytest.raises(ConfigError, match="floor = 9"):
        plan_bits(costs, sizes, 8, floor=9)
    with pytest.raises(MatchError, match="sizes must hold 'a'"):
        plan_bits(costs, {"b": 1}, 8)
    with pytest.raises(MatchError, match="finite cost at 6 bits"):
        plan_bits(costs, sizes, 8, [6])
    with pytest.raises(MatchError, match="finite cost at 4 bits"):
        plan_bits({"a": {4: math.nan}}, sizes, 8)
    with pytest.raises(ConfigError, match="at least one layer"):
        plan_bits({}, {}, 8)
    with pytest.raises(ConfigError, match="size of 'a'"):
        plan_bits(costs, {"a": 0}, 8)
    with pytest.raises(ConfigError, match="bits of 'a'"):
        BitPlan({"a": 12}, {"a": 1})


def test_a_plan_goes_through_its_file(tmp_path):
    plan = BitPlan({"a.0": 4, "a.1": 4, "b": 32, "c": 8}, {"a.0": 10, "a.1": 3, "b": 7, "c": 1}, 0.25)
    text = plan.to_yaml(tmp_path / "plan.yaml")
    assert BitPlan.from_yaml(tmp_path / "plan.yaml") == BitPlan.from_yaml(text) == plan
    assert list(BitPlan.from_yaml(text).bits) == list(plan.bits)
    assert plan.conversions == 4  # float to 4, to float, to 8, to float
    assert BitPlan({"a": 4, "b": 4}, {"a": 1, "b": 1}).conversions == 2
    assert BitPlan({"a": 32}, {"a": 1}).conversions == 0
    assert yaml.safe_load(text)["qat"] == {
        "scheme": "int8",
        "overrides": {"a.0": {"weight_bits": 4}, "a.1": {"weight_bits": 4}, "c": {"weight_bits": 8}},
        "skip": ["b"],
    }
    config = QatConfig.from_dict(yaml.safe_load(text)["qat"])
    assert config.overrides == ("a.0:weight_bits=4", "a.1:weight_bits=4", "c:weight_bits=8")
    assert config.skip == ("b",)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("format: other\n", "format must be"),
        ("- 1\n", "format must be"),
        ("a: [\n", "must be a YAML file"),
        ("format: efftrain bit plan 1\nlayers: {a: 4}\n", "must map names"),
        ("format: efftrain bit plan 1\nlayers: {a: {bits: 1, weights: 3}}\n", "bits of 'a'"),
        ("format: efftrain bit plan 1\nlayers: {a: {bits: 4, weights: x}}\n", "size of 'a'"),
        ("!!python/object/apply:os.getcwd []\n", "must be a YAML file"),
    ],
)
def test_a_damaged_plan_is_refused(text, match, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=match):
        BitPlan.from_yaml(tmp_path / "plan.yaml")


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a YAML file"):
        BitPlan.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(CheckpointError, match="must be writable"):
        BitPlan({"a": 4}, {"a": 1}).to_yaml(tmp_path / "none" / "plan.yaml")


def chain(length=5):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(length)])


def quality_by_layers(model, worth, reference):
    """Return 1 less what each changed layer is worth."""
    return 1 - sum(
        worth[name]
        for name, module in model.named_modules()
        if name in worth and not torch.equal(module.weight, reference.get_submodule(name).weight)
    )


@pytest.mark.parametrize("start", ["quantized", "float"])
def test_selective_plan_stays_within_the_accepted_loss(start):
    model = chain()
    worth = {"0": 0.01, "1": 0.5, "2": 0.02, "3": 0.1, "4": 0.03}
    costs = {name: {4: value} for name, value in worth.items()}
    calls = []

    def evaluate(candidate):
        calls.append(1)
        return quality_by_layers(candidate, worth, model)

    found = plan_by_quality(model, evaluate, costs, largest_loss=0.065, bits=4, start=start)
    assert found.plan.bits == {"0": 4, "1": 32, "2": 4, "3": 32, "4": 4}
    assert found.conversions == found.plan.conversions == 6
    assert found.quality == pytest.approx(0.94)
    assert found.float_quality == 1
    assert [point.quantized for point in found.curves["quantized"]] == [5, 4, 3]
    assert [point.quantized for point in found.curves["float"]] == [0, 1, 2, 3, 4]
    assert found.curves["float"][1].average_bits == pytest.approx((4 + 4 * 32) / 5)
    assert len(calls) == 6


def test_the_starts_differ_where_quality_is_not_monotone():
    model = chain(3)
    qualities = {0: 1.0, 1: 0.5, 2: 0.99, 3: 0.2}
    costs = {name: {8: 1.0} for name in "012"}

    def run(start, loss):
        counts = iter(())

        def apply(net, bits):
            nonlocal counts
            counts = iter([len(bits)])
            return net

        return plan_by_quality(
            model, lambda net: qualities[next(counts, 0)], costs, largest_loss=loss, start=start, apply=apply
        ).plan.quantized

    assert run("quantized", 0.05) == ("0", "1")
    assert run("float", 0.05) == ()
    assert run("quantized", 0.0) == ()
    assert run("float", 1.0) == ("0", "1", "2")


def test_kept_layers_stay_and_ties_go_in_order():
    model = chain(3)
    costs = {name: {8: 1.0} for name in "012"}
    found = plan_by_quality(model, lambda net: 0.0, costs, largest_loss=0, keep={"1": "the middle"})
    assert found.plan.bits == {"0": 8, "1": 32, "2": 8}
    assert round_layers(model, {"0": 8})[1] is not model[1]


class Separable(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.depth, self.point = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1)
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.point(self.depth(self.stem(x)))).mean((2, 3))
        return self.head(F.relu(self.down(F.dropout(F.gelu(self.up(x)), training=self.training))))


def test_rules_of_thumb_keep_layers_high():
    for inputs in (None, torch.randn(1, 3, 4, 4)):
        kept = keep_high(Separable(), inputs)
        assert kept == {
            "stem": "the first layer",
            "depth": "a depthwise convolution",
            "down": "it reads the output of gelu",
            "head": "the last layer",
        }


def test_selective_planning_refuses():
    model, costs = chain(2), {"0": {8: 1.0}, "1": {8: 2.0}}
    with pytest.raises(ConfigError, match="largest_loss"):
        plan_by_quality(model, lambda net: 0.0, costs, largest_loss=math.nan)
    with pytest.raises(ConfigError, match="start"):
        plan_by_quality(model, lambda net: 0.0, costs, largest_loss=0, start="half")
    with pytest.raises(ConfigError, match="'0' has a finite cost, got 4"):
        plan_by_quality(model, lambda net: 0.0, costs, largest_loss=0, bits=4)
    with pytest.raises(ConfigError, match="keep does not"):
        plan_by_quality(model, lambda net: 0.0, costs, largest_loss=0, keep=("0", "1"))
    with pytest.raises(MatchError, match="'7' must be"):
        plan_by_quality(model, lambda net: 0.0, costs, largest_loss=0, keep=("7",))
    with pytest.raises(TrainingError, match="NaN with 0 layers"):
        plan_by_quality(model, lambda net: math.nan, costs, largest_loss=0)
