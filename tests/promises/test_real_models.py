"""The promises on models as users train them: a mixture of experts, a tied language model, a ResNet with batch norm."""

import promise_drivers
import promise_table
import pytest
import torch
from mixtures import KINDS, mixture, stacks
from promise_drivers import copied, difference, run_bare, run_hf, run_lightning, saved_state
from real_models import BATCH, GROWING, MODELS, RECIPES, REFUSED, STEPS, VOCAB, recipe_for, use
from torch import nn

from shared_core.errors import EffError
from shared_core.low_rank import load as load_factorized
from shared_core.modules.matching import StackedExperts

CELLS = [(model, recipe) for model in MODELS for recipe in RECIPES if (model, recipe) not in REFUSED]
CLIP = 1.0  # the Hugging Face Trainer's default; Lightning's is not to clip


@pytest.fixture
def train(request, monkeypatch):
    """Train a model with a recipe in one driver, clipped if it is told to be."""
    model, recipe = request.param
    use(model, monkeypatch.setattr)

    def run(driver, folder=None, *, clips, **options):
        clip, made = CLIP if clips else 0.0, recipe_for(model, recipe)
        torch.manual_seed(3)
        if driver == "bare":
            return run_bare(made, clip=clip)
        options |= {"max_steps": STEPS, "batch": BATCH}
        if driver == "hf":
            return run_hf(made, folder, seed=0, max_grad_norm=clip, **options)
        return run_lightning(made, folder, gradient_clip_val=clip or None, **options)

    run.model, run.recipe = request.param
    run.clips = request.param in CELLS and CELLS.index(request.param) % 2 == 0
    return run


cells = pytest.mark.parametrize("train", CELLS, ids="-".join, indirect=True)


def layers_of(*kinds):
    return [module for module in promise_table.make_net().modules() if isinstance(module, kinds)]


def num_weights():
    return sum(parameter.numel() for parameter in promise_table.make_net().parameters())


def check_prune(told, weights):
    assert told["pruned"] == sum(one["pruned"] for one in told["tensors"]) >= 0.1 * told["numel"]
    for one in told["tensors"]:
        assert int((weights[one["name"].removeprefix("net.")] == 0).sum()) >= one["pruned"]


def check_share(told, weights):
    assert told["tensors"]
    for one in told["tensors"]:
        values = weights[one["name"].removeprefix("net.")].unique()
        assert one["values"] <= len(values) <= 9  # 2³, and the zeros of pruned ones


COUNTED = {
    "prune": check_prune,
    "cluster": check_share,
    "qat": lambda told, weights: told["layers"] == len(layers_of(nn.Linear, nn.Conv2d, nn.Embedding, StackedExperts)),
    "lora": lambda told, weights: told["layers"] == len(layers_of(nn.Linear)) - 1 + 2 * len(layers_of(StackedExperts)),
    "distill": lambda told, weights: told["batches"] == STEPS and "warning" not in told,
    "checkpointing": lambda told, weights: told["recomputations"] == STEPS * told["blocks"] > 0,
    "primary_weights": lambda told, weights: (
        told["elements"] == sum(one.numel() for one in promise_table.make_net().parameters())
    ),
    "average": lambda told, weights: told["updates"] > 0,
    "activations": lambda told, weights: told["bytes_after"] < told["bytes_before"],
    "fp8": lambda told, weights: told["layers"] > 0,
    "low_rank": lambda told, weights: told["parameters_after"] < told["parameters_before"],
    "dp": lambda told, weights: told["steps"] == STEPS,
    "lottery": lambda told, weights: 0 < told["kept"] < told["numel"],
    "loss_scale": lambda told, weights: told["steps"] == STEPS,
}


