"""Verdicts by the rules of thumb, and the bytes of each layer."""

import math

import pytest
import torch
from torch import nn

from shared_core.errors import ConfigError
from shared_core.quantization import quantize
from shared_core.quantization.post_training.quality import judge_loss, layer_bytes, quantized_bytes, thresholds


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
