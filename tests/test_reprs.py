"""What a config, a recipe, a callback or a plugin prints makes it again."""

import pytest
from promise_table import TECHNIQUES, VARIANTS
from torch import nn

import hf_eff
import lightning_eff
from shared_core import Recipe
from shared_core.engine.registry import REGISTRY

NAMES = {one.config_name: one.config_class for one in REGISTRY.values()} | {"Recipe": Recipe}
HF = {kind.key: kind for kind in (getattr(hf_eff, name) for name in hf_eff.__all__) if getattr(kind, "key", "")}
PLUGINS = {
    "LossScalingPrecision": [{}, {"precision": "32-true", "device": "cpu", "kind": "static", "init_scale": 8}],
    "Fp8Precision": [{}, {"precision": "32-true", "recipe": "delayed", "amax_history": 3}],
    "EffDDPStrategy": [{}, {"comm": {"hook": "powersgd", "rank": 2}, "find_unused_parameters": True}],
    "EffFSDPStrategy": [{}, {"blocks": ["a.*"], "backward_prefetch": 1, "save_distributed_checkpoint": True}],
}


def exactly(recipe):
    """Return options with their types: `end=1` is the first step, `end=1.0` the last."""
    return {key: repr(config.to_dict()) for key, config in recipe.items()}


@pytest.mark.parametrize("row", (TECHNIQUES | VARIANTS).values(), ids=lambda row: "-".join([row.key, *row.options]))
def test_configs_recipes_and_callbacks(row):
    options = row.options | ({"teacher": 'it\'s "one"'} if row.needs_teacher else {})
    options |= {"ticket": "tickets/3", "out": "tickets"} if row.needs_ticket else {}
    recipe = Recipe.from_dict({row.key: options} | row.beside)
    config = recipe[row.key]
    assert eval(repr(config), NAMES) == config
    assert exactly(eval(repr(recipe), NAMES)) == exactly(recipe)
    for package in (hf_eff, lightning_eff):
        own = getattr(package, HF[row.key].__name__, None)  # Lightning scales losses by a plugin
        for callback in [package.EffCallback(recipe), *([own(**options)] if own else [])]:
            again = eval(repr(callback), NAMES | {name: getattr(package, name) for name in package.__all__})
            assert type(again) is type(callback)
            assert exactly(again.recipe) == exactly(callback.recipe) != {}


def test_a_table_row_of_every_technique_is_tested():
    assert {row.key for row in TECHNIQUES.values()} | {"comm"} >= {*REGISTRY, *HF}


def test_what_is_printed_is_what_was_given():
    assert repr(hf_eff.Pruning(sparsity="8e-1", end=1, criterion="magnitude")) == "Pruning(sparsity=0.8, end=1)"
    teacher = nn.Linear(2, 2)
    assert repr(lightning_eff.Distillation(teacher=teacher, alpha=0.1)) == "Distillation(teacher=<Linear>, alpha=0.1)"
    assert repr(Recipe.from_dict({"distill": {"teacher": teacher}})) == (
        "Recipe.from_dict({'distill': {'teacher': <Linear>}})"
    )


@pytest.mark.parametrize(("name", "given"), [(name, one) for name, several in PLUGINS.items() for one in several])
def test_plugins_and_strategies(name, given):
    plugin = getattr(lightning_eff, name)(**given)
    again = eval(repr(plugin), {name: type(plugin)})
    assert repr(again) == repr(plugin)
    assert all(option in repr(plugin) for option in given)
    assert getattr(again, "eff_recipe", None) == getattr(plugin, "eff_recipe", None)
    assert vars(again).get("sharding") == vars(plugin).get("sharding")
    assert vars(again).get("given") == vars(plugin).get("given")
