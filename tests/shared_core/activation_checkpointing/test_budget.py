"""Budgets: what users write, plans for a model, and plans made while it trains."""

import contextlib
import copy
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plain_loop import begun_session, plain_step
from torch import nn

from shared_core import Session
from shared_core.activation_checkpointing import apply_segments, profiler
from shared_core.activation_checkpointing import policies as lazy_budget
from shared_core.activation_checkpointing.config import Budget, parse_budget
from shared_core.activation_checkpointing.policies import LazyBudget, plan_segments
from shared_core.activation_checkpointing.profiler import measure_peak
from shared_core.engine.services import Services
from shared_core.errors import ConfigError, TrainingError


@pytest.fixture(autouse=True)
def even_clock(monkeypatch):
    """A plan follows measured times: here that of all blocks alike, whatever else the processor has to do."""
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=itertools.count(0.0).__next__))


def network():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 16), nn.BatchNorm1d(16))
        for _ in range(8)
    ]
    return nn.Sequential(*blocks)


def batch(number=0):
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("budget:0.25", Budget(0.25, "fraction")),
        ("budget:1e-1", Budget(0.1, "fraction")),
        ("budget:1.0", Budget(2.0**30, "bytes")),
        ("budget:1", Budget(2.0**30, "bytes")),
        ("budget:2.5", Budget(2.5 * 2**30, "bytes")),
        ("budget:0.5GiB", Budget(2.0**29, "bytes")),
        ("budget:300MiB", Budget(300.0 * 2**20, "bytes")),
        ("budget:least", Budget(0.0, "least")),
    ],
)
def test_budgets_that_users_write(text, expected):
    assert parse_budget(text) == expected


@pytest.mark.parametrize(
    "text", ["budget", "budget:", "budget:0", "budget:-1", "budget:nan", "budget:inf", "budget:2GB", "sqrt:2", "0.5"]
)
def test_budgets_that_are_none(text):
    with pytest.raises(ConfigError, match=r"checkpointing.policy: a budget must be .* got"):
        parse_budget(text)


def test_planning_leaves_no_trace():
    net = network().eval()
    net[3][2].train()
    net[0][0].weight.grad = torch.ones(64, 16)
    before, state, modes = copy.deepcopy(net.state_dict()), torch.get_rng_state(), [m.training for m in net.modules()]
    plan = plan_segments(net, "budget:0.6", batch())
    assert plan.segments
    assert plan.peak <= 0.6 * plan.full_peak
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(net[0][0].weight.grad, torch.ones(64, 16))
    assert [m.training for m in net.modules()] == modes
    assert sum(parameter.grad is not None for parameter in net.parameters()) == 1


def test_inputs_of_every_kind_and_a_step_give_one_plan():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = network()

        def forward(self, x, scale=1.0):
            return {"loss": (scale * self.blocks(x)).square().mean()}

    net, x = Model(), batch()
    plans = [
        plan_segments(net, "budget:least", x),
        plan_segments(net, "budget:least", [x]),
        plan_segments(net, "budget:least", ((x,), {"scale": 1.0})),
        plan_segments(net, "budget:least", {"x": x, "scale": 1.0}),
        plan_segments(net, "budget:least", step=lambda: net(x)["loss"].backward()),
    ]
    assert len({plan.peak for plan in plans}) == 1
    for wrong in ({}, {"example_inputs": batch(), "step": print}):
        with pytest.raises(ConfigError, match="example_inputs or a step"):
            plan_segments(net, "budget:least", **wrong)
    with pytest.raises(ConfigError, match="budget must be at least"):
        plan_segments(net, "budget:0.01", batch())
    with pytest.raises(TrainingError, match="with a gradient"):
        plan_segments(net.requires_grad_(False).blocks, "budget:least", batch())


def test_every_process_decides_by_the_most_of_all(monkeypatch):
    plans = []
    for scale in (1.0, 1.5):
        # what the other process saw: as much, or half as much again
        monkeypatch.setattr(lazy_budget, "all_reduce_", lambda t, op, scale=scale: torch.maximum(t, t * scale).to(t))
        net = network()
        lazy = LazyBudget(net, "budget:least", [str(i) for i in range(8)], lambda segments: None)
        for number in range(3):
            lazy.before_forward()
            net(batch(number)).square().mean().backward()
            lazy.after_backward()
        plans.append(lazy)
    assert plans[1].plan.full_peak == pytest.approx(1.5 * plans[0].plan.full_peak, rel=0.01)
    assert plans[1].measured_peak > plans[0].measured_peak


