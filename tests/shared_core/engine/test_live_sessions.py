"""One model, one session: a second one is refused while the first is on it, and welcome once it is not."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

from shared_core import Session
from shared_core.errors import TrainingError

PRUNE = {"prune": {"sparsity": 0.5}}
SHARE = {"cluster": {"bits": 2, "begin": 0, "min_size": 1}}
REFUSED = "Sequential already has a {} session with prune"


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def attached(model, recipe=PRUNE, **options):
    session = Session(recipe, **options)
    session.attach(model)
    return session


def begun(session, model):
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=4)
    return session


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_second_session_is_refused_on_the_model_its_parts_and_what_holds_it(has_begun):
    model = net()
    first = attached(model)
    if has_begun:
        begun(first, model)
    with pytest.raises(TrainingError, match=REFUSED.format("bare")):
        attached(model, SHARE)
    with pytest.raises(TrainingError, match="Linear already has"):
        attached(model[0], SHARE)
    with pytest.raises(TrainingError, match=REFUSED.format("bare")):
        attached(nn.Sequential(model, nn.Linear(4, 2)), SHARE, front_end="hf")
    first.attach(model)  # the session itself may ask twice
    attached(net(), SHARE)


@pytest.mark.parametrize("end", ["finish", "detach", "forget"])
def test_a_session_that_ended_frees_the_model(end):
    model = net()
    first = begun(attached(model), model)
    if end != "forget":
        getattr(first, end)()
        with pytest.raises(TrainingError, match="after the session was detached"):
            begun(first, model)
    del first
    gc.disable()
    try:
        attached(model, SHARE)
    finally:
        gc.enable()


def test_one_whose_techniques_did_not_fit_leaves_the_model_free():
    model = net()
    with pytest.raises(Exception, match="include pattern"):
        attached(model, {"prune": {"sparsity": 0.5, "include": ["none"]}})
    attached(model)


def test_copies_and_files_of_a_model_are_free():
    model = net()
    first = attached(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        attached(other)
    assert first.is_attached


def test_a_copy_of_a_session_gives_its_own_model_back():
    model = net()
    plain = [type(module) for module in model.modules()]
    first = begun(attached(model, {"qat": {"scheme": "int8"}}), model)
    other = copy.deepcopy(first)
    other.detach()
    assert [type(module) for module in other.context.model.modules()] == plain
    assert [type(module) for module in model.modules()] != plain
    first.detach()
    assert [type(module) for module in model.modules()] == plain


def test_a_trainers_session_that_has_not_begun_gives_way_and_comes_back():
    model = net()
    waiting = attached(model, front_end="hf")
    other = begun(attached(model, SHARE), model)
    with pytest.raises(TrainingError, match="already has"):
        waiting.attach(model)
    other.finish()
    waiting.attach(model)
    begun(waiting, model)
    with pytest.raises(TrainingError, match=REFUSED.format("hf")):
        attached(model, SHARE)
