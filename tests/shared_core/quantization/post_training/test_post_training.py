"""Quantisation after training: what it may cost, the ranges it finds, what it must not touch, what it refuses."""

import copy

import pytest
import torch
from observed_data import range_of
from quantization_digits import accuracy, batches, data, make, trained
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.quantization import QatConfig, convert, quantize, quantize_with_report
from shared_core.quantization.config import Scheme
from shared_core.quantization.fake_quant_layers import STOCK

SCHEMES = list(Scheme.__args__)
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
def test_every_scheme_bakes_weights_quantises_inputs_and_converts_to_what_it_computes(kind, scheme):
    model = trained(kind)
    before = copy.deepcopy(model.state_dict())
    quantized, report = quantize_with_report(model, scheme, batches())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(type(module) in STOCK for module in model.modules())
    assert not quantized.training
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)}
    assert {entry["name"] for entry in report.layers} == names == set(report.ranges)
    assert report.batches == (8 if scheme in ("int8", "fp8_static") else 0)
    images = data(0)[1][0]
    with torch.no_grad():
        assert not torch.equal(quantized(images), model(images))
        # a code whose value lies on a tie may move, and with it one output a little further
        near = torch.isclose(convert(quantized)(images), quantized(images), rtol=0.02, atol=0.02)
        assert near.float().mean() >= 0.999
    # the least that formats of 4 bits and more leave; fewer are for training
    worst = {"ternary": 1.0, "binary": 1.0}.get(scheme, 12.0)
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
    with pytest.raises(TrainingError, match="calibration must reach every quantised layer with finite inputs"):
        quantize(model, "int8", [torch.full_like(batches()[0], float("nan"))])


def test_a_layer_that_no_batch_reaches_is_refused_unless_it_is_skipped():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(TrainingError, match="but idle saw none"):
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


def test_keeping_quantisers_is_for_training_and_changes_nothing_here():
    model, images = trained("mlp"), data(0)[1][0]
    kept = quantize(model, QatConfig(scheme="int8", range="mse", keep=True), batches())
    plain = quantize(model, "int8", batches())
    with torch.no_grad():
        assert torch.equal(kept(images), plain(images))
    assert torch.equal(kept[1].weight, plain[1].weight)
    assert len(kept[1].weight[0].unique()) < len(model[1].weight[0].unique())


def test_recurrent_layers_and_embeddings_are_quantised_too():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.lstm, self.head = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, tokens):
            return self.head(self.lstm(self.words(tokens))[0][:, -1])

    torch.manual_seed(0)
    model, tokens = Words(), torch.randint(20, (32, 5))
    for scheme in ("int8", "int8_dynamic", "int4_weight"):
        quantized, report = quantize_with_report(model, scheme, [tokens])
        assert {entry["name"] for entry in report.layers} == {"words", "lstm", "head"}
        with torch.no_grad():
            torch.testing.assert_close(quantized(tokens), model(tokens), atol=0.15, rtol=0)


@pytest.mark.parametrize(
    ("config", "calibration", "options", "error", "message"),
    [
        ("int8", None, {}, ConfigError, "calibration must be given for ranges of activations"),
        ("int8", "empty", {}, ConfigError, "calibration must hold batches, got none"),
        ("int8", "loader", {}, ConfigError, "calibration must hold what the model takes.*without labels$"),
        ("int8_weight", None, {"correct_bias": True}, ConfigError, "calibration must be given for correct_bias"),
        ("int8", "good", {"num_batches": 0}, ConfigError, r"num_batches must be in \[1, inf\), got 0"),
        ("int8", "good", {"num_batches": True}, ConfigError, "num_batches must be a whole number"),
        ({"scheme": "int8", "range": "lsq"}, "good", {}, ConfigError, "range must be observed, got 'lsq'"),
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


def test_a_weight_that_is_not_finite_is_refused_and_so_is_a_quantised_model():
    model = make("mlp", 0)
    quantized = quantize(model, "int8_weight")
    with pytest.raises(CompatibilityError, match="no quantisers yet"):
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
