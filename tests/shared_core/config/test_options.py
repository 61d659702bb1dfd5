"""Options that only some values of another option have a use for."""

import pytest

from shared_core import Recipe
from shared_core.cli.arguments import describe_flags
from shared_core.errors import ConfigError


@pytest.mark.parametrize(("section", "message"), [
    ({"qat": {"scheme": "int8", "percentile": 99}}, "qat: percentile .*range=percentile.*range=ema"),
    ({"qat": {"scheme": "int8", "range": "kl", "ema_constant": 0.5}}, "ema_constant .*range=ema"),
    ({"fp8": {"recipe": "rowwise", "amax_history": 4}}, "amax_history .*recipe=delayed"),
    ({"loss_scale": {"kind": "dynamic", "margin": 3}}, "margin .*kind=auto"),
    ({"loss_scale": {"kind": "auto", "floor_window": 3}}, "floor_window .*kind=enhanced"),
    ({"lora": {"rank": 2, "base": "int8", "double_quant": False}}, "base=nf4 or fp4"),
    ({"qat": {"scheme": "fp8_static", "range": "kl"}}, "range=kl needs inputs other than fp8_static.*change one"),
    ({"prune": {"sparsity": 0.5, "threshold": 0.1}}, "threshold .*criterion=threshold"),
])  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.from_dict(section)
    ((key, options),) = section.items()
    plain = Recipe.from_dict({key: dict(list(options.items())[:-1])})
    assert Recipe.from_dict(plain.to_dict()) == plain  # every default written out


def test_a_step_is_not_a_share_of_the_run():
    step, share = (Recipe.from_dict({"prune": {"sparsity": 0.5, "end": end}}) for end in (1, 1.0))
    assert step != share
    assert step == Recipe.from_dict(step.to_dict())
    assert hash(step) == hash(Recipe.from_dict(step.to_dict()))
    (change,) = share.changes_since(step.to_dict())
    assert "end is 1.0 from now on, was 1" in change
    assert step.changes_since(step.to_dict()) == []


def test_an_option_that_a_saved_run_did_not_know_has_changed_only_from_its_default():
    recipe, other = (Recipe.from_dict({"qat": {"scheme": "int8", "inputs": name}}) for name in ("auto", "none"))
    saved = recipe.to_dict()
    saved["qat"].pop("inputs")
    assert recipe.changes_since(saved) == []
    assert "inputs is none from now on, was auto" in other.changes_since(saved)[0]


def test_a_position_that_is_written_otherwise_is_the_default():
    section = {"comm": {"hook": "bf16", "begin": "0.1"}}  # as a flag gives it
    assert Recipe.from_dict(section)["comm"].begin == "0.1"
    with pytest.raises(ConfigError, match=r"begin .*hook=powersgd"):
        Recipe.from_dict({"comm": {"hook": "bf16", "begin": 1}})


def test_help_tells_what_an_option_and_its_values_need():
    told = {row["flag"]: row["help"] for row in describe_flags("prune", "distill")}
    assert told["--prune_threshold"].endswith("Required, but only with criterion=threshold.")
    assert "n_m only with schedule=one_shot; layer only with scope=auto or global." in told["--prune_granularity"]
    assert told["--distill_budget_mib"].endswith("Only with chunked.")
    assert told["--distill_vocab_size"].endswith(" Not with teacher=mutual.")
    assert (
        "movement only with granularity=unstructured, n_m or block, not with schedule=one_shot or dynamic=rigl;"
        in (told["--prune_criterion"])
    )


@pytest.mark.parametrize("section", [{"qat": {"scheme": "int9"}}, {"prune": {"sparsity": 0.5, "criterion": "wandaa"}}])
def test_a_misspelt_choice_of_many_shows_few_of_them_and_the_nearest(section):
    with pytest.raises(ConfigError, match=r"did you mean '(int8|wanda)'") as told:
        Recipe.from_dict(section)
    assert len(str(told.value)) < 240
    assert " more, got " in str(told.value)
