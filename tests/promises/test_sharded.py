"""FSDP2 and tensor parallelism, gloo processes: equal on all, what one process makes of the joined batch, resumed."""

import math
import re
from pathlib import Path

import pytest
import torch
from codes import assert_codes_close, grid_step
from promise_drivers import difference
from sharded_runs import LAYOUTS, RECIPES, REFUSED_BY_LAYERS, train, write_kept
from two_ranks import ranks_of, run_scripts

from shared_core.lottery_ticket import read_ticket

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_runs.py"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    of_recipes = test_two_processes_that_hold_half_of_each_weight_train_what_one_does
    asked = {
        item.callspec.params["recipe"]
        for item in request.session.items
        if getattr(item, "function", None) is of_recipes
    }
    # Others read the ticket of "lottery".
    recipes = [name for name in RECIPES if name in {*asked, "lottery"}]
    write_kept(folder / "kept")
    run_scripts(ranks_of(SCRIPT, folder, RECIPES=" ".join(recipes)), folder)
    (folder / "one").mkdir()
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def assert_close(found, expected, recipe):
    # gradients in 16 bits are rounded before they are summed over processes, and then weights to one of two neighbors
    tolerance = {"atol": 1e-3, "rtol": 2**-7} if "primary_weights" in RECIPES[recipe] else {"atol": 1e-6, "rtol": 0}
    if recipe.startswith("stochastic"):
        tolerance["atol"] = 4e-3  # a neighbor drawn otherwise changes the gradients that follow
    if "qat" in RECIPES[recipe]:
        tolerance = {"atol": 1e-4, "rtol": 1e-4}  # a code's share of a gradient
    group = RECIPES[recipe].get("qat", {}).get("group_size")
    scheme = RECIPES[recipe].get("qat", {}).get("scheme")
    for name, weight in expected["weights"].items():
        if scheme == "fp8":  # whose codes lie at other distances
            far = (found["weights"][name] - weight).abs() > 1e-4 * weight.abs() + 1e-4
            assert far.double().mean() <= 0.05
            continue
        if scheme and weight.dim() > 1:
            ours, theirs = (value.reshape(-1, group or value.shape[1]) for value in (found["weights"][name], weight))
            assert_codes_close(ours, theirs, grid_step(theirs), max_flips=0.05)
            continue
        torch.testing.assert_close(found["weights"][name], weight, **tolerance)
    if "soup" in RECIPES[recipe]:
        ours, theirs = (run["report"]["soup"] for run in (found, expected))
        assert ours["ingredients"] == theirs["ingredients"]
        assert "NaN" in str(ours)
    for key in RECIPES[recipe]:
        ours, theirs = (run["session"]["techniques"][key] for run in (found, expected))
        if key == "prune" and "primary_weights" not in RECIPES[recipe]:
            assert difference(ours["masks"], theirs["masks"]) is None
        if key == "qat":
            torch.testing.assert_close(ours["ranges"], theirs["ranges"], **tolerance)
            torch.testing.assert_close(ours["learned"], theirs["learned"], **tolerance)


def assert_counted(run):
    told, zeros = run["report"], {name: int((weight == 0).sum()) for name, weight in run["weights"].items()}
    for entry in told.get("prune", {}).get("tensors", ()):
        assert entry["pruned"] == zeros[entry["name"]], entry["name"]
    for entry in told.get("lottery", {}).get("tensors", ()):
        assert entry["numel"] - entry["nonzero"] == zeros[entry["name"]], entry["name"]


