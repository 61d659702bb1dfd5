"""Modules with a sparsity of their own: they reach it by themselves, and the others reach `sparsity` together."""

import pytest
import torch
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, MatchError
from shared_core.pruning import PruneConfig, cubic_sparsity, prune
from shared_core.tools.explain import explain


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10)).double()
    with torch.no_grad():
        net[2].weight.mul_(0.3)  # under one threshold it gives the most
    return net


def train(options, steps=12, net=None, saved=None):
    """Return the model, its session, and after each step the zeros of each weight; resume where a state is given."""
    net = net or build()
    session = Session(Recipe.from_dict({"prune": {"begin": 1, "end": 8, "every": 2, **options}}))
    session.attach(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    if saved is not None:
        session.load_state_dict(saved)
    session.begin([optimizer], total_steps=12)
    seen = []
    for step in range(session.step, steps):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step)).double()
        plain_step(session, optimizer, net(x).square().mean())
        seen.append([int(net[i].weight.eq(0).sum()) for i in (0, 2, 4)])
    return net, session, seen


OWN = {"sparsity": 0.7, "overrides": {"last": {"sparsity": 0.25}}}


@pytest.mark.parametrize(
    "kind",
    [
        *({"scope": name} for name in ("global", "local", "erdos_renyi")),
        *({"schedule": name} for name in ("one_shot", "linear", "cosine", "exponential", "iterative")),
        *({"criterion": name} for name in ("taylor", "movement", "fisher", "wanda")),
        {"criterion": "taylor", "cost": "flops"},
        {"dynamic": "recompute"},
        {"dynamic": "rigl", "schedule": "one_shot"},
        {"max_layer_sparsity": 0.75},
        {"initial_sparsity": 0.4},
        {"granularity": "block", "block": "2x2"},
    ],
    ids=str,
)
def test_a_layer_reaches_its_own_sparsity_and_the_others_theirs_together(kind):
    _, session, seen = train({**OWN, **kind})
    session.finish()
    *others, own = seen[-1]
    assert own == 100  # 0.25 of 400
    assert abs(sum(others) - 1680) <= 3  # 0.7 of 800 + 1600
    report = session.receipt()["techniques"]["prune"]
    assert report["overrides"] == {"4.weight": 0.25}
    if kind.get("scope") == "local":
        assert others == [560, 1120]
    if "max_layer_sparsity" in kind:
        assert report["capped"] == ["2.weight"]
        assert others[1] == 1200
    session.files.verify(None, "the model")


def test_midway_each_is_where_its_own_schedule_is():
    _, session, seen = train(OWN, steps=5)
    times = {"begin": 1, "end": 8, "initial": 0.0}
    assert seen[4][2] == round(400 * cubic_sparsity(5, final=0.25, **times))
    assert sum(seen[4][:2]) == round(2400 * cubic_sparsity(5, final=0.7, **times))
    assert "sparsity" in session.receipt()["unreached"]["prune"]


def test_sparsity_0_leaves_a_layer_dense_as_skip_does_and_of_two_overrides_the_later_counts():
    left, session, _ = train(
        {"sparsity": 0.6, "overrides": ["*:sparsity=0.3", "[024]:sparsity=0.6", "last:sparsity=0"]}
    )
    skipped, _, _ = train({"sparsity": 0.6, "scope": "local", "skip": ["last"]})
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), skipped.parameters(), strict=True))
    report = session.receipt()["techniques"]["prune"]
    assert report["overrides"] == {"0.weight": 0.6, "2.weight": 0.6, "4.weight": 0.0}
    assert report["left_out"] == {"4.weight": "left dense by overrides, sparsity 0"}


def test_one_layer_alone_may_be_pruned():
    _, session, seen = train({"sparsity": 0, "overrides": {"2": {"sparsity": 0.5}}}, steps=3)
    assert seen[0][0] == 0 < seen[2][1] < 800
    assert "2.weight 0.3178 of 0.5" in session.receipt()["unreached"]["prune"]
    _, session, seen = train({"sparsity": 0, "overrides": {"2": {"sparsity": 0.5}}})
    assert seen[-1] == [0, 800, 0]
    assert session.receipt()["unreached"] == {}


