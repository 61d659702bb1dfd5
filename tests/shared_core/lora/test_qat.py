"""Adapters over a base that qat quantises: y = Q(x)·Q(W)ᵀ + scale·BAx in float64, gradients, merging."""

import pytest
import torch
from lora_qat_runs import grid, run
from lora_runs import X, net
from torch import nn

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


def quantised_input(x, entry):
    """s = (max - min)/255, z = clamp(ne(-128 - min/s)), q = clamp(ne(x/s) + z), of a range that holds 0."""
    low, high = min(entry["min"], 0.0), max(entry["max"], 0.0)
    scale = (high - low) / 255
    zero = round(max(-128, min(127, -128 - low / scale)))
    return ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale


def test_forward_is_the_quantised_base_of_the_quantised_input_and_the_adapters_of_the_input():
    model, original = net(), net()
    ours = run(model)
    ranges = ours.techniques["qat"].ranges()
    x = X.double()
    for name, activation in (("0", torch.tanh), ("2", torch.tanh), ("4", lambda y: y)):
        weight, bias = original.get_submodule(name).weight.detach(), original.get_submodule(name).bias
        if name == "4":  # trained whole
            y = quantised_input(x, ranges[name]) @ grid(model[4].weight.detach()).T
            y = y + model[4].bias.detach().double()
        else:
            a, b = (matrix.detach().double() for matrix in adapters(model.get_submodule(name)))
            y = quantised_input(x, ranges[name]) @ grid(weight).T + 3.0 * (x @ a.T) @ b.T
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
    baked = ours.bake(model.state_dict())
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
    baked = ours.bake(model.state_dict())
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
    ranges = ours.deployment()["qat"]["ranges"]
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
