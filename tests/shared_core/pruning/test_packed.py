"""Attention's packed projections and the weights of recurrent layers are pruned as matrices of their own."""

import copy
import json

import pytest
import torch
from plain_loop import plain_step
from torch import nn
from typer.testing import CliRunner

from shared_core import Session
from shared_core.cli import app
from shared_core.errors import CompatibilityError, MatchError
from shared_core.lottery_ticket import read_ticket
from shared_core.pruning import prune
from shared_core.pruning.scorers import observe_positions
from shared_core.tools.compression import compress, decompress

STEPS = 8
PRUNE = {"sparsity": 0.6, "begin": 1, "end": 6, "every": 2}


class Net(nn.Module):
    """One of each between a first and a last linear layer; batches first."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 8), nn.Linear(8, 3)
        if kind == "attention":
            self.body = nn.MultiheadAttention(8, 2, batch_first=True)
        elif kind == "cross":
            self.body = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)
        elif kind == "lstm":
            self.body = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
        elif kind == "projected":
            self.body = nn.LSTM(8, 6, bidirectional=True, proj_size=4, batch_first=True)
        elif kind == "gru":
            self.body = nn.GRU(8, 8, batch_first=True)
        elif kind == "rnn":
            self.body = nn.RNN(8, 8, batch_first=True)
        else:
            self.body = nn.LSTMCell(8, 8) if kind == "cell" else nn.GRUCell(8, 8)

    def forward(self, x):
        y = self.first(x)
        if self.kind in ("attention", "cross"):
            y = self.body(y, *([y, y] if self.kind == "attention" else [x, x]))[0]
        elif "cell" in self.kind:
            y = y[:, 0]
            y = self.body(y) if self.kind == "gru cell" else self.body(y)[0]
            y = y[:, None]
        else:
            y = self.body(y)[0]
        return self.last(y[:, -1])


PACKED = {
    "attention": ["in_proj_weight"],
    "cross": ["q_proj_weight", "k_proj_weight", "v_proj_weight"],
    "lstm": ["weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1"],
    "projected": [f"weight_{part}_l0{way}" for way in ("", "_reverse") for part in ("ih", "hh", "hr")],
    "gru": ["weight_ih_l0", "weight_hh_l0"],
    "rnn": ["weight_ih_l0", "weight_hh_l0"],
    "cell": ["weight_ih", "weight_hh"],
    "gru cell": ["weight_ih", "weight_hh"],
}


def make_net(kind):
    torch.manual_seed(0)
    return Net(kind)


def batch(step):
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(step))


def loss_of(net, step):
    x = batch(step)
    return nn.functional.cross_entropy(net(x), (x[:, -1, 0] > 0).long())


def train(net, options, *, steps=STEPS, stop=None, state=None):
    """Train and return (optimizer, session, the state at step `stop`)."""
    session = Session({"prune": options})
    session.attach(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)
    if state is not None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=steps)
    kept = None
    for step in range(session.step, steps):
        torch.manual_seed(step)  # of dropout
        session.loss(loss_of(net, step)).backward()
        session.before_step()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()
        if session.step == stop:
            one = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
            kept = copy.deepcopy(one)
    session.finish()
    return session, kept


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_pruned_and_a_resumed_run_ends_alike(kind):
    net, again = make_net(kind), make_net(kind)
    session, state = train(net, PRUNE | {"scope": "local"}, stop=4)
    report = session.receipt()["techniques"]["prune"]
    pruned = {entry["name"]: entry for entry in report["tensors"]}
    assert {f"body.{name}" for name in PACKED[kind]} <= pruned.keys()
    assert session.coverage["prune"].share == 1
    weights = dict(net.named_parameters())
    for name, entry in pruned.items():
        assert entry["pruned"] == round(0.6 * entry["numel"]) == int((weights[name] == 0).sum()), name
    if isinstance(net.body, nn.RNNBase):  # what cuDNN and oneDNN are given are these very parameters
        assert all(one is weights[f"body.{name}"] for one, name in zip(
            net.body._flat_weights, net.body._flat_weights_names, strict=True))  # fmt: skip
    train(again, PRUNE | {"scope": "local"}, state=state)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in net.state_dict().items())
    make_net(kind).load_state_dict(net.state_dict())


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_n_of_m_lies_along_the_inputs(kind):
    net = make_net(kind)
    train(net, {"sparsity": 0.5, "granularity": "n_m", "schedule": "one_shot", "begin": 2, "sr_ste": 2e-4, "every": 1})
    for name in PACKED[kind]:
        weight = getattr(net.body, name)
        assert ((weight.view(len(weight), -1, 4) != 0).sum(-1) == 2).all()


@pytest.mark.parametrize(
    "options",
    [
        {"criterion": "taylor"},
        {"criterion": "movement"},
        {"cost": "energy", "criterion": "taylor"},
        {"granularity": "block", "block": "2x2"},
        {"dynamic": "rigl", "schedule": "one_shot"},
        {"regularizer": "group_lasso"},
        {"regularizer": "weight_decay"},
    ],
    ids=str,
)
def test_every_way_of_pruning_weights_takes_them(options):
    net = make_net("gru")
    session, state = train(net, PRUNE | options, stop=4)
    report = session.receipt()["techniques"]["prune"]
    assert report["left_out"] == {}
    assert report["pruned"] >= round(0.6 * report["numel"]) - 2
    again = make_net("gru")
    train(again, PRUNE | options, state=state)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("options", [{"criterion": "wanda"}, {"criterion": "fisher"}, {"granularity": "neuron"}])
def test_what_looks_at_layers_names_those_it_leaves_out(options):
    with pytest.raises(MatchError, match=r"got 12\.7 %; left as they are: 87\.3 % in 2 of GRU \(GRU "):
        train(make_net("gru"), PRUNE | options)
    with pytest.raises(CompatibilityError, match=r"include must name layers that can be pruned, got body: GRU"):
        train(make_net("gru"), PRUNE | options | {"include": ["body"]})


def test_an_include_of_one_layer_and_min_size_choose_matrices():
    net = make_net("attention")
    session, _ = train(net, PRUNE | {"include": ["body"]})
    assert [entry["name"] for entry in session.receipt()["techniques"]["prune"]["tensors"]] == ["body.in_proj_weight"]
    session, _ = train(make_net("projected"), PRUNE | {"min_size": 100})
    assert {entry["name"].rpartition("_l0")[0] for entry in session.receipt()["techniques"]["prune"]["tensors"]} == {
        "body.weight_ih"
    }


def test_positions_of_recurrent_steps_and_of_attention_are_counted():
    lstm, cross = nn.LSTM(3, 4), nn.MultiheadAttention(4, 2, kdim=3, vdim=3)
    weights = {"weight_ih_l0": lstm, "q_proj_weight": cross, "k_proj_weight": cross}
    both = nn.ModuleList([lstm, cross])
    both.forward = lambda: cross(lstm(torch.ones(7, 2, 3))[0], torch.ones(5, 2, 3), value=torch.ones(5, 2, 3))
    with observe_positions(both, weights) as positions:
        both()
    assert positions == {"weight_ih_l0": 7, "q_proj_weight": 7, "k_proj_weight": 5}
    packed = nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    with observe_positions(lstm, {"weight_hh_l0": lstm}) as positions:
        lstm(packed)
    assert positions == {"weight_hh_l0": 3}
    cell = nn.GRUCell(2, 2)
    with observe_positions(cell, {"weight_hh": cell}) as positions:
        cell(torch.ones(5, 2))
    assert positions == {"weight_hh": 1}


def test_a_trained_model_is_pruned_without_its_dropout(tmp_path):
    net = make_net("lstm").train()
    loss = lambda model, x: nn.functional.cross_entropy(model(x), (x[:, -1, 0] > 0).long())  # noqa: E731
    masks = [
        prune(copy.deepcopy(net), {"sparsity": 0.5, "criterion": "taylor"}, [batch(0)], loss=loss).masks
        for _ in range(2)
    ]
    assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())
    assert "body.weight_hh_l1" in masks[0]
    assert net.body.dropout == 0.3
    prune(net, {"sparsity": 0.5})
    compress(net.state_dict(), tmp_path / "net.eff", bits=8, min_size=16)
    back = decompress(tmp_path / "net.eff")
    assert all(torch.equal(value == 0, back[name] == 0) for name, value in net.state_dict().items())


def test_the_command_prunes_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recurrent_nets.py").write_text("from torch import nn\n\ndef build():\n    return nn.GRU(4, 4)\n")
    out = tmp_path / "out"
    arguments = ["prune", "recurrent_nets:build", "--out", str(out), "--sparsity", "0.5", "--json"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["pruned"] == 48


def test_a_ticket_holds_them(tmp_path):
    def once(session):
        net = make_net("gru")
        session.attach(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.begin([optimizer], total_steps=4)
        for step in range(4):
            plain_step(session, optimizer, loss_of(net, step))
        session.finish()

    out = tmp_path / "round"
    once(Session({"lottery": {"out": str(out), "rate": 0.5}}))
    (path,) = out.glob("*.safetensors")
    masks = read_ticket(path).masks
    assert {"body.weight_ih_l0", "body.weight_hh_l0"} <= masks.keys()
    assert not masks["body.weight_hh_l0"].all()
