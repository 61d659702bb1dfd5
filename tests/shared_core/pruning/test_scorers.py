"""Scorers of single weights from weights and gradients: references in float64, steps, resets, resume, refusals."""

import pytest
import torch
from torch import nn

from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.pruning.scorers import SCORERS, make_scorer
from shared_core.pruning.scorers.scorer import below_threshold_mask

STEPWISE = ("taylor", "movement")


def make_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def modules_of(net):
    return {f"{name}.weight": module for name, module in net.named_modules() if isinstance(module, nn.Linear)}


def train_step(net, modules, scorer, seed, lr=0.1):
    batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).to(next(net.parameters()).dtype)
    net.zero_grad()
    net(batch).square().sum(1).mean().backward()
    weights = {name: module.weight for name, module in modules.items()}
    gradients = {name: module.weight.grad for name, module in modules.items()}
    before = {name: (weights[name].detach().double().clone(), gradients[name].double().clone()) for name in modules}
    scorer.observe_step(weights, gradients)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= lr * parameter.grad
    return before


def steps_of(net, scorer, seeds):
    modules = modules_of(net)
    return [train_step(net, modules, scorer, seed) for seed in seeds]


def test_taylor_is_the_mean_over_steps_of_the_magnitude_of_w_times_g():
    net = make_net()
    scorer = make_scorer("taylor", modules_of(net))
    seen = steps_of(net, scorer, range(4))
    for name, module in modules_of(net).items():
        expected = torch.stack([(w * g).abs() for w, g in (step[name] for step in seen)]).mean(0)
        scores = scorer.scores(name, module.weight)
        assert scores.dtype == torch.float32
        assert not scores.requires_grad
        torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-9)
        # steps of opposite sign would cancel without the magnitude of each
        assert not torch.allclose(expected, torch.stack([w * g for w, g in (s[name] for s in seen)]).mean(0).abs())


def test_movement_is_minus_the_sum_over_all_steps_and_survives_a_reset():
    net = make_net(torch.float64)
    scorer = make_scorer("movement", modules_of(net))
    seen = steps_of(net, scorer, range(2))
    scorer.reset()
    seen += steps_of(net, scorer, range(2, 5))
    for name, module in modules_of(net).items():
        expected = -sum(w * g for w, g in (step[name] for step in seen))
        scores = scorer.scores(name, module.weight)
        assert scores.dtype == torch.float64
        torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-15)
        assert (scores < 0).any()
        assert (scores > 0).any()


