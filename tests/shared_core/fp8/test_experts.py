"""Stacked experts multiply in FP8 expert by expert, as linear layers of their weights do."""

import json

import pytest
import torch
from mixtures import KINDS, fit, losses, mixture, rows, stacks
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError, MatchError
from shared_core.fp8 import Fp8Config, convert_to_fp8
from shared_core.fp8.layers import PRODUCTS

EXPERTS = "model.layers.0.mlp.experts"
IDS = torch.stack([row["input_ids"] for row in rows(2)])
SIZES = {"intermediate_size": 32, "moe_intermediate_size": 16}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_multiplies_as_a_linear_layer_of_its_own(kind, recipe):
    config = Fp8Config(recipe=recipe, include=(EXPERTS,))
    net, stock = mixture(kind, **SIZES), mixture(kind, **SIZES).get_submodule(EXPERTS)
    experts = convert_to_fp8(net, config).get_submodule(EXPERTS)
    tokens, shares = torch.randn(6, 16, requires_grad=True), torch.rand(6, 2)
    index = torch.tensor([[0, 2], [1, 0], [2, 0], [0, 1], [1, 2], [2, 1]])  # none for the last expert
    experts(tokens, index, shares).square().sum().backward()
    layers = {}
    for name, weight in stacks(mixture(kind, **SIZES)).items():
        stack, _, _ = name.rpartition(".")[2].partition("[")
        for expert, matrix in enumerate(weight):
            layers[stack, expert] = layer = nn.Linear(*matrix.T.shape, bias=kind == "gpt_oss")
            layer.weight.data = matrix.clone()
            if kind == "gpt_oss":
                layer.bias.data = getattr(stock, f"{stack}_bias")[expert].detach().clone()
    parts = nn.ModuleList([nn.Linear(16, 16), *layers.values(), nn.Linear(16, 16)])
    convert_to_fp8(parts, Fp8Config(recipe=recipe, include=tuple(str(i) for i in range(1, len(layers) + 1))))
    x, made = tokens.detach().clone().requires_grad_(), torch.zeros(6, 16)
    for expert in range(4):
        where, place = torch.where(index == expert)
        if len(where):
            hidden = stock._apply_gate(layers["gate_up_proj", expert](x[where]))
            made = made.index_add(0, where, layers["down_proj", expert](hidden) * shares[where, place, None])
    made.square().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(experts(tokens, index, shares), made)
        assert not torch.equal(stock(tokens, index, shares), made)
    torch.testing.assert_close(tokens.grad, x.grad)
    for stack in ("gate_up_proj", "down_proj"):
        gradient = getattr(experts, stack).grad
        gradient = gradient.mT if kind == "gpt_oss" else gradient
        for expert in range(4):
            expected = layers[stack, expert].weight.grad
            torch.testing.assert_close(
                gradient[expert], torch.zeros_like(gradient[0]) if expected is None else expected
            )


@pytest.mark.parametrize("recipe", ["delayed", "int16", "hfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_tells_its_products_and_resumes_exactly(kind, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("mixtures.mixture", lambda kind: mixture(kind, **SIZES))
    options = {"fp8": {"recipe": recipe}}
    if recipe == "hfp8":
        options["loss_scale"] = {"kind": "dynamic", "format": "fp8_e5m2"}
    whole = fit(kind, options, tmp_path / "whole")
    assert losses(whole)[-1] < losses(whole)[0]
    again = fit(kind, options, tmp_path / "again", tmp_path / "whole" / "checkpoint-4")
    state = whole.model.state_dict()
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in state.items())
    assert type(whole.model.get_submodule(EXPERTS)) is type(mixture(kind).get_submodule(EXPERTS))
    receipt = json.loads((tmp_path / "whole" / "eff_receipt.json").read_text())
    told = {layer["name"]: layer for layer in receipt["techniques"]["fp8"]["per_layer"]}
    for stack in ("gate_up_proj", "down_proj"):
        found = [told[f"{EXPERTS}.{stack}[{expert}]"] for expert in range(4)]
        counts = [{key: layer["scaled_mm"][key] + layer["emulated"][key] for key in PRODUCTS} for layer in found]
        assert all(min(count.values()) > 0 for count in counts), counts


def test_what_is_left_is_told():
    odd = {"intermediate_size": 20}
    with pytest.raises(MatchError, match=r"(?s)at least .*sizes must be multiples of 16 for FP8 tensor cores, got 40"):
        Session({"fp8": {"recipe": "tensorwise"}}).attach(mixture("mixtral", **odd))
    with pytest.raises(CompatibilityError, match=r"include must name .* multiples of 16 for FP8 .*, got 40"):
        convert_to_fp8(mixture("mixtral", **odd), Fp8Config(recipe="tensorwise", include=(EXPERTS,)))


@pytest.mark.parametrize("recipe", [{"fp8": {"recipe": "tensorwise"}}, {"lora": {"rank": 2, "save": "merged"}}])
def test_sharded_stacks_are_refused_before_the_first_step(recipe, monkeypatch):
    (key,) = recipe
    session = Session(recipe)
    net = mixture("mixtral", **SIZES)
    session.attach(net)
    monkeypatch.setattr(f"shared_core.{key}.technique.is_sharded", lambda value: value.ndim == 3)
    with pytest.raises(CompatibilityError, match=r"experts\..* sharded"):
        session.begin([torch.optim.SGD(net.parameters(), lr=0.1)], total_steps=1)
