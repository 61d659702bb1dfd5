"""Adapters over a base that qat quantizes: y = Q(x)·Q(W)ᵀ + scale·BAx in float64, merging, resume, refusals."""

import copy

import pytest
import torch
from lora_qat_runs import grid, make_optimizer, run, session, train
from lora_runs import X, net
from torch import nn

from shared_core import Session
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.errors import CompatibilityError, MatchError
from shared_core.lora.adapters import adapters
from shared_core.quantization import apply_ranges, convert
from shared_core.quantization.batch_norm import LEARNED

SCHEMES = [
    {"scheme": "int8"},
    {"scheme": "int8", "range": "lsq", "weight_bits": 4},
    {"scheme": "int8", "range": "lsq_plus"},
    {"scheme": "int8_weight", "weight_bits": 3, "rounding": "stochastic"},
    {"scheme": "int8_dynamic_int4_weight", "group_size": 6, "skip": ["0"]},
    {"scheme": "nvfp4"},
    {"scheme": "ternary"},
]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def quantized_input(x, entry):
    """s = (max - min)/255, z = clamp(ne(-128 - min/s)), q = clamp(ne(x/s) + z), of a range that holds 0."""
    low, high = min(entry["min"], 0.0), max(entry["max"], 0.0)
    scale = (high - low) / 255
    zero = round(max(-128, min(127, -128 - low / scale)))
    return ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale


def test_forward_is_the_quantized_base_of_the_quantized_input_and_the_adapters_of_the_input():
    model, original = net(), net()
    ours = run(model)
    ranges = ours.techniques["qat"].ranges()
    x = X.double()
    for name, activation in (("0", torch.tanh), ("2", torch.tanh), ("4", lambda y: y)):
        weight, bias = original.get_submodule(name).weight.detach(), original.get_submodule(name).bias
        if name == "4":  # trained whole
            y = quantized_input(x, ranges[name]) @ grid(model[4].weight.detach()).T
            y = y + model[4].bias.detach().double()
        else:
            a, b = (matrix.detach().double() for matrix in adapters(model.get_submodule(name)))
            y = quantized_input(x, ranges[name]) @ grid(weight).T + 3.0 * (x @ a.T) @ b.T
            y = y if bias is None else y + bias.detach().double()
        x = activation(y)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(X).double(), x, atol=1e-5, rtol=1e-5)
    assert (adapters(model[0])[1] != 0).any()


@pytest.mark.parametrize("qat", SCHEMES)
def test_adapters_the_head_and_learned_scales_alone_are_trained(qat):
    model, original = net(), net()
    ours = run(model, 3, **qat)
    model.train()
    model(X).square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    learned = {name for name in trained if name.rpartition(".")[2] in LEARNED}
    ends = ("lora_A.default.weight", "lora_B.default.weight")
    assert trained - learned == {f"{layer}.{end}" for layer in (0, 2) for end in ends} | {"4.weight", "4.bias"}
    assert bool(learned) == ("lsq" in qat.get("range", ""))
    assert torch.equal(model[0].base_layer.weight, original[0].weight)
    assert torch.equal(model[0].base_layer.bias, original[0].bias)
    assert {matrix.dtype for layer in ours.techniques["lora"].layers.values() for matrix in adapters(layer)} == {
        torch.float32
    }


def test_gradients_of_the_adapters_are_those_of_the_sum():
    model = net()
    ours = run(model, scheme="int8_weight", weight_bits=4, skip=["4"])
    reference = net().double()
    reference.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    model.train()
    model(X).square().sum().backward()
    reference(X.double()).square().sum().backward()
    for name in ("0", "2"):
        a, b = adapters(ours.techniques["lora"].layers[name])
        gradient = reference.get_submodule(name).weight.grad  # dL/dA = scale·Bᵀ·dL/dW, dL/dB = scale·dL/dW·Aᵀ
        torch.testing.assert_close(a.grad.double(), 3.0 * b.detach().double().T @ gradient, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(b.grad.double(), 3.0 * gradient @ a.detach().double().T, atol=1e-4, rtol=1e-4)


# -- merging


def test_state_dicts_hold_the_sum_and_the_merged_weight_is_rounded_once_more():
    model, original = net(), net()
    ours = run(model, weight_bits=5)
    a, b = (matrix.detach().double() for matrix in adapters(model[0]))
    total = grid(original[0].weight.detach(), 5) + 3.0 * b @ a
    torch.testing.assert_close(model.state_dict()["0.weight"].double(), total, atol=1e-6, rtol=0)
    assert list(model.state_dict()) == list(original.state_dict())
    baked = ours.files.bake(model.state_dict())
    ours.finish()
    weight = model[0].weight.detach()
    torch.testing.assert_close(weight.double(), grid(total, 5), atol=1e-6, rtol=0)
    assert len((weight[0] / (total[0].abs().max() / 15)).round().unique()) > 4
    assert all(torch.equal(value, baked[name]) for name, value in model.state_dict().items())
    told = ours.receipt()["techniques"]["lora"]["per_layer"][0]
    error = weight.double() - total
    assert told["requantized_error"] == pytest.approx((error.norm() / total.norm()).item(), rel=1e-3)
    assert told["requantized_largest_change"] == pytest.approx(error.abs().max().item(), rel=1e-3)
    ratio = 20 * torch.log10(total.norm() / error.norm()).item()
    assert told["requantized_sqnr_db"] == pytest.approx(ratio, abs=0.01)
    (layer,) = [entry for entry in ours.receipt()["techniques"]["qat"]["per_layer"] if entry["name"] == "0"]
    assert layer["sqnr_db"] == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("qat", SCHEMES)
def test_merged_weights_are_values_of_codes_in_the_users_own_layers(qat):
    model = net()
    layers, parameters = dict(model.named_modules()), dict(model.named_parameters())
    ours = run(model, **qat)
    baked = ours.files.bake(model.state_dict())
    ours.finish()
    assert dict(model.named_modules()) == layers
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, baked[name]) for name, value in model.state_dict().items())
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.Tanh}
    assert not any(module._state_dict_hooks or module._forward_pre_hooks for module in model.modules())
    if qat["scheme"] == "int8" and "range" in qat:
        entry = model[0].quantized_range
        scale = torch.tensor(entry["weight_scale"])
        codes = model[0].weight.detach() / scale[:, None]
        torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
        half = 2 ** (entry["weight_bits"] - 1)
        assert -half - 1e-3 <= codes.min()
        assert codes.max() <= half - 1 + 1e-3


