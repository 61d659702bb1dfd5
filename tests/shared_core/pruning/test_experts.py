"""Stacked experts are pruned expert by expert: each matrix is a layer, wherever its axes lie."""

import pytest
import torch
from mixtures import KINDS, fit, losses, mixture, rows, stacks
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from shared_core import Recipe, Session
from shared_core.errors import CompatibilityError, MatchError
from shared_core.modules.experts import expert_weights
from shared_core.modules.weight_views import input_axis, output_axis
from shared_core.pruning import prune
from shared_core.pruning.regularizers import add_group_lasso_gradient_

PRUNE = {"sparsity": 0.5, "begin": 1, "end": 6, "every": 2}
UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def train(kind, options, folder, resume=None):
    return fit(kind, {"prune": {**PRUNE, **options}}, folder, resume)


def shares(model):
    """The sparsity of each expert's matrix, by parameter."""
    return {name: (weight == 0).float().mean((1, 2)).tolist() for name, weight in stacks(model).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_prunes_experts_saves_their_zeros_and_resumes_exactly(kind, tmp_path):
    whole = train(kind, {}, tmp_path / "whole")
    assert losses(whole)[-1] < losses(whole)[0]
    again = train(kind, {}, tmp_path / "again", resume=tmp_path / "whole" / "checkpoint-4")
    state, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in state.items())
    whole.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    # transformers takes Mixtral's and Qwen's apart into one tensor an expert
    zeros = sum(int((value == 0).sum()) for name, value in saved.items() if "experts" in name and "bias" not in name)
    assert zeros == sum(int((weight == 0).sum()) for weight in stacks(whole.model).values()) > 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("criterion", ["magnitude", "taylor", "random", "movement"])
@pytest.mark.parametrize("kind", KINDS)
def test_local_scope_takes_the_same_share_of_every_expert(kind, criterion, tmp_path):
    trained = train(kind, {"criterion": criterion, "scope": "local"}, tmp_path)
    assert {share for found in shares(trained.model).values() for share in found} == {0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_is_ranked_and_limited_by_itself(kind):
    net = mixture(kind)
    stack = dict(net.named_parameters())[UP]
    with torch.no_grad():
        stack[1] *= 1e-3  # under one threshold it goes first
    report = prune(net, {"sparsity": 0.5, "max_layer_sparsity": 0.75})
    assert shares(net)[UP][1] == 0.75
    assert report.capped == [f"{UP}[1]"]
    entry = next(entry for entry in report.tensors if entry["name"] == UP)
    assert entry["experts"] == [int((matrix == 0).sum()) for matrix in stack]
    assert sum(entry["experts"]) == entry["pruned"]
    assert report.pruned == round(0.5 * report.numel)


@pytest.mark.parametrize("kind", KINDS)
def test_n_of_m_lies_along_the_inputs_of_each_expert(kind):
    net = mixture(kind)
    prune(net, {"sparsity": 0.5, "granularity": "n_m"})
    for weight in stacks(net).values():
        assert (weight.unflatten(2, (-1, 4)) != 0).sum(-1).eq(2).all()


def test_tiles_are_outputs_times_inputs_in_either_layout():
    dense, turned = mixture("qwen3_moe"), mixture("gpt_oss", intermediate_size=8)
    for name, weight in stacks(turned).items():
        weight.copy_(dict(dense.named_parameters())[name].detach())
    for net in (dense, turned):
        prune(net, {"sparsity": 0.5, "granularity": "block", "block": "4x2", "include": ["*.experts"]})
    assert all(torch.equal(weight, stacks(turned)[name]) for name, weight in stacks(dense).items())
    assert all((weight.unflatten(2, (-1, 2)).unflatten(1, (-1, 4)) == 0).float().mean((2, 4)).unique().numel() == 2
               for weight in stacks(dense).values())  # fmt: skip


def test_patterns_name_a_stack_by_the_module_or_the_parameter():
    net = mixture("mixtral")
    prune(
        net, {"sparsity": 0.5, "scope": "local", "overrides": {"*.experts": {"sparsity": 0.25}, DOWN: {"sparsity": 0}}}
    )
    assert (shares(net)[UP], shares(net)[DOWN]) == ([0.25] * 4, [0.0] * 4)
    report = prune(mixture("mixtral"), {"sparsity": 0.5, "include": ["*.gate_up_proj"]})
    assert [entry["name"] for entry in report.tensors] == [UP]
    assert report.left_out[DOWN] == "left out by include, skip or min_size"
    assert UP not in {entry["name"] for entry in prune(mixture("mixtral"), {"sparsity": 0.5, "skip": [UP]}).tensors}


def test_rigl_moves_weights_within_each_expert(tmp_path):
    options = {"dynamic": "rigl", "schedule": "one_shot", "scope": "local"}
    trained = train("mixtral", options, tmp_path)
    assert {share for found in shares(trained.model).values() for share in found} == {0.5}


@pytest.mark.parametrize(
    "option", [{"criterion": "wanda"}, {"criterion": "fisher"}, {"cost": "flops"}, {"granularity": "filter"}]
)
def test_what_needs_an_experts_inputs_is_refused(option):
    with pytest.raises(
        MatchError, match=r"MixtralExperts \(MixtralExperts (multiplies each expert's own|holds products)"
    ):
        Session({"prune": {"sparsity": 0.5, **option}}).attach(mixture("mixtral"))
    with pytest.raises(CompatibilityError, match=r"got model\.layers\.0\.mlp\.experts: MixtralExperts"):
        prune(mixture("mixtral"), {"sparsity": 0.5, "include": [UP], **option}, rows(1))


def test_a_refusal_gives_each_reason_once_rare_ones_first():
    recipe = Recipe.from_dict({"prune": {"sparsity": 0.5, "criterion": "fisher", "include": ["*.experts*"]}})
    with pytest.raises(MatchError) as caught:
        Session(recipe).attach(mixture("mixtral"))
    told = str(caught.value)
    assert told.count("left out by include") == told.count("multiplies each expert's own tokens") == 1
    assert told.index("multiplies each expert's own tokens") < told.index("left out by include")


def test_group_lasso_pulls_at_the_outputs_of_each_expert():
    stacked = torch.randn(3, 4, 5)
    together = torch.zeros_like(stacked)
    add_group_lasso_gradient_(together, stacked, 0.1, axis=(0, 1))
    for expert in range(3):
        alone = torch.zeros(4, 5)
        add_group_lasso_gradient_(alone, stacked[expert], 0.1, axis=0)
        assert torch.equal(together[expert], alone)


class Undecorated(nn.Module):
    """As Llama 4 has them: sizes alone tell the layout."""

    def __init__(self, up, down):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.ones(2, *size)) for size in (up, down))


def test_the_layout_is_told_by_the_module_or_its_sizes():
    for kind, axis in (("mixtral", 1), ("qwen3_moe", 1), ("gpt_oss", 2)):
        experts = mixture(kind).model.layers[0].mlp.experts
        assert list(expert_weights(experts)) == ["gate_up_proj", "down_proj"]
        assert (output_axis(experts), input_axis(experts)) == (axis, 3 - axis)
    assert output_axis(Undecorated((16, 6), (6, 8))) == 1
    assert output_axis(Undecorated((6, 16), (8, 6))) == 2
    assert not expert_weights(Undecorated((6, 16), (4, 6)))
    assert not expert_weights(nn.Conv1d(2, 2, 2))
