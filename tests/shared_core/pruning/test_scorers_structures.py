"""Scores of whole units, Shapley values and costs of layers, against definitions written out in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.pruning.scorers import (
    GROUP_CRITERIA,
    GroupTaylor,
    UnitSlices,
    gather_units,
    group_scores,
    layer_costs,
    observe_positions,
    shapley_values,
)


def members(units=5, sizes=(6, 1, 4), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(units, size, generator=generator).to(dtype) for size in sizes]


def test_units_are_gathered_along_any_axis():
    tensor = torch.arange(2 * 6 * 3).view(2, 6, 3)
    positions = np.array([[0, 1], [4, 5], [2, 3]])
    found = gather_units(tensor, 1, positions)
    for unit, places in enumerate(positions):
        assert sorted(found[unit].tolist()) == sorted(tensor[:, places.tolist()].flatten().tolist())
    assert gather_units(torch.arange(6), 0, positions).tolist() == positions.tolist()
    assert gather_units(tensor, -2, positions[:, ::-1]).shape == (3, 12)
    assert not gather_units(nn.Parameter(torch.ones(2, 2)), 0, np.array([[1]])).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_against_the_definition(dtype):
    weights = members(dtype=dtype)
    joined = torch.cat([weight.double() for weight in weights], 1)
    expected = {
        "l1_norm": joined.abs().sum(1),
        "l2_norm": joined.square().sum(1).sqrt(),
        "magnitude": joined.abs().mean(1),
        "bn_scale": joined.abs().mean(1),
        "geometric_median": torch.stack([sum((a - b).square().sum().sqrt() for b in joined) for a in joined]),
    }
    for criterion, wanted in expected.items():
        scores = group_scores(criterion, weights)
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(scores.double(), wanted, rtol=1e-6, atol=0)


def test_geometric_median_finds_the_filter_that_others_replace_not_the_smallest():
    filters = torch.tensor([[4.0, 4.0], [4.0, 4.2], [4.2, 4.0], [-0.1, 0.0], [9.0, 9.0]])
    scores = group_scores("geometric_median", [filters])
    assert int(scores.argmin()) in (0, 1, 2)
    assert int(group_scores("l2_norm", [filters]).argmin()) == 3
    twins = torch.randn(1, 2000, generator=torch.Generator().manual_seed(0)).expand(4, -1) * 100
    assert not group_scores("geometric_median", [twins]).any()


def test_taylor_and_fisher_of_units():
    weights, gradients = members(), members(seed=1)
    w, g = torch.cat(weights, 1).double(), torch.cat(gradients, 1).double()
    taylor = group_scores("taylor", weights, extras=gradients)
    torch.testing.assert_close(taylor.double(), (w * g).sum(1) ** 2, rtol=1e-5, atol=1e-8)
    fisher = group_scores("fisher", weights, extras=[gradient**2 for gradient in gradients])
    torch.testing.assert_close(fisher.double(), 0.5 * (w**2 * g**2).sum(1), rtol=1e-5, atol=1e-8)


def test_random_units_follow_the_generator():
    draws = [group_scores("random", members(50), generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_group_scores_refuse_what_does_not_fit():
    weights = members()
    for criterion, given, match in (
        ("l2norm", weights, "criterion must be .*, got 'l2norm'; did you mean 'l2_norm'"),
        ("l1_norm", [weights[0], weights[1][:3]], r"weights must be \(units, k\)"),
        ("l1_norm", [], "weights must be"),
        ("taylor", weights, "extras must be the gradients in shapes"),
    ):
        with pytest.raises(ConfigError, match=match):
            group_scores(criterion, given)
    weights[1][3] = float("nan")
    for criterion in set(GROUP_CRITERIA) - {"random", "geometric_median"}:
        with pytest.raises(TrainingError, match=rf"{criterion} scores must .* got NaN for unit 3"):
            group_scores(criterion, weights, extras=members())


def group_step(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 8)}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(2)]


GROUPS = {
    "a": [
        UnitSlices("a.weight", 0, np.arange(4)[:, None]),
        UnitSlices("a.bias", 0, np.arange(4)[:, None]),
        UnitSlices("b.weight", 1, np.arange(8).reshape(4, 2)),
    ],
    "frozen": [UnitSlices("c.weight", 0, np.arange(3)[:, None])],
}


def test_group_taylor_is_the_mean_over_steps_of_the_squared_sum():
    taylor = GroupTaylor(GROUPS)
    with pytest.raises(TrainingError, match="a step must have been observed"):
        taylor.scores("a")
    expected = torch.zeros(4, dtype=torch.float64)
    for seed in range(3):
        tensors, gradients = group_step(seed)
        taylor.observe_step({**tensors, "c.weight": torch.ones(3, 2)}, gradients)
        products = {name: tensors[name].double() * gradients[name].double() for name in tensors}
        of_b = torch.stack([products["b.weight"][:, 2 * u : 2 * u + 2].sum() for u in range(4)])
        expected += (products["a.weight"].sum(1) + products["a.bias"] + of_b) ** 2 / 3
    torch.testing.assert_close(taylor.scores("a").double(), expected, rtol=1e-5, atol=1e-8)
    assert taylor.scores("frozen").tolist() == [0, 0, 0]
    taylor.reset()
    with pytest.raises(TrainingError):
        taylor.scores("a")


def test_group_taylor_resumes_bit_for_bit():
    straight, first, second = GroupTaylor(GROUPS), GroupTaylor(GROUPS), GroupTaylor(GROUPS)
    for seed in range(4):
        straight.observe_step(*group_step(seed))
        (first if seed < 2 else second).observe_step(*group_step(seed))
        if seed == 1:
            second.load_state_dict(first.state_dict())
    assert torch.equal(second.scores("a"), straight.scores("a"))
    assert second.num_observed == 4
    with pytest.raises(CheckpointError, match=r"saved sum of a must .* 0 units, got"):
        GroupTaylor({}).load_state_dict(first.state_dict())


def game(num_units, seed=0):
    """Return a value function drawn at random, one number a set, and its exact Shapley values."""
    table = torch.rand(2**num_units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def value(kept):
        return float(table[sum(1 << unit for unit in range(num_units) if kept[unit])])

    exact = torch.zeros(num_units, dtype=torch.float64)
    for unit in range(num_units):
        others = [other for other in range(num_units) if other != unit]
        for size in range(num_units):
            share = math.factorial(size) * math.factorial(num_units - size - 1) / math.factorial(num_units)
            for chosen in itertools.combinations(others, size):
                kept = torch.zeros(num_units, dtype=torch.bool)
                kept[list(chosen)] = True
                before = value(kept)
                kept[unit] = True
                exact[unit] += share * (value(kept) - before)
    return value, exact


@pytest.mark.parametrize("num_units", [4, 5])
@pytest.mark.parametrize("antithetic", [False, True])
def test_shapley_against_enumeration_within_its_standard_error(num_units, antithetic):
    value, exact = game(num_units)
    generator = torch.Generator().manual_seed(0)
    values, error = shapley_values(value, num_units, permutations=3000, generator=generator, antithetic=antithetic)
    assert ((values - exact).abs() < 4 * error).all()
    assert (error < 0.02).all()
    everything, nothing = torch.ones(num_units, dtype=torch.bool), torch.zeros(num_units, dtype=torch.bool)
    assert abs(values.sum().item() - (value(everything) - value(nothing))) < 1e-9


@pytest.mark.slow
def test_the_standard_error_is_that_of_repeated_estimates():
    value, exact = game(5)
    for antithetic in (False, True):
        runs = [
            shapley_values(
                value, 5, permutations=40, generator=torch.Generator().manual_seed(seed), antithetic=antithetic
            )
            for seed in range(200)
        ]
        found = torch.stack([values for values, _ in runs])
        told = torch.stack([error for _, error in runs]).square().mean(0).sqrt()
        assert (found.std(0) / told).sub(1).abs().max() < 0.25
        assert ((found.mean(0) - exact).abs() < 4 * found.std(0) / math.sqrt(200)).all()


def test_antithetic_orders_are_exact_for_pairs_that_replace_each_other():
    def either(kept):
        return float(kept[0] or kept[1])

    values, error = shapley_values(either, 2, permutations=4, antithetic=True)
    assert values.tolist() == [0.5, 0.5]
    assert error.tolist() == [0.0, 0.0]


def test_shapley_calls_seed_and_truncation():
    calls = []

    def saturating(kept):
        calls.append(int(kept.sum()))
        kept.zero_()  # what the function does to its argument is its own affair
        return float(min(calls[-1], 2))

    def estimate(**options):
        calls.clear()
        generator = torch.Generator().manual_seed(5)
        values, _ = shapley_values(saturating, 6, permutations=10, generator=generator, **options)
        return values, len(calls)

    plain, many = estimate()
    again, _ = estimate()
    cut, few = estimate(truncate=0.01)
    assert torch.equal(plain, again)
    assert many == 10 * 5 + 2
    assert few == 10 * 2 + 2
    assert torch.equal(plain, cut)  # all that was cut off was 0


def test_shapley_of_one_unit_and_refusals():
    values, error = shapley_values(lambda kept: 3.0 * kept[0] + 1, 1, permutations=2)
    assert (values.item(), error.item()) == (3.0, 0.0)
    for options, match in [
        ({"permutations": 1}, r"permutations must be in \[2, inf\), got 1"),
        ({"permutations": 5, "antithetic": True}, "permutations must be even with antithetic, got 5"),
        ({"permutations": 2, "truncate": 1.0}, r"truncate must be in \[0, 1\)"),
        ({"permutations": 2, "truncate": float("nan")}, "truncate must be"),
        ({"permutations": 2, "num_units": 0}, r"num_units must be in \[1, inf\)"),
    ]:
        with pytest.raises(ConfigError, match=match):
            shapley_values(lambda kept: 0.0, **{"num_units": 3, **options})
    with pytest.raises(TrainingError, match="value must be finite, got nan with 3 of 3 units kept"):
        shapley_values(lambda kept: float("nan") if kept.all() else 0.0, 3, permutations=2)


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.conv, self.up = nn.Conv2d(2, 4, 3, stride=2, groups=2), nn.ConvTranspose2d(4, 3, 2)
        self.token, self.reentrant = nn.Linear(3, 3), reentrant
        self.low = nn.Linear(3, 2, bias=False).bfloat16()

    def body(self, x):
        x = self.up(self.conv(x)).flatten(2).transpose(1, 2)  # 3 × 4 tokens of 3
        return self.token(self.token(x))

    def forward(self, x):
        if self.reentrant is not None:
            x = checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=self.reentrant)
        else:
            x = self.body(x)
        return self.low(x.mean(1).bfloat16())

    def modules_by_weight(self):
        names = ("conv", "up", "token", "low")
        return {f"{name}.weight": getattr(self, name) for name in names}


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_positions_are_uses_of_a_weight_by_one_example(reentrant):
    net = Net(reentrant)
    with observe_positions(net, net.modules_by_weight()) as positions:
        for size in (1, 5):
            net(torch.randn(size, 2, 6, 8)).sum().backward()
    net(torch.randn(1, 2, 20, 20))
    assert positions == {"conv.weight": 2 * 3, "up.weight": 2 * 3, "token.weight": 2 * 12, "low.weight": 1}


def test_costs_count_what_the_weights_of_a_layer_do():
    net = Net()
    modules = net.modules_by_weight()
    with observe_positions(net, modules) as positions:
        net(torch.randn(1, 2, 6, 8))
    flops = layer_costs(modules, "flops", positions=positions)
    # a bias-free convolution: 2 · outputs · inputs of one output
    assert flops["conv.weight"] * net.conv.weight.numel() == 2 * (4 * 2 * 3) * (1 * 3 * 3)
    assert layer_costs(modules, "bytes") == {name: m.weight.element_size() for name, m in modules.items()}
    energy = layer_costs(modules, "energy", positions=positions)
    assert energy["conv.weight"] == pytest.approx(6 * (3.7 + 0.9) + 640)
    assert energy["low.weight"] == pytest.approx(1 * (1.1 + 0.4) + 320)
    mine = layer_costs(modules, "energy", positions=positions, table={"float32_add": 1.3, "dram_byte": 1.0})
    assert mine["token.weight"] == pytest.approx(24 * (3.7 + 1.3) + 4)


def test_costs_that_are_not_known_are_refused():
    net = Net()
    modules = net.modules_by_weight()
    with pytest.raises(TrainingError, match=r"got no call of low.weight"):  # noqa: SIM117
        with observe_positions(net, modules):
            net.body(torch.randn(1, 2, 6, 8))
    assert not net.conv._forward_hooks
    double = {"weight": nn.Linear(2, 2).double()}
    for given, kind, positions, match in (
        (modules, "flop", None, "kind must be one of flops, bytes, energy, got 'flop'"),
        (modules, "flops", None, "positions of conv.weight must be a number above 0, got None"),
        (double, "energy", {"weight": 1.0}, "float64_multiply in pJ must be a number above 0, got None.*table"),
    ):
        with pytest.raises(ConfigError, match=match):
            layer_costs(given, kind, positions=positions)
    table = {"float64_multiply": 20.0, "float64_add": 5.0}
    assert layer_costs(double, "energy", positions={"weight": 2.0}, table=table) == {"weight": 2 * 25 + 8 * 160}