def assert_one_ticket(folder, options, report):
    found = [folder / number / options["out"] / "ticket.safetensors" for number in ("one", "two")]
    assert [path.is_file() for path in found] == [options.get("control") is None] * 2
    assert report["replay"] == ("bit-equal" if options["out"] == "second" else None)
    if "control" not in options:
        one, two = map(read_ticket, found)
        assert difference(one.masks, two.masks) is None
        assert two.kept < two.numel
        torch.testing.assert_close(dict(one.weights), dict(two.weights), atol=1e-6, rtol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_that_hold_half_of_each_weight_train_what_one_does(runs, recipe, monkeypatch):
    folder, ranks = runs
    first, second = (run[recipe] for run in ranks)
    assert difference(first, second) is None
    assert difference(first["ended"]["weights"], first["resumed"]["weights"]) is None
    assert difference(first["ended"]["session"]["techniques"], first["resumed"]["session"]["techniques"]) is None
    monkeypatch.chdir(folder / "one")
    alone, saved = train(RECIPES[recipe])
    assert_close(first["ended"], alone, recipe)
    assert_counted(first["ended"])
    assert first["saved"]["session"].keys() == saved["session"].keys()
    if "lottery" in RECIPES[recipe]:
        assert_one_ticket(folder, RECIPES[recipe]["lottery"], first["ended"]["report"]["lottery"])
        monkeypatch.chdir(folder / "two")
    one_goes_on, _ = train(RECIPES[recipe], resume=first["saved"])
    assert_close(one_goes_on, alone, recipe)


def test_adapters_and_copies_for_vmap_are_made_before_sharding_or_in_larger_blocks(runs):
    for early, alone, by_vmap in (rank["refused"] for rank in runs[1]):
        assert "already sharded" in early
        assert "lora: middle is sharded on its own" in alone
        assert "middle (Linear) is sharded" in by_vmap


IN_LAYERS = [
    "qat", "qat-minmax", "qat-group", "qat-ternary", "qat-dynamic", "qat-fp8", "qat-static", "qat-block", "taylor",
    "movement", "recompute",
    "rigl", "2:4", "filter", "filter-taylor", "layer", "average", "swa", "block", "selective", "matmul", "logits",
    "qat-prune", "int4-taylor", "lottery", "ticket-second", "ticket-rate", "soup", "soup-qat-prune",
]  # fmt: skip
FEW = ["qat", "qat-group", "taylor", "filter", "average", "soup"]


@pytest.fixture(
    scope="module",
    params=[("tp", FEW), *(pytest.param((layout, IN_LAYERS), marks=pytest.mark.slow) for layout in ("tp", "fsdp2+tp"))],
    ids=lambda param: f"{param[0]}-{len(param[1])}",
)
def runs_in_layers(request, tmp_path_factory):
    layout, recipes = request.param
    folder = tmp_path_factory.mktemp("layers")
    number = math.prod(LAYOUTS[layout])
    run_scripts(ranks_of(SCRIPT, folder, number=number, LAYOUT=layout, RECIPES=" ".join(recipes)), folder)
    (folder / "one").mkdir()
    return folder / "one", recipes, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(number)]


def test_processes_that_hold_parts_of_layers_train_what_one_does(runs_in_layers, monkeypatch):
    folder, recipes, ranks = runs_in_layers
    monkeypatch.chdir(folder)
    for recipe in recipes:
        first, *others = (run[recipe] for run in ranks)
        assert all(difference(first, other) is None for other in others), recipe
        assert difference(first["ended"]["weights"], first["resumed"]["weights"]) is None, recipe
        alone, saved = train(RECIPES[recipe])
        assert_close(first["ended"], alone, recipe)
        assert first["saved"]["session"].keys() == saved["session"].keys()
        assert_counted(first["ended"])
        if recipe == "ticket-second":
            assert first["ended"]["report"]["lottery"]["replay"] == "bit-equal"


def test_what_tensor_parallelism_rules_out_is_refused_with_the_reason(runs_in_layers):
    for run in runs_in_layers[2]:
        assert run["refused"].keys() == REFUSED_BY_LAYERS.keys()
        for name, told in run["refused"].items():
            (key,) = REFUSED_BY_LAYERS[name]
            rule = rf"(recipe: )?{key} .*cannot be combined with tensor parallelism.*: .*; "
            assert any(re.match(rule, line) for line in told.splitlines()), (name, told)
