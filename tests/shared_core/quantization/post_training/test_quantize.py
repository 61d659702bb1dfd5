"""Quantization after training: its cost, the ranges it finds, weights and biases, verdicts, and what it refuses."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from observed_data import range_of
from plain_loop import plain_step
from quantization_digits import accuracy, batches, data, make, trained
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.quantization import (
    BitPlan,
    QatConfig,
    convert,
    layer_sensitivity,
    plan_bits,
    quantize,
    quantize_with_report,
)
from shared_core.quantization.fake_quant_layers import STOCK
from shared_core.quantization.post_training.quality import judge_loss, layer_bytes, quantized_bytes, thresholds
from shared_core.quantization.post_training.quantize import least_error_scale
from shared_core.quantization.schemes import SCHEMES as PRESETS

SCHEMES = [*(name for name in PRESETS if name.islower()), "W3A16", "MXFP4A16", "MXFP8"]
SEEDS = (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int8_weight", "int8_dynamic"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "attention"])
def test_eight_bits_cost_no_accuracy(kind, scheme):
    lost = []
    for seed in SEEDS:
        model = trained(kind, seed)
        calibration = batches(seed) if scheme == "int8" else None
        lost.append(accuracy(model, seed) - accuracy(quantize(model, scheme, calibration), seed))
        assert accuracy(model, seed) > 90
    assert abs(sum(lost) / len(lost)) <= 0.2, lost


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "attention"])
def test_every_scheme_bakes_weights_quantizes_inputs_and_converts_to_what_it_computes(kind, scheme):
    model = trained(kind)
    before = copy.deepcopy(model.state_dict())
    quantized, report = quantize_with_report(model, scheme, batches())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(type(module) in STOCK for module in model.modules())
    assert not quantized.training
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)}
    assert {entry["name"] for entry in report.layers} == names == set(report.ranges)
    assert report.batches == (8 if scheme in ("int8", "int16", "fp8_static") else 0)
    images = data(0)[1][0]
    with torch.no_grad():
        assert not torch.equal(quantized(images), model(images))
        # a code whose value lies on a tie may move, and with it one output a little further
        near = torch.isclose(convert(quantized)(images), quantized(images), rtol=0.02, atol=0.02)
        assert near.float().mean() >= 0.999
    # the least that formats of 4 bits and more leave; fewer are for training
    worst = {"ternary": 1.0, "binary": 1.0, "xnor_net": 1.0, "W3A16": 6.0}.get(scheme, 12.0)
    assert min(entry["sqnr_db"] for entry in report.layers) > worst


@pytest.mark.parametrize("range", ["minmax", "ema", "percentile", "kl", "mse"])
def test_ranges_are_those_of_an_observer_of_the_same_inputs(range):
    model = trained("mlp")
    options = {"percentile": 99.0} if range == "percentile" else {}
    _, report = quantize_with_report(model, {"scheme": "int8", "range": range, **options}, batches())
    entry = report.ranges["1"]
    assert [entry["min"], entry["max"]] == pytest.approx(range_of(range, batches(), **options), abs=1e-6)


def test_the_split_of_the_batches_does_not_matter_but_for_the_moving_average():
    model, whole = trained("cnn"), torch.cat(batches())
    for range, equal in (("mse", True), ("minmax", True), ("ema", False)):
        config = {"scheme": "int8", "range": range}
        a, b = (quantize_with_report(model, config, split)[1].ranges for split in (batches(), [whole]))
        for name, entry in a.items():
            close = entry["max"] == pytest.approx(b[name]["max"], rel=1e-3)
            assert close or not equal
        if not equal:
            assert any(entry["max"] != b[name]["max"] for name, entry in a.items())


def test_batches_may_be_tensors_tuples_or_mappings_and_no_more_are_read_than_asked_for():
    model = trained("attention")
    config, found = {"scheme": "int8", "range": "minmax"}, []
    tuples = [(batch, 1.0) for batch in batches()]
    mappings = [{"images": batch, "scale": 1.0} for batch in batches()]
    for form in (batches(), tuples, mappings):
        found.append(quantize_with_report(model, config, form)[1].ranges)
    assert found[0] == found[1] == found[2]
    taken = []
    endless = (taken.append(1) or batches()[0] for _ in iter(int, 1))
    assert quantize_with_report(model, config, endless, num_batches=3)[1].batches == len(taken) == 3


def test_a_scheme_or_options_without_range_search_it_and_a_config_keeps_its_own():
    model = trained("mlp")
    searched = quantize_with_report(model, "int8", batches())[1].ranges
    assert searched == quantize_with_report(model, {"scheme": "int8"}, batches())[1].ranges
    assert searched == quantize_with_report(model, QatConfig(scheme="int8", range="mse"), batches())[1].ranges
    assert searched != quantize_with_report(model, QatConfig(scheme="int8"), batches())[1].ranges


def test_calibration_runs_in_evaluation_mode_whatever_the_model_is_in():
    model = copy.deepcopy(trained("mlp")).train()
    rng, statistics = torch.get_rng_state(), model[2].running_mean.clone()
    a = quantize_with_report(model, "int8", batches(), fuse=False)
    assert model.training
    assert torch.equal(model[2].running_mean, statistics)
    assert torch.equal(a[0][2].running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), rng)  # dropout drew nothing
    assert a[1].ranges == quantize_with_report(model.eval(), "int8", batches(), fuse=False)[1].ranges


def test_nan_in_calibration_is_left_out_and_told():
    model, spoiled = trained("mlp"), [batch.clone() for batch in batches()]
    spoiled[2][3] = float("nan")
    quantized, report = quantize_with_report(model, "int8", spoiled)
    assert accuracy(quantized) > accuracy(model) - 1
    assert any("NaN" in note for note in report.notes)
    with pytest.raises(TrainingError, match="no finite input"):
        quantize(model, "int8", [torch.full_like(batches()[0], float("nan"))])


def test_a_layer_that_no_batch_reaches_is_refused_unless_it_is_skipped():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(TrainingError, match="idle"):
        quantize(Idle(), "int8", [torch.randn(2, 4)])
    assert quantize_with_report(Idle(), {"scheme": "int8", "skip": ["idle"]}, [torch.randn(2, 4)])[1].layers


@pytest.mark.parametrize("scheme", ["int8", "int8_weight", "int8_dynamic", "int4_weight", "fp8"])
def test_a_bf16_model_stays_bf16_with_codes_and_ranges_of_full_precision(scheme):
    model = copy.deepcopy(trained("cnn")).bfloat16()
    quantized, report = quantize_with_report(model, scheme, [batch.bfloat16() for batch in batches()])
    images, labels = data(0)[1]
    with torch.no_grad():
        output = quantized(images.bfloat16())
        integer = convert(quantized)(images.bfloat16())
    assert output.dtype == integer.dtype == torch.bfloat16
    assert {value.dtype for value in quantized.parameters()} == {torch.bfloat16}
    right = (output.argmax(1) == labels).double().mean()
    assert 100 * right > accuracy(trained("cnn")) - 2
    assert (integer.argmax(1) == output.argmax(1)).double().mean() > 0.99
    if scheme == "int8":
        exact = quantize_with_report(trained("cnn"), scheme, batches())[1].ranges
        for name, entry in report.ranges.items():
            assert entry["max"] == pytest.approx(exact[name]["max"], rel=0.05)


def test_keeping_quantizers_is_for_training_and_changes_nothing_here():
    model, images = trained("mlp"), data(0)[1][0]
    kept = quantize(model, QatConfig(scheme="int8", range="mse", keep=True), batches())
    plain = quantize(model, "int8", batches())
    with torch.no_grad():
        assert torch.equal(kept(images), plain(images))
    assert torch.equal(kept[1].weight, plain[1].weight)
    assert len(kept[1].weight[0].unique()) < len(model[1].weight[0].unique())


@pytest.mark.parametrize(
    ("config", "calibration", "options", "error", "message"),
    [
        ("int8", None, {}, ConfigError, "calibration must be given for ranges"),
        ("int8", "empty", {}, ConfigError, "calibration must hold batches"),
        ("int8", "loader", {}, ConfigError, "calibration must hold what the model takes.*without labels$"),
        ("int8_weight", None, {"correct_bias": True}, ConfigError, "calibration must be given for correct_bias"),
        ("int8", "good", {"num_batches": 0}, ConfigError, r"num_batches must be in \[1, inf\), got 0"),
        ("int8", "good", {"num_batches": True}, ConfigError, "num_batches must be a whole number"),
        ({"scheme": "int8", "range": "lsq"}, "good", {}, ConfigError, "range .*'lsq'"),
        ({"scheme": "int9"}, "good", {}, ConfigError, "scheme"),
        ({"scheme": "int8", "bits": 3}, "good", {}, ConfigError, "bits"),
        ({"scheme": "int8", "include": ["nowhere"]}, "good", {}, MatchError, "nowhere"),
    ],
)
def test_bad_input_is_refused(config, calibration, options, error, message):
    (images, labels), _ = data(0)
    batch = {"good": [images], "loader": [(images, labels, labels)], "empty": []}
    with pytest.raises(error, match=message):
        quantize(make("mlp", 0), config, batch.get(calibration), **options)


def test_a_weight_that_is_not_finite_is_refused_and_so_is_a_quantized_model():
    model = make("mlp", 0)
    quantized = quantize(model, "int8_weight")
    with pytest.raises(CompatibilityError, match="already has quantizers"):
        quantize(quantized, "int8_weight")
    model[1].weight.data[0, 0] = float("nan")
    with pytest.raises(CompatibilityError, match="weights of 1 must be finite"):
        quantize(model, "int8_weight", fuse=False)


@pytest.mark.parametrize("inputs", [12, 13])
def test_rows_of_a_recurrent_layer_that_no_usual_group_divides_are_groups(inputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(inputs, 16))
    quantized = quantize(model, "int4_weight").state_dict()
    for name, weight in model.state_dict().items():
        if "weight" in name:
            change = quantized[name] - weight
            step = weight.amax(dim=1).clamp(min=0) - weight.amin(dim=1).clamp(max=0)
            assert 0 < change.abs().max() < step.max() / 14
            assert (change.abs().amax(dim=1) <= step / 14).all()


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


def test_equalization_saves_a_network_of_uneven_channels_and_keeps_its_function():
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
    assert "2 chains of layers equalized" in report.notes
    left, report = quantize_with_report(trained("attention"), "int8", batches(), equalize=True)
    assert accuracy(left) > accuracy(trained("attention")) - 1
    assert any("equaliz" in note for note in report.notes)


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


@pytest.mark.parametrize(("before", "after", "options", "judgement"), [
    (0.8, 0.7968, {}, "acceptable"),  # 0.4 %
    (1.0, 0.995, {}, "acceptable"),
    (1.0, 0.9949, {}, "borderline"),
    (1.0, 0.99, {}, "borderline"),
    (1.0, 0.9899, {}, "unacceptable"),
    (70.0, 69.2, {}, "unacceptable"),  # 0.8 points of 70 are 1.14 %
    (0.5, 0.6, {}, "acceptable"),
    (0.8, 0.79993, {"accept": "recommender"}, "acceptable"),
    (0.8, 0.79991, {"accept": "recommender"}, "unacceptable"),
    (1.0, 0.97, {"accept": "0.03"}, "acceptable"),
    (1.0, 0.97, {"accept": 0.029}, "unacceptable"),
    (2.0, 2.009, {"mode": "min"}, "acceptable"),
    (2.0, 2.03, {"mode": "min"}, "unacceptable"),
    (2.0, 1.0, {"mode": "min"}, "acceptable"),
    (-2.0, -2.03, {}, "unacceptable"),  # a log likelihood
    (0.0, 0.1, {}, "unknown"),
    (0.9, math.nan, {}, "unknown"),
    (math.inf, 0.9, {}, "unknown"),
])  # fmt: skip
def test_the_rules_of_thumb(before, after, options, judgement):
    assert judge_loss(before, after, **options).judgement == judgement


def test_a_loss_is_a_share_of_the_float_quality():
    assert judge_loss(0.8, 0.6).loss == pytest.approx(0.25)
    assert judge_loss(0.8, 0.6, mode="min").loss == pytest.approx(-0.25)
    assert judge_loss(0.8, 0.6).rule == "acceptable up to 0.5000%, unacceptable above 1.0000% of the float quality"


@pytest.mark.parametrize("accept", ["strict", "-0.1", "nan", "5", ""])
def test_no_rule_is_refused(accept):
    with pytest.raises(ConfigError, match="accept must be default, recommender or a share from 0 to 1"):
        thresholds(accept)


def test_no_mode_is_refused():
    with pytest.raises(ConfigError, match="mode must be one of max, min"):
        judge_loss(1.0, 1.0, mode="up")


@pytest.mark.parametrize("scheme", ["int8_weight", "int4_weight", "nvfp4", "fp8"])
def test_layers_and_the_rest_make_the_whole(scheme):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(64, 32).bfloat16())
    quantized = quantize(net, {"scheme": scheme, "fold_batch_norm": False})
    found = layer_bytes(quantized)
    assert {name: sizes[0] for name, sizes in found.items()} == {"0": 8 * 27 * 4, "3": 64 * 32 * 2}
    rest = 8 * 4 + 4 * 8 * 4 + 8 + 32 * 2  # biases, batch norm with its counter
    assert sum(codes for _, codes in found.values()) + rest == quantized_bytes(quantized)


def test_a_recurrent_layer_counts_all_its_weights():
    found = layer_bytes(quantize(nn.LSTM(8, 4), "int8_weight"))
    assert found == {"": ((8 + 4) * 16 * 4, (8 + 4) * 16 + 2 * 16 * 4)}
