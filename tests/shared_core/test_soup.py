"""Soups: arithmetic, search, journal, technique."""

import gc
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared_core.errors import CheckpointError, ConfigError, EffError, MatchError
from shared_core.soup import ModelSoup, SoupConfig, greedy_soup, path_json, path_plot, path_table, uniform_soup
from shared_core.technique import Context, SavedCheckpoint


def runs(count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    base = {"a": torch.randn(33, 7, generator=generator), "b": torch.randn(5, generator=generator)}
    return [
        {name: (value + 0.1 * torch.randn(value.shape, generator=generator)).to(dtype) for name, value in base.items()}
        for _ in range(count)
    ]


def same_bits(one, two):
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)
    )


# --- averages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.0, 7.5, 2.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_mean_is_that_of_float64(dtype, weights):
    members = runs(5, dtype=dtype)
    soup = uniform_soup(members, weights)
    shares = torch.tensor(weights or [1.0] * 5, dtype=torch.float64)
    for name in members[0]:
        stacked = torch.stack([member[name].double() for member in members])
        expected = torch.tensordot(shares / shares.sum(), stacked, 1)
        assert soup[name].dtype == dtype
        eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-15
        spread = stacked.abs().amax(0)
        tolerance = {torch.float32: 4 * eps, torch.float64: 8 * eps}.get(dtype, 0.51 * eps)  # halves: one rounding
        assert ((soup[name].double() - expected).abs() <= tolerance * spread + 1e-7 * (dtype == torch.float16)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("weights", [None, list(range(1, 17))])
def test_sixteen_equal_ingredients_keep_their_bits(dtype, weights):
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 1e-30, 3.0, -1e-3])]).to(dtype)
    soup = uniform_soup([{"w": values.clone()} for _ in range(16)], weights)
    assert same_bits(soup["w"], values)


def test_inputs_are_left_alone_and_not_shared():
    members = runs(3)
    before = [{name: value.clone() for name, value in member.items()} for member in members]
    soup = uniform_soup(members)
    single = greedy_soup(members[:1], lambda weights: 1.0).state_dict
    for result in (soup, single):
        for value in result.values():
            value.zero_()
    assert all(
        torch.equal(was[name], member[name]) for was, member in zip(before, members, strict=True) for name in was
    )


def test_mixed_dtypes_are_averaged_in_float32_and_take_the_best_ones():
    members = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0078125, 4.0], dtype=torch.bfloat16)}]
    result = greedy_soup(members, lambda weights: float(weights["w"][1]) > 2)
    assert result.ingredients == ["ingredient 1", "ingredient 0"]
    assert result.state_dict["w"].dtype == torch.bfloat16
    result = greedy_soup(members, lambda weights: -float(weights["w"][1] > 3))
    assert result.state_dict["w"].dtype == torch.float32
    assert result.state_dict["w"].tolist() == [1.00390625, 3.0]


def test_integers_and_booleans_come_from_the_best():
    members = [
        {"w": torch.tensor([float(i)]), "count": torch.tensor(i), "flag": torch.tensor([i == 1])} for i in range(3)
    ]
    result = greedy_soup(members, lambda weights: -abs(float(weights["w"]) - 1.2))
    assert result.ingredients[0] == "ingredient 1"
    assert len(result.ingredients) == 1
    assert result.state_dict["count"] == 1
    assert result.state_dict["count"].dtype == torch.int64
    result = greedy_soup(members, lambda weights: 0.0)  # an evaluation that all pass
    assert result.state_dict["w"].item() == 1.0
    assert result.state_dict["count"] == 0
    assert not result.state_dict["flag"].item()
    assert uniform_soup(members)["count"] == 0


def test_ties_are_kept_and_averaged_once():
    def tied(value):
        shared = torch.full((4, 3), value)
        return {"embed": shared, "bias": torch.zeros(2), "head": shared}

    result = greedy_soup([tied(1.0), tied(2.0)], lambda weights: 0.0).state_dict
    assert result["embed"].data_ptr() == result["head"].data_ptr()
    assert result["embed"].unique().tolist() == [1.5]
    turned = dict(reversed(tied(2.0).items()))  # the order of names does not matter
    assert torch.equal(uniform_soup([tied(1.0), turned])["head"], result["head"])
    free = {name: value.clone() for name, value in tied(3.0).items()}
    with pytest.raises(CheckpointError, match="must be tied in all ingredients or in none"):
        uniform_soup([tied(1.0), free])