@cells
def test_three_drivers_train_the_same_weights_and_their_receipts_say_what_happened(train, tmp_path):
    ends = {} if "soup" in RECIPES[train.recipe] else {"bare": train("bare", clips=not train.clips)}
    ends |= {name: train(name, tmp_path / name, clips=not train.clips) for name in ("hf", "lightning")}
    first = next(iter(ends.values()))
    for name, end in ends.items():
        assert difference(first.weights, end.weights) is None, name
        assert end.receipt["finished"]
        assert end.receipt["steps"]["applied"] == STEPS
        told = end.receipt["techniques"]
        by_plugin = {"loss_scale"} if name == "lightning" else set()
        assert told.keys() | by_plugin == recipe_for(train.model, train.recipe).keys() | by_plugin
        for key in told.keys() & COUNTED.keys():
            assert COUNTED[key](told[key], end.weights) in (True, None), (name, key)


EXPERTS = {
    "prune": {"prune": {**GROWING, "scope": "local"}},
    "prune-2:4": {"prune": {**GROWING, "granularity": "n_m", "schedule": "one_shot"}},
    "prune+qat": {"prune": {**GROWING, "scope": "local"}, "qat": {"scheme": "int8_dynamic", "begin": 2}},
    "qat-int4": {"qat": {"scheme": "int4_weight", "begin": 2}},
    "lottery": {"lottery": {"rewind_to": 2}},
    "lora": {"lora": {"rank": 2, "save": "merged"}},
    "fp8": {"fp8": {"recipe": "delayed", "amax_history": 3}},
}
"""Recipes whose techniques reach stacked experts."""


def check_stacks(key, told, stacked):
    """Recount zeros, codes and the ranks of what was added in the experts of a file; products are counted by layer."""
    for name, weight in stacked.items():
        if "prune" in told:
            (found,) = (one for one in told["prune"]["tensors"] if one["name"].removeprefix("net.") == name)
            zeros = (weight == 0).sum((1, 2)).tolist()
            assert all(zero >= pruned > 0 for zero, pruned in zip(zeros, found["experts"], strict=True))
        if "lottery" in told:
            assert (weight == 0).any((1, 2)).all()
        if "fp8" in told:
            layers = [one for one in told["fp8"]["per_layer"] if one["name"].removeprefix("net.").startswith(name)]
            assert len(layers) == len(weight)
            assert any(sum(one["scaled_mm"].values()) + sum(one["emulated"].values()) for one in layers)
        if "lora" in told:
            (found,) = (one for one in told["lora"]["per_layer"] if one["name"].removeprefix("net.") == name)
            added = weight - stacks(promise_table.make_net())[name]
            assert found["adapter_size"] > 0
            assert all(torch.linalg.matrix_rank(one, rtol=1e-4) <= 2 for one in added)
        if "qat" in told:
            (found,) = (one for one in told["qat"]["per_layer"] if one["name"].endswith("experts"))
            assert found["input"] == ("none" if key == "qat-int4" else "token")
            groups = weight.unflatten(2, (-1, found["group_size"])) if key == "qat-int4" else weight.unsqueeze(2)
            span = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
            step = span / 15 if key == "qat-int4" else groups.abs().amax(-1) / 127
            codes = groups / step.clamp(min=1e-30).unsqueeze(-1)
            torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("key", EXPERTS)
@pytest.mark.parametrize("kind", KINDS)
def test_stacked_experts_keep_the_promises(kind, key, tmp_path, monkeypatch):
    use("moe", monkeypatch.setattr)
    sizes = {"vocab_size": VOCAB, "intermediate_size": 32, "moe_intermediate_size": 16}  # of which FP8 takes all
    for module in (promise_table, promise_drivers):
        monkeypatch.setattr(module, "make_net", lambda *_, **__: mixture(kind, **sizes))

    def recipe():
        made = {name: dict(options) for name, options in EXPERTS[key].items()}
        if "lottery" in made:
            made["lottery"] |= promise_table.make_ticket("weights", 2)
        return made

    options = {"max_steps": STEPS, "batch": BATCH, "save_every": 1}
    ends = {"bare": run_bare(recipe())}
    for name, run, own in (("hf", run_hf, {"seed": 0}), ("lightning", run_lightning, {})):
        ends[name] = whole = run(recipe(), tmp_path / name, **options | own)
        assert difference(ends["bare"].weights, whole.weights) is None, name
        stop = 2 if name == "hf" else 4  # within an epoch, at its end
        resumed = tmp_path / f"{name}-again"
        again = run(recipe(), resumed, resume=copied(whole, stop, resumed), **options | own)
        assert difference(saved_state(whole.checkpoints[STEPS]), saved_state(again.checkpoints[STEPS])) is None, name
        check_plain(name, whole.checkpoints[STEPS], factorized=False)
        whole.model.save_pretrained(tmp_path / f"{name}-final")
        loaded, info = type(whole.model).from_pretrained(tmp_path / f"{name}-final", output_loading_info=True)
        assert not any(info.values())
        assert difference(whole.weights, dict(loaded.state_dict())) is None
        check_stacks(key, whole.receipt["techniques"], stacks(loaded))


