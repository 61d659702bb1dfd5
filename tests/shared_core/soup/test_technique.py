"""A soup at the end of training by the trainer's own evaluation; equal, diverged and damaged checkpoints."""

import json
import random
import re

import pytest
import torch
from soup_runs import RunServices, a_run, same_bits
from torch import nn

from shared_core.engine.plan import Plan
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, ConfigError, EffError, MatchError, TrainingError
from shared_core.soup import ModelSoup, SoupConfig, greedy_soup, uniform_soup


def test_the_model_holds_the_soup_of_its_checkpoints():
    model, context, services, technique = a_run()
    replaced = []
    context.report_weights_replaced = lambda: replaced.append(1)
    parameters = [id(parameter) for parameter in model.parameters()]
    technique.begin(context, None)
    technique.finish(context)
    expected = greedy_soup(
        list(services.weights.values()), lambda weights: float(weights["0.weight"].square().sum()), mode="min"
    )
    assert all(torch.equal(value, expected.state_dict[name]) for name, value in model.state_dict().items())
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert services.evaluations == 8  # the best one twice
    assert len(replaced) == 9
    assert technique.report()["repeat"] == [expected.history[0]["single"]] * 2
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
    technique.finish(context)
    assert technique.report()["ingredients"][-1] == "final weights (step 40)"
    assert technique.report()["candidates"] == 5


def test_uniform_takes_all():
    model, context, services, technique = a_run(kind="uniform")
    technique.finish(context)
    expected = uniform_soup(list(services.weights.values()))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert services.evaluations == 0


def test_weights_are_of_the_newest_oldest_first():
    model, context, services, technique = a_run(kind="weighted", weights=[1, 3])
    with torch.no_grad():
        model[0].weight.add_(1)  # the final weights, which no checkpoint holds
    final = {name: value.clone() for name, value in model.state_dict().items()}
    technique.finish(context)
    expected = uniform_soup([services.weights[40], final], [1, 3])
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert technique.report()["weights"] == [1, 3]
    model, context, services, technique = a_run(kind="weighted", weights=[9, 9, 1, 3], count=2)
    technique.finish(context)
    expected = uniform_soup(list(services.weights.values()), [1, 3])
    assert torch.equal(model[0].weight, expected["0.weight"])
    assert "only the last 2 weights" in services.said[0]


def test_the_receipt_of_an_average_names_who_was_left_out():
    _model, context, services, technique = a_run(kind="weighted", weights=[1, 3])
    services.weights[30]["0.bias"][0] = torch.nan
    technique.finish(context)
    found = technique.report()
    assert (found["ingredients"], found["weights"]) == (["checkpoint-40"], [3])
    assert found["left_out"].keys() == {"checkpoint-30"}
    assert "'0.bias' contains NaN" in found["left_out"]["checkpoint-30"]
    assert any("checkpoint-30 is left out" in line for line in services.said)


@pytest.mark.parametrize(
    ("options", "tried"),
    [
        ({"order": "newest"}, [40, 30, 20, 10]),
        ({"order": "logged"}, [20, 10, 40, 30]),  # 40 was saved with a NaN, 30 without a metric
        ({"order": "logged", "mode": "max"}, [10, 20, 40, 30]),
        ({"order": "random", "seed": 5}, None),
        ({"order": "random", "seed": 6}, None),
    ],
)
def test_in_another_order_only_the_first_is_evaluated_alone(options, tried):
    _model, context, services, technique = a_run(metric=lambda model: 1.0, repeat=False, **options)
    services.logged = {10: 0.5, 20: 0.25, 40: float("nan")}
    technique.finish(context)
    names = [row["name"] for row in technique.report()["history"]]
    by_step = [f"checkpoint-{step}" for step in (10, 20, 30, 40)]
    if tried is None:
        random.Random(options["seed"]).shuffle(by_step)
        assert names == by_step
    else:
        assert names == [f"checkpoint-{step}" for step in tried]
    assert services.evaluations == 4
    assert technique.report()["repeat"] is None