def test_non_contiguous_and_empty_tensors():
    members = [
        {"w": torch.randn(6, 4).t(), "none": torch.empty(0, 3), "scalar": torch.tensor(float(i))} for i in range(2)
    ]
    soup = uniform_soup(members)
    assert torch.allclose(soup["w"], (members[0]["w"] + members[1]["w"]) / 2)
    assert soup["none"].shape == (0, 3)
    assert soup["scalar"] == 0.5
    into = {"w": torch.zeros(6, 4).t(), "none": torch.empty(0, 3), "scalar": torch.tensor(0.0)}
    assert uniform_soup(members, into=into) is into
    assert torch.equal(into["w"], soup["w"])


@pytest.mark.parametrize(
    ("weights", "match"),
    [([1.0], "one for each of 2"), ([1.0, -1.0], ">= 0"), ([0.0, 0.0], "not all be 0"), ([1.0, math.nan], "finite")],
)
def test_weights_are_checked(weights, match):
    with pytest.raises(ConfigError, match=match):
        uniform_soup(runs(2), weights)


def test_uniform_leaves_out_what_is_not_finite():
    members = runs(3)
    members[1]["b"][2] = math.inf
    with pytest.warns(UserWarning, match="ingredient 1 is left out: 'b'"):
        soup = uniform_soup(members)
    assert torch.allclose(soup["a"], (members[0]["a"] + members[2]["a"]) / 2)
    with pytest.raises(CheckpointError, match="at least one"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        uniform_soup([members[1]])


# --- search -----------------------------------------------------------------------------------------------------------


def code_of_the_authors(members, evaluate):
    """Greedy soup as mlfoundations/model-soups runs it: sorted by single accuracy, kept only if strictly better."""
    order = sorted(range(len(members)), key=lambda i: evaluate(members[i]), reverse=True)
    chosen, best = [order[0]], evaluate(members[order[0]])
    soup = {name: value.double() for name, value in members[order[0]].items()}
    for i in order[1:]:
        n = len(chosen)
        trial = {name: soup[name] * (n / (n + 1.0)) + members[i][name].double() / (n + 1) for name in soup}
        score = evaluate({name: value.float() for name, value in trial.items()})
        if score > best:
            chosen, best, soup = [*chosen, i], score, trial
    return chosen, best, soup


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["max", "min"])
def test_strict_search_is_that_of_the_authors(seed, mode):
    members = runs(9, seed)
    goal = torch.randn(33, 7, generator=torch.Generator().manual_seed(seed)) + 0.02
    sign = 1 if mode == "max" else -1

    def quality(weights):  # rounded, so that both ways of summing give one score
        return round(-float((weights["a"] - goal).square().sum()), 3)

    result = greedy_soup(members, lambda weights: sign * quality(weights), mode=mode, strict=True)
    chosen, best, soup = code_of_the_authors(members, quality)
    assert result.ingredients == [f"ingredient {i}" for i in chosen]
    assert result.score == sign * best
    assert len(chosen) > 1
    for name, value in soup.items():
        assert torch.allclose(result.state_dict[name].double(), value, rtol=1e-6, atol=1e-6)


