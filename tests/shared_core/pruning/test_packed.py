"""Packed projections of attention, weights of recurrent layers and stacked experts: matrices pruned by themselves."""

import copy
import json

import pytest
import torch
from mixtures import KINDS, fit, losses, mixture, rows, stacks
from plain_loop import plain_step, update
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from shared_core import Recipe, Session
from shared_core.cli import app
from shared_core.errors import CompatibilityError, MatchError
from shared_core.lottery_ticket import read_ticket
from shared_core.modules.matching import expert_weights
from shared_core.modules.weight_views import input_axis, output_axis
from shared_core.pruning import prune
from shared_core.pruning.regularizers import add_group_lasso_gradient_
from shared_core.pruning.scorers import observe_positions
from shared_core.tools.compression import compress, decompress

STEPS = 8
PRUNE = {"sparsity": 0.6, "begin": 1, "end": 6, "every": 2}


BODIES = {
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "cross": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True),
    "projected": lambda: nn.LSTM(8, 6, bidirectional=True, proj_size=4, batch_first=True),
    "gru": lambda: nn.GRU(8, 8, batch_first=True),
    "rnn": lambda: nn.RNN(8, 8, batch_first=True),
    "cell": lambda: nn.LSTMCell(8, 8),
    "gru cell": lambda: nn.GRUCell(8, 8),
}


class Net(nn.Module):
    """One of each between a first and a last linear layer; batches first."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last, self.body = kind, nn.Linear(4, 8), nn.Linear(8, 3), BODIES[kind]()

    def forward(self, x):
        y = self.first(x)
        if "cell" in self.kind:
            y = self.body(y[:, 0])
            return self.last(y if self.kind == "gru cell" else y[0])
        others = {"attention": [y, y], "cross": [x, x]}.get(self.kind, [])
        return self.last(self.body(y, *others)[0][:, -1])


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
        update(session, optimizer, lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
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
    with pytest.raises(MatchError, match=r"only 12\.7 % .*; unchanged: 87\.3 % in 2 GRU \(GRU "):
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


EXPERTS = {"sparsity": 0.5, "begin": 1, "end": 6, "every": 2}
UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def train_experts(kind, options, folder, resume=None):
    return fit(kind, {"prune": {**EXPERTS, **options}}, folder, resume)


def shares(model):
    """The sparsity of each expert's matrix, by parameter."""
    return {name: (weight == 0).float().mean((1, 2)).tolist() for name, weight in stacks(model).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_prunes_experts_saves_their_zeros_and_resumes_exactly(kind, tmp_path):
    whole = train_experts(kind, {}, tmp_path / "whole")
    assert losses(whole)[-1] < losses(whole)[0]
    again = train_experts(kind, {}, tmp_path / "again", resume=tmp_path / "whole" / "checkpoint-4")
    state, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in state.items())
    whole.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    # transformers takes Mixtral's and Qwen's apart into one tensor an expert
    zeros = sum(int((value == 0).sum()) for name, value in saved.items() if "experts" in name and "bias" not in name)
    assert zeros == sum(int((weight == 0).sum()) for weight in stacks(whole.model).values()) > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("criterion", ["magnitude", "taylor", "random", "movement"])
