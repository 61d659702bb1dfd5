"""Adapters on transformers' Conv1D, stacked experts and attention: as on linear layers, and as peft adds them."""

import copy
import json
import pickle

import pytest
import torch
from mixtures import KINDS, fit, losses, mixture, rows, stacks
from peft import LoraConfig, get_peft_model
from plain_loop import plain_step
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from shared_core import Session
from shared_core.errors import CompatibilityError, MatchError
from shared_core.lora.adapters import adapters
from shared_core.quantization import convert

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

STEPS = 4
RECIPES = {
    "none": {"lora": {"base": "none", "save": "merged", "rank": 3}},
    "nf4": {"lora": {"base": "nf4", "save": "merged", "rank": 3}},
    "int8": {"lora": {"base": "int8", "save": "merged", "rank": 3}},
    "requantize": {"lora": {"base": "nf4", "save": "merged", "rank": 3, "requantize": True}},
    "qat": {"lora": {"save": "merged", "rank": 3}, "qat": {"scheme": "int8", "begin": 1}},
}


def twins():
    """Return the same net of Conv1D and of Linear layers."""
    torch.manual_seed(0)
    ours = nn.Sequential(Conv1D(128, 64), nn.GELU(), Conv1D(64, 128), nn.Linear(64, 4))
    stock = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 4))
    for one, other in zip(ours[::2], stock[::2], strict=True):
        other.load_state_dict({"weight": one.weight.detach().t(), "bias": one.bias.detach()})
    stock[3].load_state_dict(ours[3].state_dict())
    return ours, stock


def session_of(net, recipe):
    session = Session(copy.deepcopy(recipe))
    session.attach(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    return session, optimizer


def train(session, optimizer, net, steps=range(STEPS)):
    session.begin([optimizer], total_steps=STEPS)
    assert not [note for note in session.notes if "unchanged" in note]
    batches = torch.randn(STEPS, 6, 64, generator=torch.Generator().manual_seed(1))
    for step in steps:
        with session.forward():
            session.loss(net(batches[step]).square().mean()).backward()
        plain_step(session, optimizer)


@pytest.mark.parametrize("key", RECIPES)
def test_it_trains_merges_and_is_left_as_the_linear_layer_that_it_is(key):
    ends, told = [], []
    for net in twins():
        torch.manual_seed(2)
        session, optimizer = session_of(net, RECIPES[key])
        train(session, optimizer, net)
        session.finish()
        ends.append(net)
        told.append(session.receipt().values["techniques"]["lora"])
    ours, stock = ends
    assert type(ours[0]) is type(ours[2]) is Conv1D
    assert told[0]["layers"] == told[1]["layers"] == 2
    assert told[0]["adapter_parameters"] == told[1]["adapter_parameters"]
    before, _ = twins()
    for index in (0, 2):
        assert not torch.equal(ours[index].weight, before[index].weight)
        torch.testing.assert_close(ours[index].weight.t(), stock[index].weight, atol=1e-5, rtol=1e-4)
    if key == "qat":
        x = torch.randn(5, 64)
        torch.testing.assert_close(convert(ours)(x), convert(stock)(x), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("key", ["none", "nf4", "int8"])
def test_state_dicts_are_plain_and_a_resumed_run_is_the_one_that_never_stopped(key):
    net, _ = twins()
    session, optimizer = session_of(net, RECIPES[key])
    train(session, optimizer, net, range(2))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), session.state_dict()))
    plain, _ = twins()
    plain.load_state_dict(session.files.bake(saved[0]))
    x = torch.randn(5, 64)
    torch.testing.assert_close(plain(x), net(x), atol=1e-2, rtol=1e-2)
    for step in range(2, STEPS):
        train_on = torch.randn(STEPS, 6, 64, generator=torch.Generator().manual_seed(1))[step]
        plain_step(session, optimizer, net(train_on).square().mean())
    session.finish()
    again, _ = twins()
    session, optimizer = session_of(again, RECIPES[key])
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    session.load_state_dict(saved[2])
    train(session, optimizer, again, range(2, STEPS))
    session.finish()
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), again.parameters(), strict=True))


