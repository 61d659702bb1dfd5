"""How much of a model a technique reaches is told when a run begins; where it is less than half, the run stops."""

import re

import pytest
import torch
from plain_loop import begun_session
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

from shared_core import Recipe, Session
from shared_core.engine.checks.coverage import count
from shared_core.errors import ConfigError, MatchError
from shared_core.quantization.post_training.quantize import quantize_with_report
from shared_core.tools.explain import explain


class Experts(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.up = nn.Parameter(torch.ones(number, width, width))
        self.scale = nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x):
        return torch.einsum("bi,eio->bo", x, self.up) * self.scale[0]


class Transposed(nn.Module):
    """As transformers' Conv1D, which GPT-2 is made of."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return x @ self.weight


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.read, self.body, self.last = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        return self.last(self.body(nn.functional.linear(self.first(x), self.read.weight)))


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.linear(self.body(self.embed(x)), self.embed.weight)

    def penalty(self):
        return self.body.weight.square().sum()


class Plain(nn.Module):
    """Matrices under names that tell nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.position_embeddings = nn.Parameter(torch.ones(5, 4))
        self.relative_table = nn.Parameter(torch.ones(2, 3, 4))
        self.A_log = nn.Parameter(torch.ones(3, 4))


def tied():
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("make", "multiplying", "beside"),
    [
        (lambda: nn.Linear(8, 1), 8, {"biases": 1}),
        (lambda: nn.ConvTranspose3d(2, 3, 2, groups=1), 48, {"biases": 3}),
        (lambda: Conv1D(4, 8), 32, {"biases": 4}),
        (lambda: nn.Bilinear(2, 3, 4), 24, {"biases": 4}),
        (lambda: nn.MultiheadAttention(4, 2), 64, {"biases": 16}),
        (lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True, bias=False), 64, {"biases": 8}),
        (lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), 2 * (48 + 32 + 8 + 64 + 32 + 8), {"biases": 128}),
        (lambda: nn.GRUCell(3, 4), 84, {"biases": 24}),
        (lambda: nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.PReLU()), 0,
         {"embeddings": 20, "norms": 8, "others": 1}),
        (lambda: Experts(4, 8), 256, {"others": 8}),
        (Plain, 32, {}),
        (Positions, 0, {"others": 56}),
        (tied, 16, {"embeddings": 32}),
        (lambda: weight_norm(nn.Linear(4, 3, bias=False)), 12, {"others": 3}),
    ],
)  # fmt: skip
def test_weights_are_counted_by_what_they_do(make, multiplying, beside):
    found = count(make())
    assert (sum(weight.numel for weight in found.multiplying), found.beside) == (multiplying, beside)


def began(net, recipe):
    session, _ = begun_session(recipe, net, 4)
    return session


def notes(net, recipe):
    return [note for note in began(net, recipe).notes if "multiply activations" in note]


def with_experts():
    return nn.Sequential(nn.Linear(8, 16), Experts(2, 16), Transposed(16), nn.Conv1d(16, 2, 32), nn.Linear(1, 2))


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ({"qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5}}, ["prune", "qat"]),
        ({"cluster": {"bits": 2, "min_size": 0}}, ["cluster"]),
        ({"average": {"kind": "ema"}}, []),
        ({"checkpointing": {"policy": "block", "include": ["0"]}}, []),
    ],
)
def test_the_number_is_told_first(recipe, keys):
    session = began(with_experts(), recipe)
    assert [note.partition(":")[0] for note in session.notes[: len(keys)]] == keys
    for note in session.notes[: len(keys)]:
        assert ": covers 60.0 % of the weights that multiply activations; unchanged: 26.6 % in" in note
        assert "Experts" in note
        assert "Transposed" in note
        assert "not counted: 20 in biases, 16 in other parameters" in note
    told = session.receipt()["coverage"]
    assert [*told] == keys
    assert all((one["within"], one["total"]) == (1154, 1922) for one in told.values())


def test_all_within_reach_is_no_note():
    session = began(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)), {"prune": {"sparsity": 0.5}})
    assert not session.notes
    assert session.receipt()["coverage"]["prune"]["share"] == 1


def mixtral():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=8, num_key_value_heads=2, num_local_experts=4, **sizes))


def frozen_backbone():
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))
    net[0].requires_grad_(False)
    return net


def test_stacked_experts_are_within_reach(tmp_path):
    out = {"out": str(tmp_path / "out")}
    for recipe in ({"prune": {"sparsity": 0.5}}, {"lottery": out}, {"qat": {"scheme": "int8_weight"}}):
        session = began(mixtral(), recipe)
        assert session.receipt()["coverage"][next(iter(recipe))]["share"] > 0.98


@pytest.mark.parametrize("key", ["prune", "low_rank"])
def test_a_mixture_of_experts_stops(key):
    options = {
        "prune": {"sparsity": 0.5, "criterion": "wanda"},
        "low_rank": {"rank": 2, "min_size": 0, "force": True},
    }[key]
    net = mixtral()
    before = {name: type(module) for name, module in net.named_modules()}
    with pytest.raises(MatchError) as error:
        Session(Recipe.from_dict({key: options})).attach(net)
    assert {name: type(module) for name, module in net.named_modules()} == before
    text = str(error.value)
    assert text.startswith(f"{key}: covers only 1")
    assert "MixtralExperts" in text
    assert "--eff_allow_partial true (allow_partial: true at the top of a recipe)" in text
    (note,) = notes(mixtral(), {key: options, "allow_partial": True})
    assert note.startswith(f"{key}: covers 1")


