"""A session's state that anybody may have changed: it is taken back, or one error of ours says which part is wrong."""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_loop import plain_step
from safetensors.torch import save_file
from torch import nn

from shared_core import Session
from shared_core.engine.saving.state_file import STATE_FILE, load_state
from shared_core.errors import CheckpointError

RECIPES = {
    "prune": {"sparsity": 0.5, "begin": 1, "end": 3},
    "qat": {"scheme": "int8", "skip": []},
    "average": {"kind": "ema"},
    "loss_scale": {"kind": "dynamic"},
    "low_rank": {"rank": 2, "min_size": 1, "skip": []},
    "cluster": {"bits": 2, "begin": 1, "min_size": 1, "skip": []},
    "distill": {"teacher": "ema"},
}
WRONG = st.sampled_from([
    None, True, -1, 2**70, math.inf, math.nan, "", "x" * 9, [], [1, "a"], {}, {"a": {}},
    torch.zeros(0), torch.full((3, 7), math.nan), torch.ones(1, dtype=torch.int8),
])  # fmt: skip
"""What a value becomes: of another type, or of the same and impossible."""


def begun(key, state=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    session = Session({key: RECIPES[key]})
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if state is not None:
        session.load_state_dict(state)
    session.begin([optimizer], total_steps=6)
    return session, model, optimizer


def state_of(key):
    session, model, optimizer = begun(key)
    for _ in range(0 if key == "loss_scale" else 3):  # whose scaler would step the optimizer
        output = model(torch.randn(5, 8))
        plain_step(session, optimizer, output.square().mean())
    state = session.state_dict()
    session.detach()
    return state


def places(value, path=()):
    """Return the path of everything in a state."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [path, *(found for name, each in inside for found in places(each, (*path, name)))]


def damaged(state, path, wrong, how):
    state = copy.deepcopy(state)
    if not path:
        return wrong
    *parents, last = path
    home = state
    for name in parents:
        home = home[name]
    if isinstance(home, tuple):
        return damaged(state, tuple(parents), wrong, how)
    if how == "gone":
        del home[last]
    elif how == "list":
        home[last] = [home[last]]
    else:
        home[last] = wrong
    return state


@pytest.mark.parametrize("key", RECIPES)
def test_any_value_of_a_state_may_be_wrong(key):
    whole = state_of(key)
    begun(key, whole)[0].detach()
    refused = []

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(places(whole)), WRONG, st.sampled_from(["gone", "list", "other", "other"]))
    def tried(path, wrong, how):
        session = None
        try:
            session, *_ = begun(key, damaged(whole, path, wrong, how))
        except CheckpointError as error:
            refused.append(str(error))
        finally:
            if session is not None:
                session.detach()

    tried()
    with pytest.raises(CheckpointError, match="state of session"):
        begun(key, whole | {"techniques": ""})
    assert any("session" in told for told in refused)
    assert any(told.startswith(f"{key}") or f"state of {key}:" in told for told in refused)


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, None, [], "three"])
def test_the_first_error_stays_the_cause(value):
    state = {**state_of("prune"), "step": value}
    with pytest.raises(CheckpointError, match="cannot read the checkpoint's state of session") as error:
        begun("prune", state)
    cause = error.value.__cause__
    assert cause is not None
    assert repr(cause) in str(error.value)


@pytest.mark.parametrize("tree", ["5", "null", '"step"', "[1]", "true"])
def test_a_state_file_holds_an_object(tree, tmp_path):
    save_file({}, tmp_path / STATE_FILE, metadata={"eff_format": "1", "state": tree})
    with pytest.raises(CheckpointError, match=r"cannot read .*damaged"):
        load_state(tmp_path)