def test_layers_that_qat_leaves_out_are_merged_in_float():
    model, original = net(), net()
    ours = run(model, skip=["2"])
    a, b = (matrix.detach() for matrix in adapters(model[2]))
    ours.finish()
    torch.testing.assert_close(model[2].weight.detach(), original[2].weight + 3.0 * b @ a, atol=1e-6, rtol=0)
    told = {entry["name"]: entry for entry in ours.receipt()["techniques"]["lora"]["per_layer"]}
    assert "requantized_error" in told["0"]
    assert "requantized_error" not in told["2"]


def test_deployed_it_computes_what_was_trained_but_for_the_last_rounding():
    model = net()
    ours = run(model, 40)
    with torch.no_grad():
        trained = model.eval()(X)
    model.train()
    ours.finish()
    plain = net()
    plain.load_state_dict(model.state_dict())
    ranges = ours.files.deployment()["qat"]["ranges"]
    assert set(ranges) == {"0", "2", "4"}
    integer = convert(plain, ranges)
    with torch.no_grad():
        ranged = apply_ranges(plain, ranges)(X)
    torch.testing.assert_close(ranged, trained, atol=0.02, rtol=0)
    torch.testing.assert_close(integer(X), ranged, atol=1e-5, rtol=1e-5)


def test_a_run_that_ends_before_begin_is_merged_in_float():
    model, original = net(), net()
    ours = run(model, 2, begin=2, freeze_observers=2)
    a, b = (matrix.detach().double() for matrix in adapters(model[0]))
    ours.techniques["qat"].bank.quantizing = False
    assert torch.allclose(model.state_dict()["0.weight"].double(), original[0].weight + 3.0 * b @ a, atol=1e-6)
    ours.finish()
    merged = original[0].weight.detach().double() + 3.0 * b @ a
    torch.testing.assert_close(model[0].weight.detach().double(), merged, atol=1e-6, rtol=0)


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
    baked = ours.files.bake(model.state_dict())
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
    ("qat", "quantized"),
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
def test_layers_go_by_the_names_that_the_user_knows(qat, quantized):
    ours = session(**qat)
    ours.attach(net())
    technique = ours.techniques["qat"]
    assert list(technique.layers) == quantized
    assert technique.schemes[quantized[0]].weight_bits == 8
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
    assert {"LoRA adapter" in reason for reason in left_out.values()} == {True}


CODES = "bitsandbytes.*lora_base none"


@pytest.mark.parametrize(
    ("lora", "qat", "error", "message"),
    [
        ({}, {"include": ["decoder.*"]}, MatchError, r"include pattern 'decoder\.\*' matches no module"),
        ({}, {"include": ["0"], "skip": ["0"]}, MatchError, "must match at least one module"),
        ({}, {"include": ["0.lora_A.default"]}, CompatibilityError, "an adapter of lora, which is merged in float"),
        ({}, {"keep": True}, CompatibilityError, r"qat with keep cannot be combined with lora: .* apply_ranges"),
        *(({"base": base}, {}, CompatibilityError, CODES) for base in ("nf4", "fp4", "int8")),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_is_as_it_was(lora, qat, error, message):
    model = net()
    with pytest.raises(error, match=message):
        session(lora, **qat).attach(model)
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.Tanh}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_order_of_a_recipe_does_not_matter():
    sections = {"lora": {"rank": 2, "save": "merged"}, "qat": {"scheme": "int8"}}
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
