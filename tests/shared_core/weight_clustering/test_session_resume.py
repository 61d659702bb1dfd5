"""A run with shared weights that stops, early or not: exact resume, its state, the states that are refused."""

import copy

import pytest
import torch
from share_runs import make_net, make_session, train
from torch import nn

from shared_core import Session
from shared_core.errors import CheckpointError


@pytest.mark.parametrize("stop", [0, 5, 9, 10, 11, 25, 39])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_is_the_same_to_the_bit(stop, optimizer):
    prune = {"sparsity": 0.5, "begin": 2, "end": 8, "every": 2}
    whole = make_net()
    session, opt = make_session(whole, optimizer, prune=prune)
    train(session, opt, whole, range(40))
    session.finish()

    first = make_net()
    session, opt = make_session(first, optimizer, prune=prune)
    train(session, opt, first, range(stop))
    state = copy.deepcopy({"session": session.state_dict(), "optimizer": opt.state_dict(), "model": first.state_dict()})
    second = make_net(seed=1)
    second.load_state_dict(state["model"])
    session, opt = make_session(second, optimizer, state=state, prune=prune)
    train(session, opt, second, range(stop, 40))
    session.finish()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name
    assert session.receipt().values["techniques"]["cluster"]["clustered_at_step"] == 10


def test_the_state_fits_a_state_file(tmp_path):
    from shared_core.engine.saving.state_file import load_state, save_state

    model = make_net()
    session, opt = make_session(model, bits=8, bits_of=["0=2"])
    train(session, opt, model, range(12))
    save_state(tmp_path, session.state_dict())
    back = load_state(tmp_path)["techniques"]["cluster"]
    for name, codes in session.state_dict()["techniques"]["cluster"]["codes"].items():
        assert torch.equal(back["codes"][name], codes)


@pytest.mark.parametrize("spoil", [
    lambda codes: {"other.weight": codes["0.weight"]},
    lambda codes: {**codes, "0.weight": codes["0.weight"].t()},
    lambda codes: {**codes, "0.weight": codes["0.weight"].float()},
    lambda codes: {**codes, "0.weight": codes["0.weight"].to(torch.int16) * 100},
    lambda codes: {**codes, "0.weight": -codes["0.weight"].to(torch.int16)},
])  # fmt: skip
def test_clusters_of_another_model_are_refused(spoil):
    model = make_net()
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    state = copy.deepcopy(session.state_dict())
    state["techniques"]["cluster"]["codes"] = spoil(state["techniques"]["cluster"]["codes"])
    other = Session(session.recipe)
    other.attach(make_net())
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"cluster: saved clusters must .* this model's weights"):
        other.begin([], total_steps=20)


def test_a_cluster_without_members_is_refused():
    model = make_net()
    session, opt = make_session(model)
    train(session, opt, model, range(12))
    state = copy.deepcopy(session.state_dict())
    codes = state["techniques"]["cluster"]["codes"]["0.weight"]
    codes[codes == 3] = 4
    with pytest.raises(CheckpointError, match=r"clusters of 0\.weight must have members"):
        make_session(make_net(), state={"session": state, "optimizer": opt.state_dict()})


class Packed(nn.Module):
    """Layers of torch that hold several weights."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.recurrent, self.cell = nn.LSTM(6, 16, bidirectional=True, batch_first=True), nn.RNNCell(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, kdim=6, vdim=6, batch_first=True)
        self.itself = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = x.view(-1, 2, 6)
        y = self.cell(self.recurrent(x)[0][:, -1]).unsqueeze(1)
        y = self.attention(y, x, x)[0]
        return self.itself(y, y, y)[0][:, 0, :4]


def test_each_weight_of_a_packed_layer_has_its_own_values_and_resumes():
    def run(model, steps, state=None):
        session, opt = make_session(model, "adamw", state=state, min_size=1)
        train(session, opt, model, steps)
        return session, opt

    whole, first, second = Packed(), Packed(), Packed(1)
    session, _ = run(whole, range(20))
    session.finish()
    assert session.coverage["cluster"].share == 1
    shared = {entry["name"]: entry["values"] for entry in session.receipt().values["techniques"]["cluster"]["tensors"]}
    assert {f"recurrent.weight_{part}_l0{end}" for part in ("ih", "hh") for end in ("", "_reverse")} < shared.keys()
    assert {"cell.weight_hh", "attention.q_proj_weight", "itself.in_proj_weight"} < shared.keys()
    for name, values in shared.items():
        assert len(whole.get_parameter(name).unique()) == values == 8, name

    one, opt = run(first, range(15))
    state = copy.deepcopy({"session": one.state_dict(), "optimizer": opt.state_dict()})
    second.load_state_dict(first.state_dict())
    resumed, _ = run(second, range(15, 20), state)
    resumed.finish()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items())
