"""Runs of adapters over a base that qat quantises: resume, detaching, bf16, names of layers, refusals."""

import copy

import pytest
import torch
from lora_qat_runs import grid, make_optimizer, run, session, train
from lora_runs import net
from torch import nn

from shared_core import Session
from shared_core.engine.state_file import load_state, save_state
from shared_core.errors import CompatibilityError, MatchError
from shared_core.lora.adapters import adapters


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "qat",
    [
        {"scheme": "int8"},
        {"scheme": "int8", "range": "lsq", "weight_bits": 4},
        {"scheme": "int8_weight", "weight_bits": 3, "rounding": "stochastic"},
    ],
)
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_run_is_the_run_that_was_never_stopped(qat, stop, tmp_path):
    qat = {**qat, "begin": 2} if stop else qat
    whole = net()
    ours = run(whole, 5, **qat)
    stopped, first = net(), session(**qat)
    first.attach(stopped)
    halfway = make_optimizer(stopped)
    first.begin([halfway], total_steps=5)
    train(first, stopped, halfway, stop)
    save_state(tmp_path, first.state_dict())
    weights = {name: value.clone() for name, value in stopped.state_dict().items()}
    resumed, again = net(), session(**qat)
    for parameter in resumed.parameters():
        nn.init.normal_(parameter)
    again.attach(resumed)
    resumed.load_state_dict(weights)
    second = make_optimizer(resumed)
    second.load_state_dict(halfway.state_dict())
    again.load_state_dict(load_state(tmp_path))
    again.begin([second], total_steps=5)
    train(again, resumed, second, 5)
    ours.finish()
    again.finish()
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())
    assert ours.techniques["qat"].ranges() == again.techniques["qat"].ranges()
    # a run that trains on goes on from the frozen weight, not from a rounded one
    kept = ours.state_dict()["techniques"]["lora"]["layers"]["0"]["frozen"]["weight"]
    assert torch.equal(kept, net()[0].weight)


def test_detached_before_and_in_the_middle_the_model_is_plain():
    model, before = net(), net()
    ours = session(range="lsq")
    ours.attach(model)
    ours.detach()
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    ours = run(model, range="lsq")
    a, b = (matrix.detach() for matrix in adapters(model[0]))
    ours.detach()
    torch.testing.assert_close(model[0].weight.detach(), before[0].weight + 3.0 * b @ a, atol=1e-6, rtol=0)
    assert set(dict(model.named_parameters())) == set(dict(before.named_parameters()))
    assert type(model[0]) is nn.Linear


def test_bf16_models_stay_bf16_and_their_learned_scales_float32():
    model = net(torch.bfloat16)
    ours = run(model, range="lsq")
    assert model[0].base_layer.weight_magnitude.dtype == torch.float32
    baked = ours.bake(model.state_dict())
    ours.finish()
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    assert all(torch.equal(value, baked[name]) for name, value in model.state_dict().items())


def test_a_batch_norm_behind_an_adapted_layer_is_not_folded_into_its_base():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    ours = run(model, lora={"include": ["0"]})
    told = ours.receipt()["techniques"]["qat"]
    assert "batch_norm" not in told["per_layer"][0]
    assert "1" in told["batch_norms_beside"]
    ours.finish()
    assert type(model[0]) is nn.Linear


def test_fused_evaluation_of_transformer_layers_is_off_and_comes_back():
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.Sequential(block, nn.Linear(16, 3))
    ours = session({"include": ["*.linear?"]}, scheme="int8_weight", weight_bits=2)
    ours.attach(model)
    ours.begin([make_optimizer(model)], total_steps=1)
    x = torch.randn(2, 5, 16)
    trained = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), trained, atol=1e-5, rtol=0)
    ours.finish()
    assert block.activation_relu_or_gelu == 1


# -- names and refusals


@pytest.mark.parametrize(
    ("qat", "quantised"),
    [
        ({"include": ["0"]}, ["0"]),
        ({"include": ["first"]}, ["0"]),
        ({"include": ["last"]}, ["4"]),
        ({"skip": ["2", "last"]}, ["0"]),
        ({"include": ["Linear"]}, ["0", "2", "4"]),
        ({"include": ["?.base_layer"]}, ["0", "2"]),
        ({"overrides": {"2": {"weight_bits": 4}}}, ["0", "2", "4"]),
    ],
)
def test_layers_go_by_the_names_that_the_user_knows(qat, quantised):
    ours = session(**qat)
    ours.attach(net())
    technique = ours.techniques["qat"]
    assert list(technique.layers) == quantised
    assert technique.schemes[quantised[0]].weight_bits == 8
    if "overrides" in qat:
        assert technique.schemes["2"].weight_bits == 4


def test_an_adapted_head_is_the_last_layer():
    ours = session({"include": ["Linear"]}, skip=["last"])
    ours.attach(net())
    assert list(ours.techniques["qat"].layers) == ["0", "2"]


def test_adapters_stay_in_float_and_are_named():
    ours = session()
    ours.attach(net())
    left_out = ours.receipt()["techniques"]["qat"]["left_out"]
    assert set(left_out) == {f"{layer}.lora_{side}.default" for layer in (0, 2) for side in "AB"}
    assert set(left_out.values()) == {"a LoRA adapter, trained in float over a quantised base"}


@pytest.mark.parametrize(
    ("qat", "error", "message"),
    [
        ({"include": ["decoder.*"]}, MatchError, r"include pattern 'decoder\.\*' matches no module"),
        ({"include": ["0"], "skip": ["0"]}, MatchError, "must match at least one module"),
        ({"include": ["0.lora_A.default"]}, CompatibilityError, "an adapter of lora, which is merged in float"),
    ],
)
def test_matching_nothing_is_an_error_and_the_model_is_as_it_was(qat, error, message):
    model = net()
    with pytest.raises(error, match=message):
        session(**qat).attach(model)
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.Tanh}
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("base", ["nf4", "fp4", "int8"])
def test_a_base_of_codes_is_refused_and_what_works_is_named(base):
    model = net()
    with pytest.raises(CompatibilityError, match=r"codes of bitsandbytes already.* lora base none.*int4_weight"):
        session({"base": base}).attach(model)
    assert type(model[0]) is nn.Linear


def test_quantisers_that_stay_are_refused():
    with pytest.raises(CompatibilityError, match=r"qat with keep cannot be combined with lora: .* apply_ranges"):
        session(keep=True).attach(net())


def test_the_order_of_a_recipe_does_not_matter():
    sections = {"lora": {"rank": 2, "base": "none"}, "qat": {"scheme": "int8"}}
    ended = []
    for keys in (("lora", "qat"), ("qat", "lora")):
        model = net()
        ours = Session({key: sections[key] for key in keys}, seed=1)
        ours.attach(model)
        optimizer = make_optimizer(model)
        ours.begin([optimizer], total_steps=3)
        train(ours, model, optimizer, 3)
        ours.finish()
        ended.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())
    torch.testing.assert_close(ended[0]["0.weight"].double(), grid(ended[0]["0.weight"]), atol=1e-6, rtol=0)
