"""Figures over steps in a receipt: few, the first and the latest among them, and the same for a resumed run."""

import copy
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shared_core import Recipe, Session
from shared_core.engine.observers.history import LIMIT, History, Series
from shared_core.pruning import PruneConfig

RECIPE = {"prune": {"sparsity": 0.5, "begin": 1, "end": 8, "every": 1}}


def series(steps, start=None):
    made = start or Series()
    for step in steps:
        made.add(step, {"a": step / 2})
    return made


@pytest.mark.parametrize("number", [1, 2, LIMIT, LIMIT + 1, LIMIT + 2, 2 * LIMIT + 1, 3 * LIMIT + 7, 5000])
def test_points_are_few_and_evenly_spread(number):
    points = series(range(1, number + 1)).points
    steps = [point["step"] for point in points]
    assert len(steps) <= LIMIT
    assert (steps[0], steps[-1]) == (1, number)
    gaps = {after - before for before, after in itertools.pairwise(steps[:-1])}
    assert len(gaps) <= 1  # of all but the latest
    assert number <= LIMIT or len(steps) > LIMIT // 2
    assert all(point["a"] == point["step"] / 2 for point in points)


@pytest.mark.parametrize("stopped", [1, 150, LIMIT, LIMIT + 1, 333, 801])
def test_a_series_goes_on_where_it_was_saved(stopped):
    state = json.loads(json.dumps(series(range(stopped)).state_dict()))
    resumed = Series()
    resumed.load_state_dict(state)
    series(range(stopped, 900), resumed)
    assert resumed.state_dict() == series(range(900)).state_dict()


def test_figures_of_one_step_are_one_point():
    made = series([1, 2])
    made.add(2, {"b": 1.0})
    made.add(2, {"a": 5.0})
    made.add(3, {})
    assert made.points == [{"step": 1, "a": 0.5}, {"step": 2, "a": 5.0, "b": 1.0}]


def run(until, state=None, weights=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    net.load_state_dict(weights or net.state_dict())
    session = Session(Recipe.from_dict(RECIPE))
    session.attach(net)
    if state is not None:
        session.load_state_dict(state)
    session.begin([torch.optim.SGD(net.parameters(), lr=0.1)], total_steps=10)
    for _ in range(session.step, until):
        session.before_step()
        session.after_step()
        session.figures()
        if session.step % 4 == 0:
            session.evaluated({"eval_loss": 1 / session.step, "eval_runtime": 3.0})
    return session, net


def test_the_receipt_holds_the_schedule_and_the_validations_and_a_resumed_run_the_same():
    whole, _ = run(10)
    told = whole.receipt()
    assert [point["step"] for point in told["history"]["figures"]] == list(range(1, 11))
    sparsity = [point["prune/sparsity"] for point in told["history"]["figures"]]
    assert sparsity == sorted(sparsity)
    assert sparsity[-1] == 0.5 > sparsity[3] > 0
    assert told["history"]["validation"] == [{"step": 4, "eval_loss": 0.25}, {"step": 8, "eval_loss": 0.125}]
    assert told["validation"] == {"eval_loss": 0.125}
    half, net = run(5)
    resumed, _ = run(10, copy.deepcopy(half.state_dict()), net.state_dict())
    assert resumed.receipt()["history"] == told["history"]
    assert resumed.receipt()["validation"] == told["validation"]


def test_the_best_checkpoint_of_a_run_does_not_undo_its_history_and_an_old_one_has_none():
    session, _ = run(5)
    early = copy.deepcopy(session.state_dict())
    later, _ = run(10)
    later.load_state_dict(early)
    assert later.receipt()["history"]["figures"][-1]["step"] == 10
    del early["history"]
    resumed, _ = run(6, early)
    assert [point["step"] for point in resumed.receipt()["history"]["figures"]] == [6]


def test_on_cuda_the_memory_in_use_is_kept_too_and_the_logger_is_not_told(monkeypatch):
    stats = {"allocated_bytes": {"all": {"current": 10, "peak": 30}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    history = History()
    technique = SimpleNamespace(config=PruneConfig(sparsity=0.5), figures=lambda: {"prune/sparsity": 0.5})
    assert history.logged(3, {"prune": technique}) == {"prune/sparsity": 0.5}
    point = {"step": 3, "prune/sparsity": 0.5, "memory/allocated": 10.0, "memory/largest": 30.0}
    assert history.to_dict()["history"]["figures"] == [point]
