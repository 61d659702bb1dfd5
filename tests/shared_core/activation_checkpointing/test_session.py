"""Checkpointing in a session: with every other technique the run is the same to the bit; what is refused and told."""

import pytest
import torch
from plain_loop import begun_session, plain_step
from promise_drivers import difference, run_bare
from promise_table import EVERYTHING, TECHNIQUES, VARIANTS, recipe_of
from torch import nn

from shared_core import Recipe, Session
from shared_core.engine.checks.compatibility import refusal
from shared_core.errors import CompatibilityError, ConfigError, TrainingError

ROW = TECHNIQUES["checkpointing"].recipe()
OTHERS = [key for key in EVERYTHING if key not in ("checkpointing", "soup") and not refusal("checkpointing", key)]


# int8 activations are refused beside it: recomputed values would differ
@pytest.mark.parametrize("key", [None, *OTHERS, *(key for key in VARIANTS if key != "activations-int8")])
def test_the_run_is_the_same_to_the_bit(key):
    plain, found = (run_bare((recipe_of(key) if key else {}) | more, accumulate=2) for more in ({}, ROW))
    assert difference(plain.weights, found.weights) is None
    told = found.receipt["techniques"]["checkpointing"]
    # a dropout of 0 keeps nothing that could be dropped, nor does a norm that is folded or has only frozen layers below
    idle = told["never_recomputed"]
    # only codes per channel fold a batch norm
    folds = key and key.startswith(("qat", "lora")) and not key.endswith(("int4", "fp8", "pair", "xnor"))
    assert idle == (["norm", "dropout"] if folds else ["dropout"])
    assert told["recomputations_per_step"] == 2 * (3 - len(idle))
    assert told["recomputations"] == 8 * told["recomputations_per_step"]


def make(options, model):
    session, optimizer = begun_session({"checkpointing": options}, model, 2)
    return session, optimizer


def blocks(count=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)))


def test_a_policy_that_recomputed_nothing_is_an_error_in_the_first_step():
    model = blocks().eval()
    session, _ = make({"policy": "block"}, model)
    session.loss(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(TrainingError, match=r"policy block must recompute blocks in backward"):
        session.before_step()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.head = blocks(2), nn.Linear(4, 4)

    def forward(self, x, expert):
        return self.head(x if expert is None else self.experts[expert](x))


def route(session, optimizer, model, expert):
    plain_step(session, optimizer, model(torch.ones(2, 4), expert).sum())


def test_steps_that_reach_no_block_are_no_error_as_long_as_others_do():
    options = {"policy": "block", "include": ["experts.*"]}
    whole = Experts()
    session, optimizer = make(options, whole)
    route(session, optimizer, whole, None)
    with torch.no_grad():
        whole.eval()(torch.ones(2, 4), 0)  # a validation in between
        whole.train()
    route(session, optimizer, whole, 1)
    state = session.state_dict()
    session.finish()
    assert session.techniques["checkpointing"].report()["recomputations"] == 1

    resumed = Experts()
    again = Session({"checkpointing": options})
    again.attach(resumed)
    again.load_state_dict(state)
    second = torch.optim.SGD(resumed.parameters(), lr=0.1)
    again.begin([second], total_steps=4)
    route(again, second, resumed, None)
    assert again.state_dict()["techniques"]["checkpointing"]["recomputed"] is True
    assert again.techniques["checkpointing"].report()["recomputations"] == 1
    again.techniques["checkpointing"].finish(again.context)  # the saved run's recomputations count
    resumed = Experts().eval()
    again = Session({"checkpointing": options})
    again.attach(resumed)
    again.load_state_dict(state)
    again.begin([torch.optim.SGD(resumed.parameters(), lr=0.1)], total_steps=4)
    with pytest.raises(TrainingError, match=r"none was recomputed"):  # not what was reached and kept here
        route(again, second, resumed, 0)


def test_a_run_that_reached_no_block_is_an_error_at_its_end():
    model = Experts()
    session, optimizer = make({"policy": "block", "include": ["experts.*"]}, model)
    route(session, optimizer, model, None)
    with pytest.raises(TrainingError, match=r"none was recomputed"):
        session.finish()


def test_blocks_of_one_of_two_optimizers_are_looked_for_at_the_end():
    model = blocks().eval()
    session = Session({"checkpointing": {"policy": "block"}})
    session.attach(model)
    session.begin([torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1)], total_steps=1)
    model(torch.ones(2, 4)).sum().backward()
    session.before_step()
    session.after_step()
    with pytest.raises(TrainingError, match=r"none was recomputed"):
        session.finish()


def test_a_run_that_ends_leaves_the_model_and_the_receipt():
    model = blocks()
    session, optimizer = make({"policy": "sqrt"}, model)
    for _ in range(2):
        session.loss(model(torch.ones(2, 4)).sum()).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
    session.finish()
    assert not any("forward" in vars(module) for module in model.modules())
    told = session.receipt().values["techniques"]["checkpointing"]
    assert (told["policy"], told["blocks"], told["segments"]) == ("sqrt", 4, 2)
    assert (told["recomputations"], told["modules_recomputed"], told["never_recomputed"]) == (4, 8, [])
    assert told["saved_bytes"] == 2 * (2 * 4 * 4)  # one tanh inside each segment: inputs and what is handed on are held


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match=r"k .*policy=every_k"):
        Recipe.from_dict({"checkpointing": {"policy": "block", "k": 3}})
    with pytest.raises(ConfigError, match=r"a budget must be budget:<fraction below 1>"):
        Recipe.from_dict({"checkpointing": {"policy": "budget:much"}})
    with pytest.raises(ConfigError, match=r"got 'blocks'; did you mean 'block'"):
        Recipe.from_dict({"checkpointing": {"policy": "blocks"}})
    with pytest.raises(CompatibilityError, match="flush_every cannot be combined with checkpointing"):
        recipe = {"checkpointing": {"policy": "block"}, "loss_scale": {"kind": "dynamic", "flush_every": 2}}
        Session(recipe).attach(blocks())
    with pytest.raises(CompatibilityError, match="activations cannot be combined with a budget of checkpointing"):
        recipe = {"checkpointing": {"policy": "budget:0.5"}, "activations": {"pack": "exact"}}
        Session(recipe).attach(blocks())


def test_blocks_of_a_compiled_graph_are_uncounted_and_not_told_as_never_recomputed():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    session, _ = begun_session({"checkpointing": {"policy": "block"}}, net, 1)
    with session.forward():
        session.loss(torch.compile(net, backend="aot_eager")(torch.ones(2, 4)).sum()).backward()
    session.before_step()
    told = session.receipt()["techniques"]["checkpointing"]
    assert told["compiled"]
    assert told["uncounted"] == ["0", "1"]
    assert "never_recomputed" not in told
