"""Weights and biases after training: norms fused, channels equalised, biases corrected, few bits, bit plans."""

import copy

import pytest
import torch
import torch.nn.functional as F
from plain_loop import plain_step
from quantization_digits import accuracy, batches, data, trained
from torch import nn

from shared_core.engine.session import Session
from shared_core.quantization import BitPlan, convert, layer_sensitivity, plan_bits, quantize, quantize_with_report
from shared_core.quantization.post_training.quantize import least_error_scale


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_batch_norms_are_fused_and_the_function_stays(kind):
    model = trained(kind)
    quantized, report = quantize_with_report(model, "int8_weight", batches(), fuse=True)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in quantized.modules())
    assert "1 batch norms fused" in report.notes[0]
    images = data(0)[1][0]
    layer = next(name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    first = model[: int(layer) + 1]
    fused = quantize(model, {"scheme": "int8_weight", "skip": ["first"]}, fuse=True)[: int(layer) + 1]
    with torch.no_grad():
        torch.testing.assert_close(fused(images), first(images), rtol=1e-4, atol=1e-5)
    kept, report = quantize_with_report(model, "int8_weight")
    assert list(kept.state_dict()) == list(model.state_dict())
    assert any("batch_norm" in entry for entry in report.ranges.values())
    with torch.no_grad():  # the same folded weights, and the user's keys
        torch.testing.assert_close(kept(images), quantized(images), rtol=1e-4, atol=1e-4)


def uneven():
    """A trained network with channels of very different ranges, its function unchanged."""
    model = copy.deepcopy(trained("cnn"))
    factors = 10 ** torch.linspace(-1.5, 1.5, 16)
    with torch.no_grad():  # relu(f·x) = f·relu(x)
        for value in (model[1].weight, model[1].bias):
            value *= factors
        model[3].weight /= factors[:, None, None]
    return model


def test_equalisation_saves_a_network_of_uneven_channels_and_keeps_its_function():
    model = uneven()
    images = data(0)[1][0]
    with torch.no_grad():
        exact = model(images)
        torch.testing.assert_close(exact, trained("cnn")(images), rtol=1e-3, atol=1e-3)
    errors = []
    for equalize in (False, True):
        # an input range is of the whole tensor, and uneven channels share it
        quantized, report = quantize_with_report(model, "int8", batches(), equalize=equalize)
        with torch.no_grad():
            errors.append((quantized(images) - exact).square().mean().sqrt().item())
    assert errors[1] < errors[0] / 2
    assert "2 chains of layers equalised" in report.notes
    left, report = quantize_with_report(trained("attention"), "int8", batches(), equalize=True)
    assert accuracy(left) > accuracy(trained("attention")) - 1
    assert any("equalis" in note for note in report.notes)


def test_bias_correction_takes_the_mean_error_out_of_the_output():
    model, config = trained("mlp"), {"scheme": "int8", "weight_bits": 3, "range": "minmax"}
    held = torch.cat(batches())
    with torch.no_grad():
        exact = model(held)
        shift = [
            (quantize(model, config, batches(), correct_bias=correct)(held) - exact).mean(0).abs().max().item()
            for correct in (False, True)
        ]
    assert shift[1] < 1e-3 < shift[0] / 5
    report = quantize_with_report(model, config, batches(), correct_bias=True)[1]
    assert "biases of 3 layers corrected, 0 have none" in report.notes


def test_weights_of_few_bits_have_the_scale_of_least_error_and_deploy_with_it():
    model = trained("mlp")
    config = {"scheme": "int8", "weight_bits": 2}
    searched, report = quantize_with_report(model, config, batches(), fuse=True)
    plain = quantize_with_report(model, {**config, "range": "minmax"}, batches(), fuse=True)[1]
    for found, other in zip(report.layers, plain.layers, strict=True):
        assert found["sqnr_db"] > other["sqnr_db"] + 2
    for name, entry in report.ranges.items():
        scale = torch.tensor(entry["weight_scale"])
        codes = searched.get_submodule(name).weight.detach() / scale[:, None]
        assert torch.allclose(codes, codes.round(), atol=1e-5)
        assert set(codes.round().flatten().tolist()) <= {-2, -1, 0, 1}
        assert torch.equal(convert(searched).get_submodule(name).weight_codes.float(), codes.round())
    assert "weight_scale" not in plain.ranges["1"]
    assert "weight_scale" not in quantize_with_report(model, "int8", batches(), fuse=True)[1].ranges["1"]
    images = data(0)[1][0]
    for quantized in (searched, quantize(model, config, batches(), fuse=False)):
        with torch.no_grad():
            difference = (convert(quantized)(images) - quantized(images)).abs()
        assert difference.max() < 1e-4


def test_least_error_scale_equals_a_search_in_float64_and_never_loses_to_the_largest_weight():
    torch.manual_seed(0)
    rows = torch.randn(5, 200) * torch.tensor([[1.0], [1e-3], [50.0], [1.0], [1.0]])
    rows[4] = 0
    scale = least_error_scale(rows, -4, 3)

    def error(row, s):
        return ((row.double() / s).round().clamp(-4, 3) * s - row.double()).square().sum().item()

    for row, found in zip(rows[:4], scale.double()[:4], strict=True):
        peak = row.double().abs().max() / 3
        best = min(error(row, peak * k / 100) for k in range(1, 101))
        assert error(row, found) == pytest.approx(best, rel=1e-4)
        assert error(row, found) <= error(row, peak) * (1 + 1e-6)
    assert scale[4] == 1


def test_a_shared_weight_is_baked_once_and_keeps_one_scale():
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    quantized, report = quantize_with_report(
        nn.Sequential(first, nn.ReLU(), second), {"scheme": "int8", "weight_bits": 4}, [torch.randn(16, 8)]
    )
    assert quantized[0].weight is quantized[2].weight
    assert not any("weight_scale" in entry for entry in report.ranges.values())
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(convert(quantized)(x), quantized(x))


def test_a_bit_plan_is_taken_by_quantize_and_by_training():
    model = trained("mlp")
    (images, labels), _ = data(0)

    def loss(net, batch):
        return F.cross_entropy(net(batch[0]), batch[1])

    costs = layer_sensitivity(model, [(images, labels)], loss=loss, bits=(3, 4, 8), probes=4)
    sizes = {name: model.get_submodule(name).weight.numel() for name in costs}
    plan = plan_bits(costs, sizes, 5.0)
    assert plan.average_bits <= 5
    assert len(set(plan.bits.values())) > 1
    for scheme in ("int8", "int8_weight"):
        report = quantize_with_report(model, plan.qat_options(scheme), batches())[1]
        assert {entry["name"]: entry["weight_bits"] for entry in report.layers} == plan.bits
    partly = BitPlan({"1": 4, "5": 32, "7": 8}, sizes)
    report = quantize_with_report(model, partly.qat_options(), batches())[1]
    assert {entry["name"]: entry["weight_bits"] for entry in report.layers} == {"1": 4, "7": 8}
    learner = copy.deepcopy(model).train()
    session = Session({"qat": plan.qat_options()})
    session.attach(learner)
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-4)
    session.begin([optimizer], total_steps=3)
    for _ in range(3):
        plain_step(session, optimizer, F.cross_entropy(learner(images[:64]), labels[:64]))
    session.finish()
    for name, bits in plan.bits.items():
        for row in learner.get_submodule(name).weight.detach():
            assert len(row.unique()) <= 2**bits - 1