scores_of = st.lists(
    st.one_of(st.floats(allow_nan=True, allow_infinity=True, width=32), st.sampled_from([0.0, 1.0])),
    min_size=1,
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(scores_of, st.data(), st.sampled_from(["max", "min"]), st.booleans())
def test_never_worse_than_the_best_single(singles, data, mode, strict):
    values = [math.sqrt(prime) for prime in (2, 3, 5, 7, 11, 13, 17)]  # no two averages of them are equal
    members = [{"w": torch.tensor([value], dtype=torch.float64)} for value, _ in zip(values, singles, strict=False)]
    by_value = dict(zip(values, singles, strict=False))
    calls = []

    def evaluate(weights):
        value = float(weights["w"])
        calls.append(value)
        if value not in by_value:
            by_value[value] = data.draw(scores_of)[0]
        return by_value[value]

    finite = [score for score in singles if math.isfinite(score)]
    if not finite:
        with pytest.raises(CheckpointError, match="at least one ingredient must have finite"):
            greedy_soup(members, evaluate, mode=mode, strict=strict)
        return
    result = greedy_soup(members, evaluate, mode=mode, strict=strict)
    better = max if mode == "max" else min
    assert better(result.score, better(finite)) == result.score
    assert len(calls) == len(singles) + len(finite) - 1
    assert len(set(calls)) == len(calls)  # nothing is evaluated twice
    assert by_value[float(result.state_dict["w"])] == result.score  # the score is that of the weights returned
    assert [row["order"] for row in result.history] == list(range(len(singles)))
    assert sum(row["accepted"] for row in result.history) == len(result.ingredients)
    assert sum("left out" in row["reason"] for row in result.history) == len(singles) - len(finite)


def test_equal_metrics_keep_the_given_order_and_strict_refuses_them():
    members = runs(4)
    result = greedy_soup(members, lambda weights: 0.5)
    assert result.ingredients == [f"ingredient {i}" for i in range(4)]
    assert torch.equal(result.state_dict["a"], uniform_soup(members)["a"])
    strict = greedy_soup(members, lambda weights: 0.5, strict=True)
    assert strict.ingredients == ["ingredient 0"]
    assert all(same_bits(strict.state_dict[name], members[0][name]) for name in members[0])


def test_non_finite_ingredients_are_left_out_and_named():
    members = runs(4)
    members[0]["a"][3, 3] = math.nan
    seen = []

    def evaluate(weights):
        seen.append(bool(torch.isfinite(weights["a"]).all()))
        return math.nan if torch.equal(weights["a"], members[2]["a"]) else 1.0

    result = greedy_soup(members, evaluate)
    assert all(seen)
    assert result.ingredients == ["ingredient 1", "ingredient 3"]
    reasons = {row["name"]: row["reason"] for row in result.history}
    assert "'a' holds a NaN" in reasons["ingredient 0"]
    assert "its metric is nan" in reasons["ingredient 2"]
    known = greedy_soup(members, lambda weights: 1.0, scores=[9.0, 1.0, None, 0.5])
    assert "ingredient 0" not in known.ingredients


def test_known_scores_are_not_evaluated_again():
    calls = []

    def evaluate(weights):
        calls.append(1)
        return -1.0

    result = greedy_soup(runs(5), evaluate, scores=[0.1, 0.5, 0.3, 0.2, 0.4])
    assert len(calls) == 4
    assert [row["name"] for row in result.history] == [f"ingredient {i}" for i in (1, 4, 2, 3, 0)]
    assert result.score == 0.5


def test_what_evaluate_does_to_the_candidate_does_not_last():
    members = runs(4)

    def ruin(weights):
        score = -float(weights["a"].square().sum())
        for value in weights.values():
            value.fill_(math.nan)
        return score

    def leave(weights):
        return -float(weights["a"].square().sum())

    ruined, left = greedy_soup(members, ruin), greedy_soup(members, leave)
    assert ruined.history == left.history
    assert all(same_bits(ruined.state_dict[name], left.state_dict[name]) for name in members[0])


def test_after_average_sees_every_candidate_and_the_result():
    mask = torch.arange(5) % 2 == 0

    def remask(weights):
        weights["b"].mul_(mask)

    def evaluate(weights):
        assert not weights["b"][~mask].any()
        return 0.0

    result = greedy_soup(runs(3), evaluate, after_average=remask)
    assert not result.state_dict["b"][~mask].any()
    assert result.state_dict["b"][mask].all()


def test_max_ingredients():
    result = greedy_soup(runs(6), lambda weights: 0.0, max_ingredients=3)
    assert len(result.ingredients) == 3
    assert "not tried" in result.history[5]["reason"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda run: run.pop("b"), r"'b' in ingredient 0 but not in ingredient 1"),
        (lambda run: run.update(c=torch.ones(1)), r"'c' in ingredient 1 but not in ingredient 0"),
        (lambda run: run.update(b=torch.ones(6)), r"\(5,\) in ingredient 0 and \(6,\) in ingredient 1"),
        (lambda run: run.update(b=torch.ones(5, dtype=torch.int64)), "floating-point in all ingredients or in none"),
        (lambda run: run.update(b=3), "'b' must be a tensor, got int"),
    ],
)
def test_strangers_are_refused_by_name(change, match):
    members = runs(2)
    change(members[1])
    for call in (lambda: greedy_soup(members, lambda weights: 1 / 0), lambda: uniform_soup(members)):
        with pytest.raises(CheckpointError, match=match):
            call()


