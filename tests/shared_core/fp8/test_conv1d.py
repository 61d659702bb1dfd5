"""transformers' Conv1D, GPT-2's linear layer, multiplies in FP8 as the linear layer that it is."""

import copy
import itertools

import pytest
import torch
from fp8_runs import ALL, Quiet
from plain_loop import begun_session, plain_step
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from shared_core.errors import CompatibilityError
from shared_core.fp8 import Fp8Config, convert_to_fp8

SIZES = (16, 48, 32, 16)


def twins():
    """Return the same net of Conv1D and of Linear layers."""
    torch.manual_seed(0)
    sizes = [*itertools.pairwise(SIZES)]
    ours = nn.Sequential(*(Conv1D(outputs, inputs) for inputs, outputs in sizes))
    stock = nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in sizes))
    for one, other in zip(ours, stock, strict=True):
        nn.init.normal_(one.weight, std=0.2)
        nn.init.normal_(one.bias)
        other.load_state_dict({"weight": one.weight.detach().t(), "bias": one.bias.detach()})
    return ours, stock


def trained(model, recipe, steps=3):
    session, optimizer = begun_session(recipe, model, steps, lr=0.05, services=Quiet())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        plain_step(session, optimizer, model(torch.randn(4, 5, SIZES[0], generator=generator)).square().mean())
    session.finish()
    return session


@pytest.mark.parametrize("recipe", sorted({*ALL} - {"hfp8"}))
def test_it_trains_to_the_numbers_of_the_linear_layer_that_it_is(recipe):
    ours, stock = twins()
    keys = {name: value.shape for name, value in ours.state_dict().items()}
    told = [
        trained(model, {"fp8": {"recipe": recipe, "include": ["0", "1", "2"]}}).receipt().values["techniques"]["fp8"]
        for model in (ours, stock)
    ]
    assert [entry["name"] for entry in told[0]["per_layer"]] == ["0", "1", "2"]
    assert told[0] == told[1]
    assert told[0]["per_layer"][1]["emulated"] == {"forward": 3, "grad_input": 3, "grad_weight": 3}
    for one, other in zip(ours, stock, strict=True):
        assert torch.equal(one.weight, other.weight.t())
        assert torch.equal(one.bias, other.bias)
    assert [type(layer) for layer in ours] == [Conv1D] * 3
    assert {name: value.shape for name, value in ours.state_dict().items()} == keys
    assert not any("fp8" in vars(layer) for layer in ours)


def test_every_block_of_gpt2_is_in_fp8_and_the_checkpoint_is_plain():
    torch.manual_seed(0)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=48, n_positions=8, n_embd=16, n_layer=2, n_head=2, **quiet)
    model = GPT2LMHeadModel(config)
    plain = copy.deepcopy(model)
    session, optimizer = begun_session({"fp8": {"recipe": "rowwise"}}, model, 1, lr=0.05, services=Quiet())
    ids = torch.arange(8)[None]
    session.loss(model(input_ids=ids, labels=ids).loss).backward()
    session.before_step()
    optimizer.step()
    session.after_step()
    model(input_ids=ids)
    session.finish()
    told = session.receipt().values["techniques"]["fp8"]
    assert told["layers"] == 7
    assert {*told["left_out"]} == {"transformer.h.0.attn.c_attn", "lm_head"}
    assert {type(module) for module in model.modules()} == {type(module) for module in plain.modules()}
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_compiled_graph_multiplies_as_the_layers_themselves():
    ours, _ = twins()
    convert_to_fp8(ours, Fp8Config(recipe="tensorwise"))
    x = torch.randn(3, SIZES[0], generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(ours(x).square().sum(), list(ours.parameters()))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().sum(), list(ours.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_cannot_multiply_is_told_by_the_names_of_a_linear_layer():
    model = nn.Sequential(Conv1D(16, 16), Conv1D(40, 16), Conv1D(16, 40), Conv1D(16, 16), Conv1D(16, 16))
    with pytest.raises(CompatibilityError, match=r"include must name .* 1: out_features must be a multiple of 16"):
        convert_to_fp8(model, Fp8Config(recipe="rowwise", include=["1"]))
    with pytest.raises(CompatibilityError, match=r"3: torchao supports only nn\.Linear"):
        convert_to_fp8(model, Fp8Config(recipe="rowwise", include=["3"], backend="torchao"))
