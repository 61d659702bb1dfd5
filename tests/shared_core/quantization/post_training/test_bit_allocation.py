"""Plans of bits against every plan there is, their files, and plans by measured quality."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from shared_core.errors import CheckpointError, ConfigError, MatchError, TrainingError
from shared_core.quantization import QatConfig, quantize_with_report
from shared_core.quantization.post_training.bit_allocation import (
    BitPlan,
    keep_high,
    plan_bits,
    plan_by_quality,
    round_layers,
)


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_is_the_best_of_all_plans(seed):
    generator = torch.Generator().manual_seed(seed)
    names, widths = [f"layer{index}" for index in range(6)], [3, 4, 6, 8]
    sizes = {name: int(torch.randint(1, 500, (), generator=generator)) for name in names}
    costs = {
        name: {bits: float(torch.rand((), generator=generator)) * 4.0**-bits * 10 for bits in widths} for name in names
    }
    if seed % 3 == 0:  # not even monotone, and with ties
        costs = {name: {bits: float(round(cost * 40)) for bits, cost in entry.items()} for name, entry in costs.items()}
    budget = 3.0 + 5 * float(torch.rand((), generator=generator))
    capacity = budget * sum(sizes.values())
    best = min(
        sum(costs[name][bits] for name, bits in zip(names, chosen, strict=True))
        for chosen in itertools.product(widths, repeat=6)
        if sum(sizes[name] * bits for name, bits in zip(names, chosen, strict=True)) <= capacity
    )
    plan = plan_bits(costs, sizes, budget)
    assert plan.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert plan.average_bits <= budget
    assert plan.cost == pytest.approx(sum(costs[name][bits] for name, bits in plan.bits.items()))


def test_a_plan_for_many_layers_is_quick_and_beats_uniform():
    generator = torch.Generator().manual_seed(0)
    names = [str(index) for index in range(150)]
    sizes = {name: int(torch.randint(1000, 5_000_000, (), generator=generator)) for name in names}
    costs = {
        name: {bits: float(torch.rand((), generator=generator)) ** 3 * 4.0**-bits for bits in (3, 4, 5, 6, 8)}
        for name in names
    }
    plan = plan_bits(costs, sizes, 4)
    assert plan.average_bits <= 4
    assert plan.cost < sum(entry[4] for entry in costs.values())


def test_the_floor_keeps_two_bits_out_and_fixed_layers_count():
    costs = {"a": {2: 0.0, 3: 0.0, 8: 0.0}, "b": {2: 5.0, 3: 4.0, 8: 0.0}}
    sizes = {"a": 10, "b": 10, "head": 10}
    assert plan_bits(costs, sizes, 3).bits == {"a": 3, "b": 3}
    assert plan_bits(costs, sizes, 5, floor=2).bits == {"a": 2, "b": 8}
    assert plan_bits(costs, sizes, 100).bits["b"] == 8
    plan = plan_bits(costs, sizes, 19 / 3, fixed={"head": 8})
    assert plan.bits == {"a": 3, "b": 8, "head": 8}
    assert plan_bits(costs, sizes, 19 / 3 - 0.01, fixed={"head": 8}).bits["b"] == 3


COSTS, SIZES = {"a": {4: 1.0, 8: 0.0}}, {"a": 10}


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: plan_bits(COSTS, SIZES, 3), ConfigError, r"budget must be at least 4 bits.*lower floor"),
    (lambda: plan_bits(COSTS, SIZES, math.nan), ConfigError, "budget must be a finite number"),
    (lambda: plan_bits(COSTS, SIZES, 8, floor=9), ConfigError, "floor = 9"),
    (lambda: plan_bits(COSTS, {"b": 1}, 8), MatchError, "sizes .*'a'"),
    (lambda: plan_bits(COSTS, SIZES, 8, [6]), MatchError, "finite cost at 6 bits"),
    (lambda: plan_bits({"a": {4: math.nan}}, SIZES, 8), MatchError, "finite cost at 4 bits"),
    (lambda: plan_bits({}, {}, 8), ConfigError, "at least one layer"),
    (lambda: plan_bits(COSTS, {"a": 0}, 8), ConfigError, "size of 'a'"),
    (lambda: BitPlan({"a": 12}, {"a": 1}), ConfigError, "bits of 'a'"),
    (lambda: selective(math.nan), ConfigError, "largest_loss"),
    (lambda: selective(start="half"), ConfigError, "start"),
    (lambda: selective(bits=4), ConfigError, "'0' must have a finite cost at 4 bits"),
    (lambda: selective(keep=("0", "1")), ConfigError, "keep leaves no layer"),
    (lambda: selective(keep=("7",)), MatchError, "'7' is no"),
    (lambda: selective(quality=math.nan), TrainingError, "NaN with 0 layers"),
])  # fmt: skip
def test_planning_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_plan_goes_through_its_file(tmp_path):
    plan = BitPlan({"a.0": 4, "a.1": 4, "b": 32, "c": 8}, {"a.0": 10, "a.1": 3, "b": 7, "c": 1}, 0.25)
    text = plan.to_yaml(tmp_path / "plan.yaml")
    assert BitPlan.from_yaml(tmp_path / "plan.yaml") == BitPlan.from_yaml(text) == plan
    assert list(BitPlan.from_yaml(text).bits) == list(plan.bits)
    assert plan.conversions == 4  # float to 4, to float, to 8, to float
    assert BitPlan({"a": 4, "b": 4}, {"a": 1, "b": 1}).conversions == 2
    assert BitPlan({"a": 32}, {"a": 1}).conversions == 0
    assert yaml.safe_load(text)["qat"] == {
        "scheme": "int8",
        "overrides": {"a.0": {"weight_bits": 4}, "a.1": {"weight_bits": 4}, "c": {"weight_bits": 8}},
        "skip": ["b"],
    }
    config = QatConfig.from_dict(yaml.safe_load(text)["qat"])
    assert config.overrides == ("a.0:weight_bits=4", "a.1:weight_bits=4", "c:weight_bits=8")
    assert config.skip == ("b",)


@pytest.mark.parametrize(("text", "match"), [
    ("format: other\n", "format must be"), ("- 1\n", "format must be"), ("a: [\n", "must be a YAML file"),
    ("format: efftrain bit plan 1\nlayers: {a: 4}\n", "must map names"),
    ("format: efftrain bit plan 1\nlayers: {a: {bits: 1, weights: 3}}\n", "bits of 'a'"),
    ("format: efftrain bit plan 1\nlayers: {a: {bits: 4, weights: x}}\n", "size of 'a'"),
    ("!!python/object/apply:os.getcwd []\n", "must be a YAML file"),
])  # fmt: skip
def test_a_damaged_plan_is_refused(text, match, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=match):
        BitPlan.from_yaml(tmp_path / "plan.yaml")


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a YAML file"):
        BitPlan.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(CheckpointError, match="cannot write to"):
        BitPlan({"a": 4}, {"a": 1}).to_yaml(tmp_path / "none" / "plan.yaml")


def chain(length=5):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(length)])


def selective(loss=0, quality=0.0, **options):
    costs = {"0": {8: 1.0}, "1": {8: 2.0}}
    return plan_by_quality(chain(2), lambda net: quality, costs, largest_loss=loss, **options)


def quality_by_layers(model, worth, reference):
    """Return 1 less what each changed layer is worth."""
    return 1 - sum(
        worth[name]
        for name, module in model.named_modules()
        if name in worth and not torch.equal(module.weight, reference.get_submodule(name).weight)
    )


@pytest.mark.parametrize("start", ["quantized", "float"])
def test_selective_plan_stays_within_the_accepted_loss(start):
    model = chain()
    worth = {"0": 0.01, "1": 0.5, "2": 0.02, "3": 0.1, "4": 0.03}
    costs = {name: {4: value} for name, value in worth.items()}
    calls = []

    def evaluate(candidate):
        calls.append(1)
        return quality_by_layers(candidate, worth, model)

    found = plan_by_quality(model, evaluate, costs, largest_loss=0.065, bits=4, start=start)
    assert found.plan.bits == {"0": 4, "1": 32, "2": 4, "3": 32, "4": 4}
    assert found.conversions == found.plan.conversions == 6
    assert found.quality == pytest.approx(0.94)
    assert found.float_quality == 1
    assert [point.quantized for point in found.curves["quantized"]] == [5, 4, 3]
    assert [point.quantized for point in found.curves["float"]] == [0, 1, 2, 3, 4]
    assert found.curves["float"][1].average_bits == pytest.approx((4 + 4 * 32) / 5)
    assert len(calls) == 6


def test_the_starts_differ_where_quality_is_not_monotone():
    model = chain(3)
    qualities = {0: 1.0, 1: 0.5, 2: 0.99, 3: 0.2}
    costs = {name: {8: 1.0} for name in "012"}

    def run(start, loss):
        counts = iter(())

        def apply(net, bits):
            nonlocal counts
            counts = iter([len(bits)])
            return net

        return plan_by_quality(
            model, lambda net: qualities[next(counts, 0)], costs, largest_loss=loss, start=start, apply=apply
        ).plan.quantized

    assert run("quantized", 0.05) == ("0", "1")
    assert run("float", 0.05) == ()
    assert run("quantized", 0.0) == ()
    assert run("float", 1.0) == ("0", "1", "2")


def test_kept_layers_stay_and_ties_go_in_order():
    model = chain(3)
    costs = {name: {8: 1.0} for name in "012"}
    found = plan_by_quality(model, lambda net: 0.0, costs, largest_loss=0, keep={"1": "the middle"})
    assert found.plan.bits == {"0": 8, "1": 32, "2": 8}
    assert round_layers(model, {"0": 8})[1] is not model[1]


class Separable(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.depth, self.point = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1)
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.point(self.depth(self.stem(x)))).mean((2, 3))
        return self.head(F.relu(self.down(F.dropout(F.gelu(self.up(x)), training=self.training))))


def test_rules_of_thumb_keep_layers_high():
    for inputs in (None, torch.randn(1, 3, 4, 4)):
        kept = keep_high(Separable(), inputs)
        assert kept == {
            "stem": "the first layer",
            "depth": "a depthwise convolution",
            "down": "it reads the output of gelu",
            "head": "the last layer",
        }


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.hidden, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 8), Conv1D(2, 8)

    def forward(self, x):
        return self.head(self.hidden(self.lstm(x)[0][:, -1]).relu())


def test_first_and_last_are_weighted_layers_of_any_kind():
    # in the order of calls: the last call comes first in the model
    model = nn.ModuleDict({"head": nn.Linear(4, 2), "body": nn.Linear(4, 4), "table": nn.Embedding(9, 4)})
    model.forward = lambda x: model["head"](model["body"](model["table"](x)).relu())
    assert keep_high(model, torch.tensor([[1, 2]])) == {"table": "the first layer", "head": "the last layer"}
    assert keep_high(Reader(), torch.randn(2, 3, 4)) == {"lstm": "the first layer", "head": "the last layer"}


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "gelu_pytorch_tanh", "relu"])
def test_the_gelu_of_a_transformer_is_found(activation):
    sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, activation_function=activation)).eval()
    kept = keep_high(model, {"input_ids": torch.tensor([[1, 2]])})
    after = {"transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj"} if "gelu" in activation else set()
    assert kept.keys() == {"transformer.wte", "lm_head", *after}


@pytest.mark.parametrize("scheme", ["int8", "int4_weight"])
def test_sensitive_layers_stay_in_float_with_the_reason(scheme):
    torch.manual_seed(0)
    model, data = Separable().eval(), [torch.randn(8, 3, 4, 4) for _ in range(2)]
    options = {"scheme": scheme, **({"group_size": 4} if scheme == "int4_weight" else {})}
    quantized, report = quantize_with_report(model, options, data, keep_sensitive=True, allow_partial=True)
    assert {entry["name"] for entry in report.layers} == {"point", "up"} == set(report.ranges)
    assert report.left_out == {
        "stem": "keep_sensitive: the first layer",
        "depth": "keep_sensitive: a depthwise convolution",
        "down": "keep_sensitive: it reads the output of gelu",
        "head": "keep_sensitive: the last layer",
    }
    for name in report.left_out:
        assert torch.equal(quantized.get_submodule(name).weight, model.get_submodule(name).weight)
    # what the user names is quantized
    named = {"scheme": "int8", "overrides": {"head": {"weight_bits": 4}}}
    _, report = quantize_with_report(model, named, data, keep_sensitive=True, allow_partial=True)
    assert "head" in report.ranges


def test_keeping_every_layer_is_refused():
    with pytest.raises(ConfigError, match=r"keep_sensitive must leave a layer .* 0 \(the first layer\)"):
        quantize_with_report(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "int8_weight", keep_sensitive=True)