@pytest.mark.parametrize("kind", KINDS)
def test_local_scope_takes_the_same_share_of_every_expert(kind, criterion, tmp_path):
    trained = train_experts(kind, {"criterion": criterion, "scope": "local"}, tmp_path)
    assert {share for found in shares(trained.model).values() for share in found} == {0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_is_ranked_and_limited_by_itself(kind):
    net = mixture(kind)
    stack = dict(net.named_parameters())[UP]
    with torch.no_grad():
        stack[1] *= 1e-3  # under one threshold it goes first
    report = prune(net, {"sparsity": 0.5, "max_layer_sparsity": 0.75})
    assert shares(net)[UP][1] == 0.75
    assert report.capped == [f"{UP}[1]"]
    entry = next(entry for entry in report.tensors if entry["name"] == UP)
    assert entry["experts"] == [int((matrix == 0).sum()) for matrix in stack]
    assert sum(entry["experts"]) == entry["pruned"]
    assert report.pruned == round(0.5 * report.numel)


@pytest.mark.parametrize("kind", KINDS)
def test_n_of_m_lies_along_the_inputs_of_each_expert(kind):
    net = mixture(kind)
    prune(net, {"sparsity": 0.5, "granularity": "n_m"})
    for weight in stacks(net).values():
        assert (weight.unflatten(2, (-1, 4)) != 0).sum(-1).eq(2).all()


def test_tiles_are_outputs_times_inputs_in_either_layout():
    dense, turned = mixture("qwen3_moe"), mixture("gpt_oss", intermediate_size=8)
    for name, weight in stacks(turned).items():
        weight.copy_(dict(dense.named_parameters())[name].detach())
    for net in (dense, turned):
        prune(net, {"sparsity": 0.5, "granularity": "block", "block": "4x2", "include": ["*.experts"]})
    assert all(torch.equal(weight, stacks(turned)[name]) for name, weight in stacks(dense).items())
    assert all((weight.unflatten(2, (-1, 2)).unflatten(1, (-1, 4)) == 0).float().mean((2, 4)).unique().numel() == 2
               for weight in stacks(dense).values())  # fmt: skip


def test_patterns_name_a_stack_by_the_module_or_the_parameter():
    net = mixture("mixtral")
    prune(
        net, {"sparsity": 0.5, "scope": "local", "overrides": {"*.experts": {"sparsity": 0.25}, DOWN: {"sparsity": 0}}}
    )
    assert (shares(net)[UP], shares(net)[DOWN]) == ([0.25] * 4, [0.0] * 4)
    report = prune(mixture("mixtral"), {"sparsity": 0.5, "include": ["*.gate_up_proj"]})
    assert [entry["name"] for entry in report.tensors] == [UP]
    assert report.left_out[DOWN] == "left out by include, skip or min_size"
    assert UP not in {entry["name"] for entry in prune(mixture("mixtral"), {"sparsity": 0.5, "skip": [UP]}).tensors}


def test_rigl_moves_weights_within_each_expert(tmp_path):
    options = {"dynamic": "rigl", "schedule": "one_shot", "scope": "local"}
    trained = train_experts("mixtral", options, tmp_path)
    assert {share for found in shares(trained.model).values() for share in found} == {0.5}


@pytest.mark.parametrize(
    "option", [{"criterion": "wanda"}, {"criterion": "fisher"}, {"cost": "flops"}, {"granularity": "filter"}]
)
def test_what_needs_an_experts_inputs_is_refused(option):
    with pytest.raises(MatchError, match=r"MixtralExperts \(MixtralExperts (multiplies each expert's|has packed)"):
        Session({"prune": {"sparsity": 0.5, **option}}).attach(mixture("mixtral"))
    with pytest.raises(CompatibilityError, match=r"got model\.layers\.0\.mlp\.experts: MixtralExperts"):
        prune(mixture("mixtral"), {"sparsity": 0.5, "include": [UP], **option}, rows(1))


def test_a_refusal_gives_each_reason_once_rare_ones_first():
    recipe = Recipe.from_dict({"prune": {"sparsity": 0.5, "criterion": "fisher", "include": ["*.experts*"]}})
    with pytest.raises(MatchError) as caught:
        Session(recipe).attach(mixture("mixtral"))
    told = str(caught.value)
    assert told.count("left out by include") == told.count("multiplies each expert's") == 1
    assert told.index("multiplies each expert's") < told.index("left out by include")


def test_group_lasso_pulls_at_the_outputs_of_each_expert():
    stacked = torch.randn(3, 4, 5)
    together = torch.zeros_like(stacked)
    add_group_lasso_gradient_(together, stacked, 0.1, axis=(0, 1))
    for expert in range(3):
        alone = torch.zeros(4, 5)
        add_group_lasso_gradient_(alone, stacked[expert], 0.1, axis=0)
        assert torch.equal(together[expert], alone)


class Undecorated(nn.Module):
    """As Llama 4 has them: sizes alone tell the layout."""

    def __init__(self, up, down):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.ones(2, *size)) for size in (up, down))


def test_the_layout_is_told_by_the_module_or_its_sizes():
    for kind, axis in (("mixtral", 1), ("qwen3_moe", 1), ("gpt_oss", 2)):
        experts = mixture(kind).model.layers[0].mlp.experts
        assert list(expert_weights(experts)) == ["gate_up_proj", "down_proj"]
        assert (output_axis(experts), input_axis(experts)) == (axis, 3 - axis)
    assert output_axis(Undecorated((16, 6), (6, 8))) == 1
    assert output_axis(Undecorated((6, 16), (8, 6))) == 2
    assert not expert_weights(Undecorated((6, 16), (4, 6)))
    assert not expert_weights(nn.Conv1d(2, 2, 2))