@pytest.mark.parametrize("kind", [{}, {"criterion": "movement"}, {"dynamic": "rigl", "schedule": "one_shot"}], ids=str)
def test_a_resumed_run_is_the_run_that_was_not_stopped(kind):
    whole, _, _ = train({**OWN, **kind})
    part, session, _ = train({**OWN, **kind}, steps=4)
    saved = session.state_dict()
    session.detach()
    resumed, _, _ = train({**OWN, **kind}, net=part, saved=saved)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_units_of_a_layer_go_by_its_own_sparsity():
    options = {"granularity": "filter", "sparsity": 0.5, "overrides": {"last": {"sparsity": 0.2}}}
    for scope in ("local", "global"):
        net, session, _ = train({**options, "scope": scope})
        gone = [int(net[i].weight.eq(0).all(1).sum()) for i in (0, 2, 4)]
        assert (gone[0] + gone[1], gone[2]) == (40, 2)
        assert session.receipt()["techniques"]["prune"]["overrides"] == {"4.weight": 0.2}
    net, _, _ = train({"granularity": "neuron", "sparsity": 0.5, "overrides": {"0": {"sparsity": 0.25}}})
    assert [int(net[i].weight.eq(0).all(1).sum()) for i in (0, 2)] == [10, 20]


def test_after_training_too_and_told_before_it():
    net = build()
    report = prune(net, OWN)
    assert [int(net[i].weight.eq(0).sum()) for i in (2, 4)][1] == 100
    assert (report.pruned, report.overrides) == (1780, {"4.weight": 0.25})
    told = explain(Recipe.from_dict({"prune": {**OWN, "overrides": ["4:sparsity=0.25", "0:sparsity=0"]}}), build())
    assert not told.conflicts
    assert told.touched["prune"].left_out == {"0.weight": "left dense by overrides, sparsity 0"}
    told = explain(Recipe.from_dict({"prune": OWN}), build(), total_steps=100)
    assert "sparsity 0.7, 4.weight 0.25" in told.timeline[-1]["what"]


def test_a_large_layer_left_dense_by_overrides_was_asked_for():
    told = explain(Recipe.from_dict({"prune": {"sparsity": 0.5, "overrides": ["[02]:sparsity=0"]}}), build())
    assert not told.conflicts
    assert any("left dense by overrides" in remark for remark in told.remarks)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"overrides": {"44": {"sparsity": 0.2}}}, "override pattern '44' matches no pruned layer; did you"),
        ({"overrides": {"2": {"sparsity": 0.2}}, "skip": ["2"]}, "override pattern '2' matches no pruned"),
        ({"overrides": {"last": {"sparsity": 1e-4}}}, "at least one of 400 weights of 4.weight"),
        ({"overrides": {"*": {"sparsity": 0}}}, "all were left out"),
        ({"overrides": {"4": {"sparsity": 0.5}}, "granularity": "neuron"}, "got 4.weight"),
    ],
)
def test_what_cannot_be_is_refused(options, says):
    with pytest.raises(MatchError, match=says):
        train({"sparsity": 0.5, **options}, steps=3)


def test_a_run_that_is_refused_before_it_begins_says_why():
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    session = Session(Recipe.from_dict({"prune": {"begin": "1ep", **OWN}}))
    attach_with(session, net, [optimizer])
    with pytest.raises(ConfigError, match="the length of an epoch is unknown"):
        session.begin([optimizer], total_steps=12)
    session.detach()
    assert session.receipt()["techniques"]["prune"]["pruned"] == 0


def test_layers_that_lose_channels_together_need_one_sparsity():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            x = self.a(x)
            return self.c(x + self.b(x))

    options = {"sparsity": 0.5, "granularity": "channel"}
    with pytest.raises(ConfigError, match=r"one sparsity to layers that lose channels together, got a.weight 0.25"):
        prune(Residual(), {**options, "overrides": {"a": {"sparsity": 0.25}}}, [torch.randn(1, 3, 4, 4)])
    net = Residual()
    prune(net, {**options, "overrides": {"[ab]": {"sparsity": 0.25}}}, [torch.randn(1, 3, 4, 4)])
    assert int(net.a.weight.flatten(1).eq(0).all(1).sum()) == 2


def test_a_mapping_and_a_list_are_one_config():
    mapping = PruneConfig(sparsity=0.5, overrides={"head": {"sparsity": 0.1}})
    assert mapping == PruneConfig(sparsity=0.5, overrides=["head:sparsity=0.1"])