EXPERTS = "model.layers.0.mlp.experts"
STACKS = [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]
IDS = torch.stack([row["input_ids"] for row in rows(2)])
EXPERT_LORA = {"rank": 2, "save": "merged"}


def attached(net, **options):
    session = Session({"lora": {**EXPERT_LORA, **options}, "allow_partial": True})
    session.attach(net)
    return session, session.techniques["lora"]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_has_factors_of_its_own_and_computes_as_pefts_parameters_do(kind, implementation):
    net, other = mixture(kind), mixture(kind)
    for model in (net, other):
        model.set_experts_implementation(implementation)
    plain = [*net.state_dict()]
    session, lora = attached(net, include=("*.experts",))
    assert list(lora.layers) == STACKS
    assert {name for name, one in net.named_parameters() if one.requires_grad} == {
        f"{EXPERTS}.lora_{stack}.{factor}" for stack in ("gate_up_proj", "down_proj") for factor in "AB"
    }
    theirs = get_peft_model(
        other,
        LoraConfig(
            r=2,
            lora_alpha=32,
            target_modules=[],
            target_parameters=[name.removeprefix("model.layers.0.") for name in STACKS],
        ),
    )
    wrapped = {module.parameter_name: module for module in theirs.modules() if hasattr(module, "parameter_name")}
    with torch.no_grad():
        for name, layer in lora.layers.items():
            a, b = adapters(layer)
            b.normal_()
            mine = wrapped[name.rpartition(".")[2]]
            mine.lora_A["default"].weight.copy_(a.flatten(0, 1))
            mine.lora_B["default"].weight.copy_(b.permute(1, 2, 0).flatten(1))
    found, expected = net(IDS, labels=IDS), theirs(IDS, labels=IDS)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    found.loss.backward()
    expected.loss.backward()
    for name, layer in lora.layers.items():
        mine = wrapped[name.rpartition(".")[2]]
        torch.testing.assert_close(adapters(layer)[0].grad.flatten(0, 1), mine.lora_A["default"].weight.grad)
    state = net.state_dict()
    assert [*state] == plain
    merged = mixture(kind)
    merged.load_state_dict(state)
    torch.testing.assert_close(merged(IDS).logits, found.logits, rtol=1e-4, atol=1e-5)
    net.load_state_dict(state)  # a merged stack becomes the base
    assert not any(adapters(layer)[1].any() for layer in lora.layers.values())
    session.detach()
    assert type(net.get_submodule(EXPERTS)) is type(merged.get_submodule(EXPERTS))
    assert [*net.state_dict()] == plain == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize("recipe", [{}, {"qat": {"scheme": "int8_dynamic", "begin": 2}}], ids=["alone", "qat"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_adapters_alone_saves_merged_stacks_and_resumes_exactly(kind, recipe, tmp_path):
    recipe = {"lora": EXPERT_LORA} | recipe
    whole = fit(kind, recipe, tmp_path / "whole")
    assert losses(whole)[-1] < losses(whole)[0]
    again = fit(kind, recipe, tmp_path / "again", tmp_path / "whole" / "checkpoint-4")
    state, start = whole.model.state_dict(), mixture(kind)
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in state.items())
    assert type(whole.model.get_submodule(EXPERTS)) is type(start.get_submodule(EXPERTS))
    receipt = json.loads((tmp_path / "whole" / "eff_receipt.json").read_text())
    told = {layer["name"]: layer["adapter_size"] for layer in receipt["techniques"]["lora"]["per_layer"]}
    assert all(told[name] > 0 for name in STACKS)
    for name, weight in stacks(whole.model).items():
        change = weight - stacks(start)[name]
        if not recipe.get("qat"):
            assert all(torch.linalg.matrix_rank(each, rtol=1e-4) <= 2 for each in change)
        else:
            codes = weight / (weight.abs().amax(2, keepdim=True) / 127)
            torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-3)
    whole.save_model(str(tmp_path / "saved"))
    for folder in ("saved", "whole/checkpoint-4"):
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values())
        if folder == "saved":
            assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def test_what_is_left_is_told(capsys):
    session, lora = attached(mixture("mixtral"), include=("*.down_proj",))
    assert list(lora.layers) == STACKS[1:]
    session.detach()
    with pytest.raises(MatchError, match=r"at least 50% is required.*dropout cannot act on"):
        Session({"lora": {**EXPERT_LORA, "dropout": 0.1}}).attach(mixture("mixtral"))
    with pytest.raises(CompatibilityError, match=r"include must name .* got .*: dropout cannot act on the inputs of"):
        attached(mixture("mixtral"), include=tuple(STACKS), dropout=0.1)
    attached(mixture("mixtral"), base="nf4")
    assert "base nf4 applies to linear layers only" in capsys.readouterr().out