def test_bad_arguments():
    with pytest.raises(CheckpointError, match="at least one"):
        greedy_soup([], lambda weights: 0.0)
    with pytest.raises(CheckpointError, match="sequence of paths"):
        greedy_soup("checkpoint-1", lambda weights: 0.0)
    with pytest.raises(ConfigError, match="mode must be max or min"):
        greedy_soup(runs(2), lambda weights: 0.0, mode="best")
    with pytest.raises(ConfigError, match="max_ingredients"):
        greedy_soup(runs(2), lambda weights: 0.0, max_ingredients=0)
    with pytest.raises(ConfigError, match="one for each of 2"):
        greedy_soup(runs(2), lambda weights: 0.0, scores=[1.0])
    for bad in ({"accuracy": 1.0}, None, torch.ones(2), "much"):
        with pytest.raises(ConfigError, match="evaluate must return"):
            greedy_soup(runs(2), lambda weights, bad=bad: bad)


def test_candidates_do_not_pile_up():
    shape = (311, 313)  # no other tensor in this process has it

    def copies():
        return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.shape == shape)

    members = [{"w": torch.randn(shape)} for _ in range(8)]
    given_before, most = copies(), []

    def evaluate(weights):
        most.append(copies() - given_before)
        return 0.0

    greedy_soup(members, evaluate)
    assert max(most) <= 2  # the mean and the candidate


# --- journal ----------------------------------------------------------------------------------------------------------


class KilledError(Exception):
    pass