def test_taylor_begins_again_with_a_reset():
    net = make_net()
    scorer = make_scorer("taylor", modules_of(net))
    steps_of(net, scorer, range(3))
    scorer.reset()
    assert not scorer.ready
    (last,) = steps_of(net, scorer, [9])
    w, g = last["0.weight"]
    torch.testing.assert_close(scorer.scores("0.weight", net[0].weight).double(), (w * g).abs(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("criterion", [*STEPWISE, "magnitude", "random"])
@pytest.mark.parametrize("where", [slice(2, 9), slice(None, None, 3), slice(30, 100)])
def test_a_part_is_a_slice_of_the_scores(criterion, where):
    net = make_net()
    scorer = make_scorer(criterion, modules_of(net), generator=torch.Generator(), costs={"0.weight": 3, "2.weight": 1})
    steps_of(net, scorer, range(2))
    weight = net[0].weight
    assert torch.equal(scorer.part("0.weight", weight, where), scorer.scores("0.weight", weight).reshape(-1)[where])


@pytest.mark.parametrize("criterion", STEPWISE)
def test_bf16_weights_score_in_float32(criterion):
    net = make_net(torch.bfloat16)
    scorer = make_scorer(criterion, modules_of(net))
    seen = steps_of(net, scorer, range(40))
    sign = {"taylor": lambda w, g: (w * g).abs() / 40, "movement": lambda w, g: -w * g}[criterion]
    expected = sum(sign(*step["0.weight"]) for step in seen)
    scores = scorer.scores("0.weight", net[0].weight)
    assert scores.dtype == torch.float32
    # forty additions in bf16 would be off by per cents
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-7)


def test_scores_are_new_tensors():
    net = make_net()
    for criterion in ("magnitude", "random", *STEPWISE):
        scorer = make_scorer(criterion, modules_of(net), generator=torch.Generator())
        steps_of(net, scorer, [0])
        first = scorer.scores("0.weight", net[0].weight)
        kept = first.clone()
        first.fill_(-1)
        scorer.part("0.weight", net[0].weight, slice(0, 5)).fill_(-1)
        assert torch.equal(scorer.scores("0.weight", net[0].weight), kept)


def test_random_is_one_draw_for_the_run():
    net = make_net()
    scorers = [make_scorer("random", modules_of(net), generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    draws = [scorer.scores("0.weight", net[0].weight) for scorer in scorers]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    steps_of(net, scorers[0], range(2))
    scorers[0].reset()
    assert torch.equal(scorers[0].scores("0.weight", net[0].weight), draws[0])
    assert not torch.equal(scorers[0].scores("2.weight", net[0].weight), draws[0])


def test_random_is_uniform_and_uncorrelated():
    scorer = make_scorer("random", {}, generator=torch.Generator().manual_seed(0))
    draws = scorer.scores("w", torch.empty(300, 1000)).double()
    assert 0 <= draws.min() < 1e-4
    assert 1 - 1e-4 < draws.max() < 1
    counts = torch.histc(draws, bins=100, min=0, max=1)
    assert ((counts - 3000) ** 2 / 3000).sum() < 160  # chi-squared with 99 degrees of freedom: p = 1e-4
    other = scorer.scores("v", torch.empty(300, 1000)).double()
    for a, b in ((draws.view(-1)[1:], draws.view(-1)[:-1]), (draws[1:].reshape(-1), draws[:-1].reshape(-1))):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.01
    assert abs(torch.corrcoef(torch.stack([draws.view(-1), other.view(-1)]))[0, 1]) < 0.01


@pytest.mark.parametrize("criterion", ["magnitude", "random", *STEPWISE])
def test_resume_goes_on_bit_for_bit(criterion):
    straight, halves = make_net(), make_net()
    one = make_scorer(criterion, modules_of(straight), generator=torch.Generator().manual_seed(3))
    steps_of(straight, one, range(5))
    first = make_scorer(criterion, modules_of(halves), generator=torch.Generator().manual_seed(3))
    steps_of(halves, first, range(2))
    state = first.state_dict()
    second = make_scorer(criterion, modules_of(halves), generator=torch.Generator().manual_seed(8))
    second.load_state_dict(state)
    steps_of(halves, first, range(90, 92))  # the saved state is a copy
    halves.load_state_dict(make_net().state_dict())
    steps_of(halves, make_scorer("magnitude", modules_of(halves)), range(2))
    steps_of(halves, second, range(2, 5))
    for name, module in modules_of(straight).items():
        assert torch.equal(one.scores(name, module.weight), second.scores(name, module.weight))
    assert second.num_observed == one.num_observed == 5


def test_state_of_another_criterion_or_model_is_refused():
    net = make_net()
    taylor = make_scorer("taylor", modules_of(net))
    steps_of(net, taylor, [0])
    with pytest.raises(CheckpointError, match="saved criterion must be 'movement', got 'taylor'"):
        make_scorer("movement", modules_of(net)).load_state_dict(taylor.state_dict())
    with pytest.raises(CheckpointError, match=r"saved sums of 2.weight must be .*does not prune it, got"):
        make_scorer("taylor", {"0.weight": net[0]}).load_state_dict(taylor.state_dict())
    for criterion, shape in (("taylor", r"\(7, 5\)"), ("fisher", r"\(7, 5\)"), ("wanda", r"\(5,\)")):
        scorer = make_scorer(criterion, {"0.weight": net[0]})
        scorer.attach()
        train_step(net, scorer.modules, scorer, 0)
        other = make_scorer(criterion, {"0.weight": nn.Linear(6, 7)})
        with pytest.raises(CheckpointError, match=f"of 0.weight must be of shape .*6.*, got {shape}"):
            other.load_state_dict(scorer.state_dict())


@pytest.mark.parametrize("criterion", STEPWISE)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_left_out(criterion, value):
    net = make_net()
    modules = modules_of(net)
    scorer = make_scorer(criterion, modules)
    weights = {name: module.weight for name, module in modules.items()}
    bad = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    bad["2.weight"][1, 1] = value
    scorer.observe_step(weights, bad)
    with pytest.raises(TrainingError, match=r"got 1 with .*NaN or infinite gradients"):
        scorer.scores("0.weight", net[0].weight)
    steps_of(net, scorer, [0])
    assert (scorer.num_observed, scorer.num_left_out) == (1, 1)
    assert scorer.scores("2.weight", net[2].weight).isfinite().all()


def test_large_finite_gradients_are_observed():
    layer = nn.Linear(4, 4, dtype=torch.float16)
    scorer = make_scorer("taylor", {"weight": layer})
    scorer.observe_step({"weight": layer.weight}, {"weight": torch.full((4, 4), 6e4, dtype=torch.float16)})
    assert scorer.num_left_out == 0


@pytest.mark.parametrize("criterion", ["magnitude", "fisher", "wanda"])
def test_nan_weights_are_refused(criterion):
    net = make_net()
    scorer = make_scorer(criterion, modules_of(net))
    scorer.attach()
    steps_of(net, scorer, [0])
    weight = net[0].weight.detach().clone()
    weight[1, 2] = float("nan")
    with pytest.raises(TrainingError, match=rf"prune {criterion}: scores must .* got NaN in 0.weight"):
        scorer.scores("0.weight", weight)


def test_zero_gradients_score_zero():
    net = make_net()
    modules = modules_of(net)
    weights = {name: module.weight for name, module in modules.items()}
    for criterion in STEPWISE:
        scorer = make_scorer(criterion, modules)
        scorer.observe_step(weights, {name: torch.zeros_like(weight) for name, weight in weights.items()})
        assert not scorer.scores("0.weight", weights["0.weight"]).any()


def test_a_weight_without_a_gradient_scores_zero_beside_others():
    net = make_net()
    scorer = make_scorer("taylor", modules_of(net))
    scorer.observe_step({"0.weight": net[0].weight}, {"0.weight": torch.ones(7, 5)})
    assert scorer.scores("0.weight", net[0].weight).all()
    assert not scorer.scores("2.weight", net[2].weight).any()
    assert not scorer.part("2.weight", net[2].weight, slice(3)).any()


@pytest.mark.parametrize("criterion", sorted(set(SCORERS) - {"magnitude", "random"}))
def test_nothing_observed_is_refused(criterion):
    net = make_net()
    scorer = make_scorer(criterion, modules_of(net))
    assert not scorer.ready
    for ask in (
        lambda: scorer.scores("0.weight", net[0].weight),
        lambda: scorer.part("0.weight", net[0].weight, slice(2)),
    ):
        with pytest.raises(TrainingError, match=f"prune {criterion}: a step must have been observed .* got none since"):
            ask()
    scorer.observe_step({name: module.weight for name, module in modules_of(net).items()}, {})
    with pytest.raises(TrainingError, match=r"hooks saw|no weight had a gradient"):
        scorer.scores("0.weight", net[0].weight)


def test_costs_divide_scores():
    net = make_net()
    scorer = make_scorer("magnitude", modules_of(net), costs={"0.weight": 4.0, "2.weight": 0.5})
    assert torch.equal(scorer.scores("0.weight", net[0].weight), net[0].weight.detach().abs() / 4)
    assert torch.equal(scorer.scores("2.weight", net[2].weight), net[2].weight.detach().abs() * 2)
    for bad in ({"0.weight": 1.0}, {"0.weight": 1.0, "2.weight": 0.0}, {"0.weight": 1.0, "2.weight": float("nan")}):
        with pytest.raises(ConfigError, match=r"cost of 2.weight must be"):
            make_scorer("magnitude", modules_of(net), costs=bad)


@pytest.mark.parametrize("criterion", sorted(name for name, scorer in SCORERS.items() if scorer.zero_is_lowest))
def test_zero_is_lowest_where_it_is_said(criterion):
    net = make_net()
    with torch.no_grad():
        net[0].weight[2].zero_()
    scorer = make_scorer(criterion, modules_of(net))
    scorer.attach()
    modules = modules_of(net)
    train_step(net, modules, scorer, 0, lr=0.0)
    scores = scorer.scores("0.weight", net[0].weight)
    assert not scores[2].any()
    assert (scores >= 0).all()
    scorer.detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_threshold_is_that_of_the_definition(dtype):
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = weight.double().abs() >= 0.5
    assert torch.equal(below_threshold_mask(weight, 0.5), expected)
    assert 0 < int(expected.sum()) < expected.numel()


def test_a_threshold_prunes_only_what_lies_below_it():
    weight = torch.tensor([0.1, -0.1, 0.0, float("inf"), float("nan")])
    assert below_threshold_mask(weight, 0.1).tolist() == [True, True, False, True, True]
    assert below_threshold_mask(weight, 0).all()
    assert below_threshold_mask(torch.tensor(0.2), 0.3).tolist() is False
    assert below_threshold_mask(torch.empty(0, 3), 0.3).shape == (0, 3)
    assert below_threshold_mask(nn.Parameter(torch.ones(2)), 2.0).tolist() == [False, False]
    for eps in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="eps must be"):
            below_threshold_mask(weight, eps)


@pytest.mark.parametrize(
    ("criterion", "modules", "match"),
    [
        ("random", {}, "prune random: generator must be given"),
        ("tailor", {}, "criterion must be .*, got 'tailor'; did you mean 'taylor'"),
        *((name, {"table": nn.Embedding(3, 2)}, f"prune {name}: table: layer must be linear or convolutional")
          for name in ("wanda", "neuron_taylor", "fisher")),
    ],
)  # fmt: skip
def test_scorers_that_cannot_be_made_are_refused(criterion, modules, match):
    with pytest.raises(ConfigError, match=match):
        make_scorer(criterion, modules)
