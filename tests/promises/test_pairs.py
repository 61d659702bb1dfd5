"""Two techniques in one run: resumed bit for bit, and the same in whatever order they are given."""

import contextlib
import itertools

import pytest
import torch
from promise_drivers import assert_resumes, difference, run_hf, run_lightning
from promise_table import EVERYTHING, PAIRS, is_refused, recipe_of

import hf_eff
import lightning_eff
from shared_core.errors import CompatibilityError, ConfigError

HOUSES = {"hf": (run_hf, hf_eff), "lightning": (run_lightning, lightning_eff)}
UNORDERED = list(itertools.combinations(EVERYTHING, 2))


@pytest.mark.parametrize("house", HOUSES)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_resumes_bit_for_bit_from_every_kind_of_step(pair, house, tmp_path):
    assert_resumes(HOUSES[house][0], lambda: recipe_of(*pair), tmp_path, dropout=0.3, shuffle=True)


@pytest.mark.parametrize("house", HOUSES)
@pytest.mark.parametrize("pair", UNORDERED, ids="+".join)
def test_the_order_of_two_callbacks_is_of_no_account(pair, house, tmp_path):
    run, package = HOUSES[house]
    found = []
    for order in (pair, pair[::-1]):
        recipe = recipe_of(*order)
        if house == "lightning" and "distill" in recipe:
            recipe["distill"]["student"] = "net"
        torch.manual_seed(3)
        refused = pytest.raises(CompatibilityError) if is_refused(*pair) else contextlib.nullcontext()
        with refused as told:
            callbacks = [package.EffCallback({key: options}) for key, options in recipe.items()]
            result = run(recipe, tmp_path / order[0], plugin=False, callbacks=callbacks, dropout=0.3)
            assert set(result.receipt["techniques"]) == set(pair)
        found.append(str(told.value) if told else result.weights)
    assert difference(*found) is None


@pytest.mark.parametrize("house", HOUSES)
@pytest.mark.parametrize("key", EVERYTHING)
def test_a_technique_given_twice_is_refused_by_name(key, house, tmp_path):
    run, package = HOUSES[house]
    recipe = recipe_of(key)
    with pytest.raises(ConfigError, match=f"{key} was given twice"):
        run(recipe, tmp_path, plugin=False, callbacks=[package.EffCallback(recipe) for _ in range(2)])