def check_plain(front_end, path, factorized):
    net = promise_table.make_net()
    if factorized and front_end == "hf":
        load_factorized(net, path)
    elif front_end == "hf":
        _, info = type(net).from_pretrained(path, output_loading_info=True)
        assert not any(info.values())
    else:
        content = torch.load(path, weights_only=True)["state_dict"]
        net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in content.items()}, strict=True)


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
@cells
def test_stopped_at_an_epochs_last_batch_and_within_one_is_never_stopped(train, front_end, tmp_path):
    options = {"clips": train.clips, "dropout": 0.3, "shuffle": True, "save_every": 1}
    whole = train(front_end, tmp_path / "whole", **options)
    for step in (1, STEPS):
        check_plain(front_end, whole.checkpoints[step], "low_rank" in RECIPES[train.recipe])
    for stop in (2, 4) if front_end == "hf" else (4,):  # Lightning within an epoch: below
        folder = tmp_path / f"from{stop}"
        again = train(front_end, folder, resume=copied(whole, stop, folder), **options)
        for step in (stop + 1, STEPS):
            assert difference(saved_state(whole.checkpoints[step]), saved_state(again.checkpoints[step])) is None
        assert difference(whole.weights, again.weights) is None


# a soup's ingredients are whole steps of one folder
@pytest.mark.parametrize("train", [c for c in CELLS if "soup" not in RECIPES[c[1]]], ids="-".join, indirect=True)
def test_stopped_within_an_accumulation_window_is_never_stopped(train, tmp_path):
    batch, last = 3 + 2 * (CELLS.index((train.model, train.recipe)) % 3), 2 * STEPS
    options = {"clips": train.clips, "dropout": 0.3, "shuffle": True, "accumulate": 2, "save_at_batches": (batch, last)}
    whole = train("lightning", tmp_path / "whole", **options)
    again = train("lightning", tmp_path / "again", resume=whole.checkpoints[batch], **options)
    assert difference(saved_state(whole.checkpoints[last]), saved_state(again.checkpoints[last])) is None
    assert difference(whole.weights, again.weights) is None


@pytest.mark.parametrize("criterion", ["shapley", "neuron_taylor"])
def test_what_a_window_has_shown_of_units_is_kept_where_it_is_stopped(criterion, tmp_path, monkeypatch):
    use("tied", monkeypatch.setattr)
    recipe = {"prune": {"criterion": criterion, "granularity": "neuron", "sparsity": 0.5, "begin": 1, "end": 3}}

    def run(folder, **options):
        torch.manual_seed(3)
        options |= {"accumulate": 2, "save_at_batches": (5,), "max_steps": 3, "shuffle": True, "dropout": 0.3}
        return run_lightning(recipe, folder, batch=BATCH, gradient_clip_val=None, **options)

    whole = run(tmp_path / "whole")
    assert difference(whole.weights, run(tmp_path / "again", resume=whole.checkpoints[5]).weights) is None


@pytest.mark.parametrize("driver", ["bare", "hf", "lightning"])
@pytest.mark.parametrize("train", REFUSED, ids="-".join, indirect=True)
def test_what_a_model_cannot_be_trained_with_is_refused_by_name(train, driver, tmp_path):
    with pytest.raises(EffError, match=f"(?s){REFUSED[train.model, train.recipe]}"):
        train(driver, tmp_path, clips=True)
    assert not list(tmp_path.glob("**/*.safetensors"))