def test_without_a_logged_metric_the_newest_is_first():
    _model, context, services, technique = a_run(metric=lambda model: 1.0, order="logged")
    technique.finish(context)
    assert technique.report()["ingredients"][0] == "checkpoint-40"
    assert "no checkpoint was saved with eval_loss" in services.said[0]


def test_min_delta_strict_and_noise_are_those_of_the_search():
    scores = iter([4.0, 3.0, 2.0, 1.0, 1.5, 0.75, 0.25, 0.25])  # alone, again, averages
    _model, context, services, technique = a_run(metric=lambda model: next(scores), min_delta=0.5, max_ingredients=2)
    technique.finish(context)
    assert [row["score"] for row in technique.report()["history"]] == [1.0, 0.75, 0.25, None]
    assert technique.report()["ingredients"] == ["checkpoint-40", "checkpoint-20"]
    assert technique.report()["repeat"] == [1.0, 1.5]
    assert "not deterministic" in services.said[-1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "uniform", "strict": True}, "strict .*kind=greedy"),
        ({"kind": "uniform", "metric": "eval_f1"}, "metric .*kind=greedy"),
        ({"kind": "greedy", "seed": 1}, "seed .*order=random"),
        ({"kind": "greedy", "min_delta": -1}, "min_delta must be in"),
        ({"kind": "greedy", "weights": [1]}, "weights .*kind=weighted"),
        ({"kind": "weighted"}, "weights must be given with kind=weighted"),
        ({"kind": "weighted", "weights": [1, 0]}, r"weights must be in \(0, inf\)"),
        ({"kind": "weighted", "weights": [1], "last": 2}, "last cannot be combined with kind=weighted"),
    ],
)
def test_options_that_would_play_no_part_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        SoupConfig(**options)


def test_rank_is_for_adapters():
    _, context, _, technique = a_run(rank=2)
    with pytest.raises(MatchError, match="rank must be given for a PEFT model only"):
        technique.begin(context, None)


def test_a_best_model_that_was_loaded_is_no_second_ingredient():
    model, context, services, technique = a_run(metric=lambda model: 1.0)
    model.load_state_dict(services.weights[20])
    technique.finish(context)
    assert technique.report()["ingredients"] == [f"checkpoint-{step}" for step in (10, 20, 30, 40)]


def test_a_metric_that_validation_does_not_report_is_noticed_while_training():
    _, context, _, technique = a_run()
    context.step = 2
    technique.evaluated(context, {"eval_news_loss": 1.0})
    technique.evaluated(context, {"eval_books_loss": 1.0})  # one of several data sets
    context.step = 4
    with pytest.raises(ConfigError, match=r"metric must be .*, got 'eval_loss'; did you mean"):
        technique.evaluated(context, {"eval_news_loss": 1.0})
    _, context, _, technique = a_run()
    for context.step in (2, 4, 6):
        technique.evaluated(context, {"eval_news_loss": 1.0})
        technique.evaluated(context, {"eval_loss": 1.0})


def test_last_and_first_usable_step():
    _, context, services, technique = a_run(metric=lambda model: 1.0, last=2)
    technique.finish(context)
    assert technique.report()["ingredients"] == ["checkpoint-30", "checkpoint-40"]
    _model, context, services, technique = a_run(metric=lambda model: 1.0)
    context.plans["prune"] = Plan(usable_from=20)
    technique.finish(context)
    assert technique.report()["ingredients"] == ["checkpoint-20", "checkpoint-30", "checkpoint-40"]
    assert "1 checkpoints from before step 20" in services.said[0]