class Attentive(nn.Module):
    """Attention to itself, to a memory, and with separate weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 1)
        self.memory = nn.MultiheadAttention(16, 2, batch_first=True)
        self.separate = nn.MultiheadAttention(16, 2, kdim=8, vdim=8, batch_first=True)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        y = self.memory(x, (m := self.encode(x)), m)[0]
        return self.out(self.separate(y, x[..., :8], x[..., :8])[0])


PACKED = [
    "encode.layers.0.self_attn.in_proj_weight", "memory.in_proj_weight",
    *(f"separate.{letter}_proj_weight" for letter in "qkv"),
]  # fmt: skip


def test_attention_computes_as_with_merged_weights_in_training_and_evaluation():
    net, merged = Attentive(), Attentive()
    session, lora = attached(net)
    projections = {"encode.layers.0.self_attn.out_proj", "memory.out_proj", "separate.out_proj"}
    assert {*PACKED} | projections < lora.layers.keys()
    for layer in lora.layers.values():
        nn.init.normal_(adapters(layer)[1])
    weight, (a, b) = merged.memory.in_proj_weight.detach(), adapters(lora.layers["memory.in_proj_weight"])
    state = net.state_dict()
    torch.testing.assert_close(state["memory.in_proj_weight"], weight + 32 / 2 * b[0] @ a[0])
    assert [*state] == [*merged.state_dict()]
    merged.load_state_dict(state)
    x = torch.randn(3, 5, 16)
    for mode in (True, False):  # torch's fused evaluation would read the frozen weights
        torch.testing.assert_close(net.train(mode)(x), merged.train(mode)(x), rtol=1e-3, atol=1e-4)
    net(x).square().mean().backward()
    assert all(bool(one.grad.any()) for name in PACKED for one in adapters(lora.layers[name]))
    session.detach()
    assert type(net.memory) is nn.MultiheadAttention
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in merged.named_parameters()]


@pytest.mark.parametrize("recipe", [{}, {"qat": {"scheme": "int8_weight"}}], ids=["alone", "qat"])
def test_attention_trains_adapters_alone_and_resumes_exactly(recipe):
    def run(net, steps, state=None):
        session = Session({"lora": EXPERT_LORA, "allow_partial": True} | recipe)
        session.attach(net)
        optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=0.02)
        if state is not None:
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
            session.load_state_dict(state["session"])
        session.begin([optimizer], total_steps=6)
        for step in range(session.step, steps):
            x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(step))
            plain_step(session, optimizer, net(x).square().mean())
        return session, optimizer

    whole, first, second, start = Attentive(), Attentive(), Attentive(), Attentive()
    session, _ = run(whole, 6)
    session.finish()
    for name in PACKED:
        change = whole.get_parameter(name) - start.get_parameter(name)
        assert torch.linalg.matrix_rank(change.detach(), rtol=1e-3) == 2, name
    assert torch.equal(whole.memory.in_proj_bias, start.memory.in_proj_bias)
    if recipe:  # qat leaves what has adapters of its own, by name
        assert "AdaptedMultiheadAttention has a forward" in session.techniques["qat"].left_out["memory"]
    one, optimizer = run(first, 4)
    x = torch.randn(3, 5, 16)
    assert torch.equal(pickle.loads(pickle.dumps(first))(x), first(x))
    state = {"net": first.state_dict(), "optimizer": optimizer.state_dict(), "session": one.state_dict()}
    resumed, _ = run(second, 6, copy.deepcopy(state))
    resumed.finish()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items())