def test_the_user_may_mean_it():
    assert notes(mixtral(), {"prune": {"sparsity": 0.5, "include": ["*_proj"]}})
    # what was skipped was asked for, but for it most is within reach
    assert notes(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 32)), {"prune": {"sparsity": 0.5, "skip": ["last"]}})
    with pytest.raises(MatchError, match="MixtralExperts"):
        notes(mixtral(), {"low_rank": {"rank": 2, "min_size": 0, "force": True, "skip": ["lm_head"]}})
    for pattern in ("*.mlp.*", "*.experts.*_proj"):  # the experts by their own names
        assert notes(mixtral(), {"prune": {"sparsity": 0.5, "skip": [pattern]}})


@pytest.mark.parametrize("key", ["prune", "cluster", "low_rank", "lora", "qat", "fp8"])
def test_the_smallest_size_leaves_smaller_layers_which_are_told_and_stop_nothing(key):
    need = {"prune": {"sparsity": 0.5}, "cluster": {"bits": 2}, "low_rank": {"rank": 2}, "qat": {"scheme": "int8"},
            "lora": {"rank": 2, "base": "none", "include": ["Linear"]}, "fp8": {"recipe": "tensorwise"}}  # fmt: skip
    sizes = (16, 16), (16, 64), (64, 16), (16, 16)  # fp8 leaves the first and the last by itself
    net = nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in sizes))
    session = began(net, {key: {**need[key], "min_size": 1024, **({"skip": []} if key == "low_rank" else {})}})
    assert session.coverage[key].within == 2 * 1024
    assert re.search(r"2 Linear \([^)]*min_size", session.coverage[key].line())


@pytest.mark.parametrize("options", [{}, {"include": ["1"]}])
def test_frozen_weights_are_told_beside_what_trains_weights_alone(options):
    (told,) = notes(frozen_backbone(), {"prune": {"sparsity": 0.5, **options}})
    assert told.startswith("prune: covers 100 % of the weights that multiply activations (not counted: ")
    assert "1,024 in frozen weights" in told


def test_frozen_layers_that_are_quantized_are_named():
    session = began(frozen_backbone(), {"qat": {"scheme": "int8"}})
    assert session.coverage["qat"].share == 1
    assert any(note.startswith("qat: frozen layers") and ": 0." in note for note in session.notes)


def test_factors_stand_for_the_layer_that_they_are_made_of():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    session = began(net, {"low_rank": {"rank": 2, "min_size": 0, "skip": []}, "prune": {"sparsity": 0.5}})
    assert [one.share for one in session.coverage.values()] == [1, 1]


def test_a_child_within_reach_does_not_stand_for_its_parent():
    net = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    session = began(net, {"low_rank": {"rank": 2, "min_size": 0, "skip": []}, "allow_partial": True})
    assert session.coverage["low_rank"].within == 2 * 64


def test_explain_tells_it_and_that_the_run_would_stop():
    recipe = {"low_rank": {"rank": 2, "min_size": 0, "force": True}}
    told = explain(Recipe.from_dict(recipe), mixtral(), total_steps=10)
    assert told.coverage["low_rank"].share < 0.5
    assert "at least 50% is required" in told.conflicts[0]
    told = explain(Recipe.from_dict({**recipe, "allow_partial": True}), mixtral(), total_steps=10)
    assert not told.conflicts
    assert "multiply activations" in told.remarks[0]


def test_a_recipe_carries_the_permission(tmp_path):
    recipe = Recipe.from_dict({"allow_partial": "true", "prune": {"sparsity": 0.5}})
    assert [*recipe] == ["prune"]
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert recipe.allow_partial
    assert Recipe.from_yaml(tmp_path / "recipe.yaml") == recipe == eval(repr(recipe), {"Recipe": Recipe})
    assert Recipe.from_flags({"prune_sparsity": 0.5, "eff_allow_partial": "true"}) == recipe
    assert recipe != Recipe.from_dict({"prune": {"sparsity": 0.5}})
    alone = Recipe.from_dict({"allow_partial": True})
    assert alone.merged(Recipe.from_dict({"prune": {"sparsity": 0.5}})) == recipe
    with pytest.raises(ConfigError, match=r"recipe\.allow_partial: allow_partial must be true or false, got 1"):
        Recipe.from_dict({"allow_partial": 1})


def test_qat_leaves_what_is_computed_with_past_its_forward_and_tells():
    net = TiedByHand()
    session = began(net, {"qat": {"scheme": "int8"}})
    assert session.coverage["qat"].share == 1
    assert type(net.embed) is nn.Embedding
    assert type(net.body) is not nn.Linear  # a penalty only looks
    _, report = quantize_with_report(TiedByHand(), "int8_weight")
    assert not report.left_out  # no training goes past it, and both uses are of the quantized weight


def test_a_quantized_model_tells_what_is_no_layer():
    net = nn.Sequential(nn.Linear(8, 8), Experts(4, 8), nn.Linear(8, 2))
    _, report = quantize_with_report(net, "int8_weight", allow_partial=True)
    (note,) = report.notes
    assert note.startswith("qat: covers 23.8 % of the weights that multiply activations; unchanged: 76.")


def test_qat_leaves_factors_whose_product_is_computed_with_past_their_forward():
    net = Reading()
    found = notes(net, {"qat": {"scheme": "int8"}, "low_rank": {"rank": 2, "min_size": 0, "include": ["read", "body"]}})
    assert "qat: covers 75 % of" in found[1].replace("75.0", "75")
    assert "25.0 % in 1 Linear (Reading computes with its weight itself, " in found[1]


def test_fp8_leaves_what_is_computed_with_past_its_forward_and_tells():
    net = Reading()
    (note,) = notes(net, {"fp8": {"recipe": "tensorwise", "include": ["*"]}})
    assert "25.0 % in 1 Linear (Reading computes with its weight itself, " in note
    assert type(net.read) is nn.Linear
    assert type(net.body) is not nn.Linear