def test_measured_peak_falls_with_the_budget():
    peaks = []
    for budget in ("budget:0.9", "budget:0.7", "budget:least"):
        net = network()
        plan = plan_segments(net, budget, batch())
        apply_segments(net, plan.segments)
        with measure_peak(net) as peak:
            net(batch()).square().mean().backward()
        peaks.append(peak.activations)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def trained_by_session(recipe, steps, state=None, weights=None, *, surrounded=True):
    net = network()
    session = Session(recipe)
    session.attach(net)
    if state is not None:
        net.load_state_dict(weights)
        session.load_state_dict(state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.begin([optimizer], total_steps=6)
    if surrounded:
        with session.forward():
            net.eval()(batch())  # whose backward never comes
        net.train()
    for number in steps:
        torch.manual_seed(number)  # dropout
        with session.forward() if surrounded else contextlib.nullcontext():
            loss = net(batch(number)).square().mean()
        plain_step(session, optimizer, loss)
    return net, session


@pytest.mark.parametrize("surrounded", [True, False])
@pytest.mark.parametrize("budget", ["budget:0.6", "budget:2"])
def test_a_session_plans_measures_and_changes_no_weight(budget, surrounded):
    plain, _ = trained_by_session({}, range(6))
    net, session = trained_by_session({"checkpointing": {"policy": budget}}, range(6), surrounded=surrounded)
    report = json.loads(json.dumps(session.techniques["checkpointing"].report()))
    assert report["measured_peak_bytes"] == pytest.approx(report["predicted_peak_bytes"], rel=0.02)
    assert ("recomputations" in report) == (budget == "budget:0.6")
    if budget == "budget:0.6":
        assert report["measured_peak_bytes"] <= 0.6 * report["peak_bytes_without"]
        assert report["recomputations"] == 4 * report["segments"]
        assert 0 < report["recomputed_share_of_forward"] < 1
    session.finish()
    for mine, theirs in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stop", [1, 4])
def test_a_session_resumes_with_its_plan(stop):
    recipe = {"checkpointing": {"policy": "budget:0.6"}}
    whole, _ = trained_by_session(recipe, range(6))
    half, before = trained_by_session(recipe, range(stop))
    net, after = trained_by_session(recipe, range(stop, 6), before.state_dict(), half.state_dict())
    plans = [run.techniques["checkpointing"].report().get("plan") for run in (before, after)]
    assert plans[0] == (plans[1] if stop == 4 else None)
    for mine, theirs in zip(net.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_session_resumed_with_another_budget_plans_anew():
    recipes = [{"checkpointing": {"policy": f"budget:{share}"}} for share in (0.6, 0.8)]
    half, before = trained_by_session(recipes[0], range(3))
    _, after = trained_by_session(recipes[1], range(3, 6), before.state_dict(), half.state_dict())
    told = [run.techniques["checkpointing"].report() for run in (before, after)]
    assert told[0]["saved_bytes"] > told[1]["saved_bytes"] > 0


def test_a_session_says_that_a_budget_holds_without_and_that_it_was_exceeded(monkeypatch):
    said = []
    monkeypatch.setattr(Services, "say", lambda self, text: said.append(text))
    net, session = trained_by_session({"checkpointing": {"policy": "budget:2"}}, range(3))
    assert "nothing is recomputed" in said[-1]
    assert not net._forward_pre_hooks
    lazy = session.techniques["checkpointing"]._budget
    lazy.plan, lazy.measured_peak = replace(lazy.plan, segments=(("1",),)), 3 * 2**30
    assert lazy.remark.startswith("the measured peak of 3072.0 MiB exceeds budget:2, 2048.0 MiB, where ")


def test_frozen_blocks_are_in_no_segment_and_hold_nothing():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(8)))
    for block in net[:4]:
        block.requires_grad_(False)
    plan = plan_segments(net, "budget:least", torch.ones(64, 8))
    assert {name for segment in plan.segments for name in segment} <= set("4567")
    apply_segments(net, plan.segments)
    with measure_peak(net) as peak:
        net(torch.ones(64, 8)).sum().backward()
    assert peak.activations == pytest.approx(plan.peak, rel=0.02)


def test_a_compiled_model_is_profiled_eagerly_and_compiled_afterwards():
    net = network()[:3]
    session, _ = begun_session({"checkpointing": {"policy": "budget:0.8"}}, net, 4)
    compiled = torch.compile(net, backend="aot_eager")
    for number in range(4):
        with session.forward():
            loss = compiled(batch(number)).sum()
        loss.backward()
        assert ("compiled" in session.techniques["checkpointing"].report()) == (number == 3)
        session.before_step()
        session.after_step()
