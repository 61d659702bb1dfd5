"""Combinations that options decide: a loss scaler beside bf16, and FP8 that cannot do without one."""

import pytest
from torch import nn

from shared_core import Recipe, Session
from shared_core.engine.checks import compatibility
from shared_core.engine.registry import REGISTRY
from shared_core.errors import CompatibilityError


def recipe(fp8=None, **loss_scale):
    values = {"fp8": fp8} if fp8 else {}
    return Recipe.from_dict(values | ({"loss_scale": {"kind": "dynamic", **loss_scale}} if loss_scale else {}))


@pytest.mark.parametrize("options", [{"recipe": "tensorwise"}, {"recipe": "delayed"}, {"recipe": "hfp8"}])
def test_a_scaler_is_allowed_with_bf16_where_gradients_are_e5m2(options):
    compatibility.check(recipe(options, format="fp8_e5m2"), ["bf16"])
    with pytest.raises(CompatibilityError, match=r"plain bf16.*format fp8_e5m2"):
        compatibility.check(recipe(options, format="fp16"), ["bf16"])
    with pytest.raises(CompatibilityError, match="DeepSpeed"):  # the condition lifts that one refusal alone
        compatibility.check(recipe(options, format="fp8_e5m2"), ["bf16", "deepspeed"])


@pytest.mark.parametrize(
    "options",
    [None, {"recipe": "rowwise"}, {"recipe": "tensorwise", "format": "e4m3"}, {"recipe": "mx"}],
)
def test_it_is_refused_with_bf16_everywhere_else(options):
    with pytest.raises(CompatibilityError, match="cannot be combined with plain bf16"):
        compatibility.check(recipe(options, format="fp8_e5m2"), ["bf16"])


def test_keys_alone_meet_no_condition():
    with pytest.raises(CompatibilityError, match="plain bf16"):
        compatibility.check(["fp8", "loss_scale"], ["bf16"])
    compatibility.check(["fp8", "loss_scale"])
    compatibility.check(["fp8"])


def test_fp8_that_needs_a_scaler_is_refused_without_one():
    with pytest.raises(CompatibilityError, match=r"needs loss_scale.*--loss_scale_kind dynamic"):
        compatibility.check(recipe({"recipe": "hfp8"}))
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16))
    with pytest.raises(CompatibilityError, match="hfp8 needs loss_scale"):
        Session(recipe({"recipe": "hfp8"})).attach(model)
    assert type(model[1]) is nn.Linear
    compatibility.check(recipe({"recipe": "hfp8"}, format="fp8_e5m2"))
    compatibility.check(recipe({"recipe": "delayed"}))


def test_the_matrix_tells_the_condition():
    (row,) = [row for row in compatibility.matrix() if row["technique"] == "loss_scale"]
    assert "allowed where fp8 casts gradients to e5m2" in row["bf16"]
    assert row["fp8"] == "yes"


@pytest.mark.parametrize("name", ["lsq", "lsq_plus", "pact"])
def test_a_soup_has_no_learned_scales(name):
    soup = {"kind": "greedy", "metric": "eval_loss"}
    with pytest.raises(CompatibilityError, match=f"qat with range {name} cannot be combined with soup"):
        compatibility.check(Recipe.from_dict({"qat": {"scheme": "int8", "range": name}, "soup": soup}))
    compatibility.check(Recipe.from_dict({"qat": {"scheme": "int8", "range": "kl"}, "soup": soup}))


@pytest.mark.parametrize(
    ("key", "options", "qat"),
    [
        ("average", {"kind": "ema", "bn_batches": 2}, None),
        ("soup", {"kind": "uniform", "bn_batches": 2}, None),
        ("average", {"kind": "ema"}, {"scheme": "int8"}),
        ("soup", {"kind": "uniform"}, {"scheme": "int8_dynamic", "overrides": ["0:scheme=int8"]}),
        ("soup", {"kind": "uniform"}, {"scheme": "ternary", "overrides": ["0:activation_bits=8"]}),
    ],
)
def test_a_training_step_that_steps_is_not_for_calibration(key, options, qat):
    # before, it was found out when training had ended
    recipe = Recipe.from_dict({key: options, **({"qat": qat} if qat else {})})
    with pytest.raises(CompatibilityError, match=f"{key} with .* cannot be combined with Lightning's manual optimi"):
        compatibility.check(recipe, ["manual_optimization"])
    compatibility.check(recipe)
    plain = {key: {"kind": options["kind"]}, "qat": {"scheme": "int8_dynamic"}}
    compatibility.check(Recipe.from_dict(plain), ["manual_optimization"])


STEPPED = {"prune", "qat", "average", "low_rank", "lora", "distill", "checkpointing", "activations", "matmul"}


@pytest.mark.parametrize(
    ("surrounding", "allowed"),
    [
        ("deepspeed", STEPPED),
        ("zero3", STEPPED & {"checkpointing", "matmul"}),
        ("deepspeed_fp16", {"distill", "matmul"}),
        ("lightning_deepspeed", {"distill", "matmul"}),
    ],
)
def test_what_deepspeed_allows(surrounding, allowed):
    # stage 3 is reported beside DeepSpeed, which alone refuses some
    around = {surrounding, "deepspeed"}
    assert {key for key in REGISTRY if not any(compatibility.refusal(key, one) for one in around)} == allowed


@pytest.mark.parametrize(
    ("values", "surrounding"),
    [
        ({"distill": {"teacher": "mutual"}}, "deepspeed"),
        ({"distill": {"teacher": "ema"}}, "lightning_deepspeed"),
        ({"distill": {"teacher": "t", "chunked": True}}, "deepspeed_fp16"),
        ({"checkpointing": {"policy": "budget:least"}}, "zero3"),
    ],
)
def test_options_that_deepspeed_does_not_allow(values, surrounding):
    with pytest.raises(CompatibilityError, match=r"cannot be combined with .*DeepSpeed"):
        compatibility.check(Recipe.from_dict(values), ["deepspeed", surrounding])