def test_a_killed_search_goes_on_to_the_same_bits(tmp_path):
    members = runs(5, seed=3)

    def quality(weights):
        return -float(weights["a"].square().sum())

    whole = greedy_soup(members, quality)
    for kill_at in range(1, 10):
        calls = []

        def evaluate(weights, kill_at=kill_at, calls=calls):
            if len(calls) == kill_at - 1:
                raise KilledError
            calls.append(1)
            return quality(weights)

        journal = tmp_path / f"{kill_at}.json"
        with pytest.raises(KilledError):
            greedy_soup(members, evaluate, journal=journal)
        rest = []
        result = greedy_soup(members, lambda weights, rest=rest: rest.append(1) or quality(weights), journal=journal)
        assert len(calls) + len(rest) == 9
        assert (result.history, result.ingredients, result.score) == (whole.history, whole.ingredients, whole.score)
        assert all(same_bits(result.state_dict[name], whole.state_dict[name]) for name in members[0])
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_a_journal_keeps_scores_that_json_has_no_name_for(tmp_path):
    scores = [math.nan, math.inf, 0.1 + 0.2, 1e-320]
    members = [{"w": torch.tensor([float(i)])} for i in range(4)]
    first = greedy_soup(members, lambda w: scores[int(w["w"])] if w["w"] % 1 == 0 else -1.0, journal=tmp_path / "j")
    again = greedy_soup(members, lambda w: 1 / 0, journal=tmp_path / "j")
    assert again.history == first.history
    json.loads((tmp_path / "j").read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("other", ["ingredients", "mode", "strict", "order", "damaged", "foreign"])
def test_a_journal_of_another_search_is_refused(tmp_path, other):
    members, journal = runs(3), tmp_path / "journal.json"
    greedy_soup(members, lambda weights: 0.0, journal=journal)
    arguments = {}
    if other == "ingredients":
        members[2]["b"][4] += 1e-3
    elif other == "order":
        members.reverse()
    elif other == "mode":
        arguments["mode"] = "min"
    elif other == "strict":
        arguments["strict"] = True
    else:
        journal.write_text("{" if other == "damaged" else '{"a": 1}')
    with pytest.raises(CheckpointError, match="journal"):
        greedy_soup(members, lambda weights: 0.0, journal=journal, **arguments)


# --- path -------------------------------------------------------------------------------------------------------------


def test_path_as_table_json_and_plot(tmp_path):
    from rich.console import Console

    result = greedy_soup(runs(4), lambda weights: math.nan if weights["a"][0, 0] > 1e9 else 0.25)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(path_table(result))
    assert "soup of 4 of 4: 0.25" in console.export_text()
    assert json.loads(path_json(result))["history"] == result.history
    plot = path_plot(result, tmp_path / "path.png")
    assert plot.read_bytes()[:4] == b"\x89PNG"


# --- technique --------------------------------------------------------------------------------------------------------


class RunServices:
    """Checkpoints in memory, evaluated by a function of the model."""

    def __init__(self, model, weights, metric):
        self.model, self.weights, self.metric = model, weights, metric
        self.said, self.evaluations, self.calibrations = [], 0, 0

    def checkpoints(self):
        return [SavedCheckpoint(Path(f"checkpoint-{step}"), step) for step in self.weights]

    def load_weights(self, path):
        return self.weights[int(path.name.rsplit("-", 1)[1])]

    def evaluate(self):
        self.evaluations += 1
        return {"eval_loss": self.metric(self.model), "eval_runtime": 1.0}

    def calibrate(self, num_batches):
        self.calibrations += 1
        self.model.train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _ in range(num_batches):
                self.model(torch.randn(16, 3, generator=generator))

    def say(self, text):
        self.said.append(text)


def a_run(metric=None, count=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    weights = {}
    for step in range(10, 10 * count + 10, 10):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model[1].num_batches_tracked.fill_(step)
        weights[step] = {name: value.clone() for name, value in model.state_dict().items()}
    metric = metric or (lambda model: float(model[0].weight.detach().square().sum()))
    services = RunServices(model, weights, metric)
    context = Context(model=model, services=services, step=10 * count)
    return model, context, services, ModelSoup(SoupConfig(kind=options.pop("kind", "greedy"), **options))


def test_the_model_holds_the_soup_of_its_checkpoints():
    model, context, services, technique = a_run()
    replaced = []
    context.weights_replaced = lambda: replaced.append(1)
    parameters = [id(parameter) for parameter in model.parameters()]
    technique.begin(context)
    technique.finish(model, context)
    expected = greedy_soup(
        list(services.weights.values()), lambda weights: float(weights["0.weight"].square().sum()), mode="min"
    )
    assert all(torch.equal(value, expected.state_dict[name]) for name, value in model.state_dict().items())
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert services.evaluations == 7
    assert len(replaced) == 8
    report = technique.report()
    assert report["score"] == expected.score <= report["best_single"]
    assert len(report["ingredients"]) == len(expected.ingredients)
    assert "checkpoint-" in report["ingredients"][0]
    assert "eval_loss" in services.said[-1]
    json.dumps(report)


def test_final_weights_are_an_ingredient_unless_saved():
    model, context, _, technique = a_run(metric=lambda model: 1.0)
    with torch.no_grad():
        model[0].weight.add_(1)
    technique.finish(model, context)
    assert technique.report()["ingredients"][-1] == "final weights (step 40)"
    assert technique.report()["candidates"] == 5


def test_uniform_takes_all():
    model, context, services, technique = a_run(kind="uniform")
    technique.finish(model, context)
    expected = uniform_soup(list(services.weights.values()))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert services.evaluations == 0


def test_last_and_first_usable_step():
    model, context, services, technique = a_run(metric=lambda model: 1.0, last=2)
    technique.finish(model, context)
    assert technique.report()["ingredients"] == ["checkpoint-30", "checkpoint-40"]
    model, context, services, technique = a_run(metric=lambda model: 1.0)
    context.first_usable_step = 20
    technique.finish(model, context)
    assert technique.report()["ingredients"] == ["checkpoint-20", "checkpoint-30", "checkpoint-40"]
    assert "1 checkpoints from before step 20" in services.said[0]
    model, context, services, technique = a_run()
    context.first_usable_step = 41
    with pytest.raises(CheckpointError, match="at or after step 41"):
        technique.finish(model, context)


def test_one_checkpoint_is_the_result_and_none_is_an_error():
    model, context, services, technique = a_run(count=1)
    technique.finish(model, context)
    assert torch.equal(model[0].weight, services.weights[10]["0.weight"])
    assert "only ingredient" in services.said[0]
    services.weights = {}
    with pytest.raises(CheckpointError, match="save_steps"):
        technique.finish(model, context)


def test_a_metric_that_is_not_reported_is_refused():
    model, context, _, technique = a_run(metric=lambda model: 1.0)
    technique = ModelSoup(SoupConfig(kind="greedy", metric="eval_los"))
    with pytest.raises(ConfigError, match="did you mean 'eval_loss'"):
        technique.finish(model, context)


def test_checkpoints_of_another_model_are_refused():
    model, context, services, technique = a_run()
    services.weights[20] = {**services.weights[20], "more": torch.ones(1)}
    with pytest.raises(CheckpointError, match="more"):
        technique.finish(model, context)
    model, context, services, technique = a_run()
    for weights in services.weights.values():
        weights["0.weight"] = torch.ones(9, 3)
    with pytest.raises(CheckpointError, match=r"shape.*\(9, 3\)"):
        technique.finish(model, context)


def test_batch_norm_is_estimated_anew_for_every_average():
    model, context, services, technique = a_run(bn_batches=3)
    technique.begin(context)
    technique.finish(model, context)
    assert services.calibrations == 8
    assert model[1].momentum == 0.1
    mean = model[1].running_mean.clone()
    model[1].reset_running_stats()
    model[1].momentum = None
    services.calibrate(3)
    assert torch.equal(model[1].running_mean, mean)
    with pytest.raises(MatchError, match="without BatchNorm"):
        technique.begin(Context(model=nn.Linear(2, 2), services=services))


def test_a_tied_model_takes_checkpoints_that_hold_the_tie_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    start = model.embed.weight.detach().clone()
    weights = {step: {"head.weight": torch.full((5, 3), float(step))} for step in (1, 2)}
    services = RunServices(model, weights, lambda model: 0.0)
    technique = ModelSoup(SoupConfig(kind="greedy", last=2))
    technique.finish(model, Context(model=model, services=services))
    assert model.head.weight is model.embed.weight
    assert technique.report()["candidates"] == 3
    expected = uniform_soup([{"w": weights[1]["head.weight"]}, {"w": weights[2]["head.weight"]}, {"w": start}])
    assert torch.equal(model.embed.weight, expected["w"])


def test_a_bare_loop_is_told_before_training():
    with pytest.raises(EffError, match="needs a trainer"):
        ModelSoup(SoupConfig(kind="greedy")).begin(Context(model=nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("metric", "larger"),
    [("eval_loss", False), ("val_loss", False), ("eval_accuracy", True), ("perplexity", False), ("val/wer", False),
     ("eval_f1", True), ("valloss", False), ("eval_answer", True)],
)  # fmt: skip
def test_mode_auto(metric, larger):
    assert SoupConfig(kind="greedy", metric=metric).larger_is_better == larger
    assert SoupConfig(kind="greedy", metric=metric, mode="max").larger_is_better


def _two_processes(rank, port_file, out):
    torch.distributed.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    noise = 0.5 * rank  # each process sees other validation data, and would choose another soup

    def metric(model):
        return float((model[0].weight.detach() - noise).square().sum())

    model, context, services, technique = a_run(metric=metric)
    technique.finish(model, context)
    torch.save({"state": model.state_dict(), "evaluations": services.evaluations}, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_choose_what_the_main_process_measures(tmp_path):
    import multiprocessing

    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_two_processes, args=(rank, tmp_path / "rendezvous", tmp_path)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    model, run_context, services, technique = a_run(metric=lambda model: float(model[0].weight.detach().square().sum()))
    technique.finish(model, run_context)
    assert first["evaluations"] == second["evaluations"] == services.evaluations
    for name, value in model.state_dict().items():
        assert torch.equal(first["state"][name], value)
        assert torch.equal(second["state"][name], value)