@pytest.mark.parametrize(
    ("saved", "first", "why"),
    [(0, 0, "no checkpoint"), (4, 41, "no checkpoint at or after step 41, .* last at step 40")],
)
def test_a_run_that_ends_before_it_saves_a_usable_checkpoint_keeps_its_last_weights(saved, first, why):
    model, context, services, technique = a_run()
    services.weights = services.weights if saved else {}
    context.plans["prune"], notes = Plan(usable_from=first), []
    context.note = notes.append
    before = {name: value.clone() for name, value in model.state_dict().items()}
    technique.finish(context)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert re.search(f"soup was not made: the run saved {why}.*its weights of step 40", "; ".join(notes))
    assert technique.report() == {"kind": "greedy", "ingredients": [], "candidates": 0}
    assert (services.evaluations, context.unvalidated) == (0, False)


def test_one_checkpoint_is_the_result():
    model, context, services, technique = a_run(count=1)
    technique.finish(context)
    assert torch.equal(model[0].weight, services.weights[10]["0.weight"])
    assert "only ingredient" in services.said[0]
    one = {"w": torch.tensor([0.1, -0.0, 3e38]), "half": torch.tensor([0.1]).half(), "steps": torch.tensor(7)}
    for soup in (uniform_soup([one]), greedy_soup([one], lambda weights: 0.5).state_dict):
        assert all(torch.equal(soup[name], value) and soup[name].dtype == value.dtype for name, value in one.items())


def test_a_metric_that_is_not_reported_is_refused():
    _model, context, _, technique = a_run(metric=lambda model: 1.0)
    technique = ModelSoup(SoupConfig(kind="greedy", metric="eval_los"))
    with pytest.raises(ConfigError, match="did you mean 'eval_loss'"):
        technique.finish(context)


def test_checkpoints_of_another_model_are_refused():
    _, context, services, technique = a_run()
    services.weights[20] = {**services.weights[20], "more": torch.ones(1)}
    with pytest.raises(CheckpointError, match="more"):
        technique.finish(context)
    _model, context, services, technique = a_run()
    for weights in services.weights.values():
        weights["0.weight"] = torch.ones(9, 3)
    with pytest.raises(CheckpointError, match=r"shape.*\(9, 3\)"):
        technique.finish(context)


def test_batch_norm_is_estimated_anew_for_every_average():
    model, context, services, technique = a_run(bn_batches=3)
    technique.begin(context, None)
    technique.finish(context)
    assert services.calibrations == 9
    assert model[1].momentum == 0.1
    mean = model[1].running_mean.clone()
    model[1].reset_running_stats()
    model[1].momentum = None
    services.calibrate(3)
    assert torch.equal(model[1].running_mean, mean)
    with pytest.raises(MatchError, match="without BatchNorm"):
        technique.begin(Context(model=nn.Linear(2, 2), services=services), None)


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
    technique.finish(Context(model=model, services=services))
    assert model.head.weight is model.embed.weight
    assert technique.report()["candidates"] == 3
    expected = uniform_soup([{"w": weights[1]["head.weight"]}, {"w": weights[2]["head.weight"]}, {"w": start}])
    assert torch.equal(model.embed.weight, expected["w"])


def test_a_bare_loop_is_told_before_training():
    with pytest.raises(EffError, match="needs a trainer"):
        ModelSoup(SoupConfig(kind="greedy")).begin(Context(model=nn.Linear(2, 2)), None)


@pytest.mark.parametrize(
    ("metric", "larger"),
    [("eval_loss", False), ("val_loss", False), ("eval_accuracy", True), ("perplexity", False), ("val/wer", False),
     ("eval_f1", True), ("valloss", False), ("eval_answer", True)],
)  # fmt: skip
def test_the_direction_follows_from_the_name_of_a_metric(metric, larger):
    assert SoupConfig(kind="greedy", metric=metric).larger_is_better == larger
    assert SoupConfig(kind="greedy", metric=metric, mode="max").larger_is_better


