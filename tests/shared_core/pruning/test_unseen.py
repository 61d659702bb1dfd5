"""Layers whose inputs hooks do not see, or not in every step: attention's output, experts without tokens."""

import copy
import json

import pytest
import torch
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.engine.recipe import Recipe
from shared_core.engine.saving.session_state import load_window_state, window_state
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.pruning.scorers import make_scorer

STEPS = 12
OPTIONS = {"sparsity": 0.5, "criterion": "wanda", "begin": 1, "end": 9, "every": 2}


class Mixture(nn.Module):
    """Attention, and three experts of which each step takes one: the second until step 4, the third never."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, expert):
        return self.experts[expert](self.attention(x, x, x)[0])


class Run:
    def __init__(self, options, folder=None, weights=None):
        torch.manual_seed(0)
        self.model = Mixture()
        self.session = Session(Recipe.from_dict({"prune": options, "allow_partial": True}), seed=3)
        self.session.attach(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if folder is not None:
            self.model.load_state_dict(weights)
            self.session.load_state_dict(load_state(folder))
        self.session.begin([self.optimizer], total_steps=STEPS)

    def step(self):
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(self.session.step))
        plain_step(self.session, self.optimizer, self.model(x, int(self.session.step < 4)).square().mean())

    def told(self):
        return self.session.receipt()["techniques"]["prune"]


def trained_and_resumed(options, folder, stops):
    """Return a whole run and its weights before each step, after the runs resumed at `stops` ended with the same."""
    whole, weights = Run(options), {}
    for step in range(STEPS):
        (folder / str(step)).mkdir()
        save_state(folder / str(step), whole.session.state_dict())
        weights[step] = copy.deepcopy(whole.model.state_dict())
        whole.step()
    whole.session.finish()
    for stop in stops:
        resumed = Run(options, folder / str(stop), weights[stop])
        for _ in range(stop, STEPS):
            resumed.step()
        resumed.session.finish()
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[name]), (stop, name)
        assert resumed.told().get("updates_without_input") == whole.told().get("updates_without_input")
    return whole, weights


@pytest.mark.parametrize("granularity", ["unstructured", "n_m"])
def test_wanda_prunes_an_expert_without_tokens_by_its_last_inputs_and_resumes_exactly(granularity, tmp_path, capsys):
    n_m = {"granularity": "n_m", "schedule": "one_shot", "dynamic": "recompute"}
    options = OPTIONS if granularity == "unstructured" else OPTIONS | n_m
    whole, _ = trained_and_resumed(options, tmp_path, (2, 4, 6, 8))
    report = whole.told()
    sparsity = {tensor["name"]: tensor["sparsity"] for tensor in report["tensors"]}
    # the masks change after steps 1, 3, 5, 7 and 9
    assert sparsity == {"experts.0.weight": 0.5, "experts.1.weight": 0.5, "experts.2.weight": 0.0}
    assert report["updates_without_input"] == {"experts.0.weight": 2, "experts.1.weight": 2, "experts.2.weight": 5}
    assert "experts.2.weight stay dense" in capsys.readouterr().out
    json.dumps(report)


def test_older_inputs_are_scored_by_until_there_are_others_and_are_saved():
    layers = {"one": nn.Linear(2, 1), "other": nn.Linear(2, 1), "never": nn.Linear(2, 1)}
    scorer, again = make_scorer("wanda", layers), make_scorer("wanda", layers)

    def see(name, *x):
        with scorer.calibrating():
            layers[name](torch.tensor([x]))
        scorer.reduce()

    weight = torch.tensor([[1.0, -2.0]])
    see("one", 3.0, 1.0)
    scorer.reset()
    see("other", 1.0, 1.0)
    again.load_state_dict(scorer.state_dict())
    for each in (scorer, again):
        assert each.scores("one", weight).tolist() == [[3.0, 2.0]]
        assert each.report() == {"updates_without_input": {"other": 1, "never": 1}}
        assert not each.has_seen("never")
        with pytest.raises(TrainingError, match="never got no input"):
            each.scores("never", weight)
    see("one", 0.0, 1.0)
    assert scorer.scores("one", weight).tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("options", [{}, {"criterion": "fisher"}, {"criterion": "magnitude", "cost": "flops"}])
def test_the_output_of_attention_is_left_out_where_it_must_be_called(options):
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    options = {**OPTIONS, **options}
    session = Session(Recipe.from_dict({"prune": options}))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.begin([optimizer], total_steps=STEPS)
    for _ in range(STEPS):
        plain_step(session, optimizer, model(torch.randn(2, 3, 8)).square().mean())
    session.finish()
    told = session.receipt()["techniques"]["prune"]
    assert "attention reads" in told["left_out"]["0.self_attn.out_proj.weight"]
    assert told["sparsity"] == 0.5
    named = Session(Recipe.from_dict({"prune": {**options, "include": ["0.self_attn.out_proj", "0.linear1"]}}))
    with pytest.raises(CompatibilityError, match=r"got 0.self_attn.out_proj: attention reads"):
        named.attach(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)))


def test_the_output_of_attention_is_pruned_with_its_inputs_by_what_needs_no_call():
    session = Session(Recipe.from_dict({"prune": {"sparsity": 0.5}}))
    session.attach(nn.Sequential(nn.MultiheadAttention(8, 2)))
    assert list(session.techniques["prune"]._targets.modules) == ["0.in_proj_weight", "0.out_proj.weight"]


COSTS = {"sparsity": 0.5, "cost": "flops", "begin": 1, "end": 9, "every": 2}


def test_an_expert_without_tokens_is_dense_until_its_cost_is_known_and_resumes_exactly(tmp_path, capsys):
    whole, weights = trained_and_resumed(COSTS, tmp_path, (0, 1, 4, 5, 8))
    for step in (3, 4):  # the first expert is called from the fifth step on
        assert weights[step]["experts.0.weight"].all()
        assert not weights[step]["experts.1.weight"].all()
    sparsity = {tensor["name"]: tensor["sparsity"] for tensor in whole.told()["tensors"]}
    assert sparsity["experts.0.weight"] > 0 == sparsity["experts.2.weight"]
    assert "experts.2.weight stay dense" in capsys.readouterr().out
    assert not any(module._forward_hooks for module in whole.model.modules())


def test_costs_are_those_of_all_micro_batches_of_the_step_that_a_run_was_stopped_in():
    def run(stopped):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.AdaptiveAvgPool2d((1, 8)), nn.Linear(8, 8))
        session = Session(Recipe.from_dict({"prune": COSTS}))
        session.attach(model)
        session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=STEPS)
        prune = session.techniques["prune"]
        if stopped is None:
            model(torch.randn(2, 12, 8))
        else:
            load_window_state(session, stopped)
        found = window_state(session)
        model(torch.randn(2, 4, 8))
        session.before_step()
        return prune.state_dict()["costs"], found

    costs, window = run(None)
    assert costs == {"0.weight": 2 * 8.0, "2.weight": 2.0}
    assert run(window)[0] == costs