def _two_processes(rank, port_file, out):
    torch.distributed.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    noise = 0.5 * rank  # each process sees other validation data, and would choose another soup

    def metric(model):
        return float((model[0].weight.detach() - noise).square().sum())

    model, context, services, technique = a_run(metric=metric)
    technique.finish(context)
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
    technique.finish(run_context)
    assert first["evaluations"] == second["evaluations"] == services.evaluations
    for name, value in model.state_dict().items():
        assert torch.equal(first["state"][name], value)
        assert torch.equal(second["state"][name], value)


class Counting(nn.Module):
    """Has a counter, a running mean of its own, and a norm that no batch goes through."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.idle.running_mean.fill_(5.0)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mean", torch.tensor(0.5))

    def forward(self, x):
        self.count += 1
        self.mean = 0.9 * self.mean + x.mean()
        return self.used(x)


def test_estimating_norms_changes_nothing_else():
    model, options = Counting(), SoupConfig(kind="uniform", bn_batches=2)
    weights = {step: {name: value.clone() for name, value in model.state_dict().items()} for step in (1, 2)}
    services = RunServices(model, weights, None)
    ModelSoup(options).finish(Context(model=model, services=services))
    assert services.calibrations == 1
    assert (int(model.count), float(model.mean), float(model.idle.running_mean[0])) == (7, 0.5, 5.0)
    assert int(model.used.num_batches_tracked) == 2
    services.calibrate = lambda num_batches: None
    with pytest.raises(TrainingError, match="must give batches to estimate statistics on, got none of 2"):
        ModelSoup(options).finish(Context(model=model, services=services))
    assert int(model.used.num_batches_tracked) == 2  # that of the final weights
    assert model.used.momentum == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["greedy", "uniform"])
def test_sixteen_equal_checkpoints_in_any_order_of_keys_are_their_own_soup(kind, dtype):
    model, context, services, _ = a_run(count=16, metric=lambda model: 1.0)
    model.to(dtype)
    with torch.no_grad():
        model[0].weight[0, 0] = -0.0
    same = {name: value.clone() for name, value in model.state_dict().items()}
    services.weights = {step: dict(reversed(same.items())) for step in services.weights}
    services.weights[20] = {name: value.float() if value.is_floating_point() else value for name, value in same.items()}
    technique = ModelSoup(SoupConfig(kind=kind))
    technique.finish(context)
    assert all(same_bits(value, same[name]) for name, value in model.state_dict().items())
    assert len(technique.report()["ingredients"]) == 16


def test_what_diverged_is_left_out_and_named():
    metrics = iter([0.3, float("nan"), 0.2, 0.2, 0.1])
    model, context, services, technique = a_run(metric=lambda model: next(metrics))
    services.weights[20]["2.bias"][0] = float("nan")
    technique.finish(context)
    reasons = {row["name"]: row["reason"] for row in technique.report()["history"]}
    assert "'2.bias' contains NaN" in reasons["checkpoint-20"]
    assert "its metric is nan" in reasons["checkpoint-30"]
    assert technique.report()["ingredients"] == ["checkpoint-40", "checkpoint-10"]
    for weights in services.weights.values():
        weights["2.bias"][0] = float("inf")
    model.load_state_dict(services.weights[40])
    with pytest.raises(CheckpointError, match="at least one ingredient must have finite weights"):
        technique.finish(context)
    del services.weights[30]["2.bias"]
    with pytest.raises(
        CheckpointError, match=r"same tensors, got '2.bias' in .*checkpoint-10 but not in checkpoint-30"
    ):
        technique.finish(context)


def test_whatever_ends_the_search_leaves_the_final_weights():
    for end in (KeyboardInterrupt, RuntimeError):
        calls = iter(range(6))

        def metric(model, calls=calls, end=end):
            if next(calls) == 5:
                raise end
            return 1.0

        model, context, _, technique = a_run(metric=metric)
        with torch.no_grad():
            model[0].weight.add_(1)
        final = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(end):
            technique.finish(context)
        assert all(torch.equal(value, final[name]) for name, value in model.state_dict().items())
