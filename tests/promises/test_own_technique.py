"""The worked example of docs/adding_a_technique.md: a technique from outside keeps the promises that ours keep."""

import importlib
import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from commands import eff
from promise_drivers import assert_resumes, difference, run_bare, run_hf, run_lightning
from promise_table import TECHNIQUES, Row
from torch import nn

import hf_eff.training_args  # noqa: F401, its flags are made before a technique is added
from hf_eff import EffCallback
from shared_core import Session, Technique, TechniqueConfig, Touched, option, register
from shared_core.cli.reference import flags
from shared_core.engine.checks import compatibility
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import REGISTRY, in_order, is_in_bar
from shared_core.engine.saving.state_file import save_state
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.front_ends.typed_options import OneTechnique

FOLDER = Path(__file__).parents[2] / "examples" / "own_technique"
RECIPE = {"noise": {"eta": 0.01}, "prune": {"sparsity": 0.5, "begin": 2, "end": 6}}


@pytest.fixture(autouse=True)
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setitem(TECHNIQUES, "noise", Row("noise", {"eta": 0.01}))
    sys.modules.pop("gradient_noise", None)
    with warnings.catch_warnings(action="ignore"):  # flags of the other tests are made
        yield importlib.import_module("gradient_noise")
    for key in REGISTRY.keys() & {"noise", "other"}:
        REGISTRY.remove(key)


def test_three_ways_to_train_give_the_same_weights_and_receipts(tmp_path):
    bare = run_bare(RECIPE)
    runs = [run_hf(RECIPE, tmp_path / "hf", seed=0), run_lightning(RECIPE, tmp_path / "lightning")]
    assert difference(bare.weights, run_bare({"prune": RECIPE["prune"]}).weights) is not None
    for run in (bare, *runs):
        assert difference(bare.weights, run.weights) is None
        assert run.receipt["techniques"]["noise"]["noised_steps"] == run.receipt["steps"]["applied"] > 0


def test_only_steps_with_gradients_are_counted():
    session = Session({"noise": {"eta": 0.01}})
    model = nn.Linear(4, 2)
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.begin([optimizer], total_steps=4)
    for step in range(4):
        optimizer.zero_grad()
        if step % 2:
            session.loss(model(torch.ones(1, 4)).sum()).backward()
        session.before_step()
        optimizer.step()
        session.after_step(applied=step != 1)
    assert session.receipt()["techniques"]["noise"]["noised_steps"] == 1
    with pytest.raises(CompatibilityError, match="LBFGS"):
        compatibility.check(["noise"], ["lbfgs"])


def test_gradients_that_are_used_up_inside_backward_are_refused():
    session = attached({}, before_step=lambda self, context: None)
    model = session.context.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda one: (optimizer.step(), optimizer.zero_grad()))
    with pytest.raises(TrainingError, match=r"other: .*inside backward"):
        run_steps(session, optimizer)


@pytest.mark.parametrize("run", [run_hf, run_lightning])
def test_it_resumes_bit_for_bit(run, tmp_path):
    assert_resumes(run, lambda: RECIPE, tmp_path, [3], dropout=0.3, shuffle=True)


def test_the_table_of_pairs_has_a_line_for_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = eff("compat").output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith(f"{len(REGISTRY)} noise ")]


def test_what_it_declares_is_heard():
    assert in_order(["prune", "soup", "noise", "lora"]) == ["lora", "noise", "prune", "soup"]
    assert is_in_bar("noise/deviation")
    both = {"noise": {"eta": 0.1}, "dp": {"noise_multiplier": 1.0}}
    for keys in (Recipe.from_dict(both), ["dp", "noise"]):
        with pytest.raises(CompatibilityError, match=r"dp.*noise|noise.*dp"):
            compatibility.check(keys)
    with pytest.raises(CompatibilityError, match=r"DataParallel"):
        compatibility.check(["noise"], ["data_parallel"])


@pytest.mark.slow
def test_an_entry_point_brings_flag_yaml_and_explain(tmp_path):
    info = tmp_path / "site" / "gradient_noise-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gradient-noise\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[efftrain.techniques]\nnoise = gradient_noise\n")
    (tmp_path / "net.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(4, 2)\n")
    (tmp_path / "recipe.yaml").write_text("noise: {eta: 0.01}\n")
    (tmp_path / "args.py").write_text(
        "from transformers import HfArgumentParser\nfrom hf_eff import EffTrainingArguments\n"
        "args, = HfArgumentParser(EffTrainingArguments).parse_args_into_dataclasses()\nprint(args.recipe)\n"
    )

    def run(*command, path=f"{FOLDER}:{info.parent}:."):
        return subprocess.run(
            [sys.executable, "-P", *command], capture_output=True, text=True, cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    arguments = ["explain", "recipe.yaml", "--model", "net:build", "--steps", "9", "--json"]
    explained = run("-c", "from shared_core.cli import main; main()", *arguments)
    assert json.loads(explained.stdout)["techniques"].keys() == {"noise"}, explained.stderr[-2000:]
    parsed = run("args.py", "--output_dir", "out", "--noise_eta", "0.25")
    assert parsed.stdout.strip() == "Recipe.from_dict({'noise': {'eta': 0.25}})", parsed.stderr[-2000:]
    read = "from shared_core import Recipe\ntry:\n    Recipe.from_dict({})\nexcept Exception:\n    Recipe.from_dict({})"
    broken = run("-c", read, path=str(info.parent))
    assert broken.stderr.count("entry point noise of gradient-noise does not load") == 2


@dataclass(frozen=True, kw_only=True)
class OtherConfig(TechniqueConfig):
    key = "other"
    switch = "strength"
    strength: float = option(help="of it")
    on: bool | None = option(None, help="without effect")


class Other(Technique):
    pass


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"key": "Other"}, "lower-case letters"),
        ({"switch": "strenght"}, "'strenght' is not an option; did you mean 'strength'"),
        ({"key": "prune"}, "'prune' is taken by shared_core.pruning"),
        ({"after": ("soup",), "before": ("prune",)}, "form a cycle"),
        ({"after": "prune"}, r"after must be a tuple .*\('prune',\)"),
        ({"works_in": ("tensor_paralel",)}, "works_in.*did you mean 'tensor_parallel'"),
        ({"switch": ""}, "switch"),
        ({"switch": "on"}, "'on' must not be a bool"),
        ({"own_checkpoints": "it keeps a secret"}, "own_checkpoints must be a tuple of two strings"),
        ({"saved_structure": ("a reason",)}, "saved_structure must be a tuple of two strings"),
        ({"conflicts": ("dp",)}, "conflicts must map names to str"),
        ({"figures": {"noise": "its size"}}, "figures must map names to Figure"),
    ],
)
def test_a_wrong_registration_is_refused(config, told):
    with pytest.raises(ConfigError, match=told):
        register(Other, type("ChangedConfig", (OtherConfig,), config))
    assert "other" not in REGISTRY
    with pytest.warns(UserWarning, match="without --other_strength"):
        register(Other, OtherConfig)
    register(Other, OtherConfig)  # as a notebook does
    assert Recipe.from_dict({"other": {"strength": 1}})["other"].strength == 1.0


@pytest.mark.parametrize("name", ["conflicts", "before", "after", "finishes_before", "finishes_after"])
def test_a_name_like_a_known_key_is_reported(name):
    value = {"lbgfs": "it steps often"} if name == "conflicts" else ("prnue", "of_another_package")
    with pytest.warns(UserWarning, match=rf"{name}: '(lbgfs|prnue)' is not known; did you mean '(lbfgs|prune)'"):
        register(Other, type("OtherConfig", (OtherConfig,), {name: value}))


def test_a_misspelled_hook_or_declaration_is_reported():
    with pytest.warns(UserWarning, match="befor_step.*'before_step'"):
        register(type("Other", (Other,), {"befor_step": Other.before_step}), OtherConfig)
    with pytest.warns(UserWarning, match="conflict .*'conflicts'"):
        register(Other, type("OtherConfig", (OtherConfig,), {"conflict": {}}))


def test_a_config_that_is_no_dataclass_is_refused():
    options = {"key": "other", "switch": "scale", "__annotations__": {"scale": float}, "scale": option(help="of it")}
    with pytest.raises(ConfigError, match=r"@dataclass\(frozen=True"):
        register(Other, type("UndecoratedConfig", (TechniqueConfig,), options))


def attached(recipe, **hooks):
    """Return a session of a recipe with a technique that has these hooks, attached to a model."""
    with warnings.catch_warnings(action="ignore"):
        register(type("Other", (Other,), hooks), OtherConfig)
    session = Session({"other": {"strength": 1.0}, **recipe})
    session.attach(nn.Linear(64, 64))
    return session


def run_steps(session, optimizer):
    """Train a step with all calls of a loop."""
    model = session.context.model
    session.begin([optimizer], total_steps=1)
    with session.forward():
        loss = session.loss(model(torch.ones(2, 64)).square().mean())
    loss.backward()
    session.before_step()
    optimizer.step()
    session.after_step()
    session.figures()
    with session.swapped("checkpoint"):
        session.files.bake(model.state_dict())
        session.state_dict()
    session.finish()


def test_weights_are_not_replaced_after_a_technique_that_depends_on_them_has_finished(monkeypatch):
    recipe = {"qat": {"scheme": "int8"}}
    with pytest.raises(CompatibilityError, match=r"other.*qat.*finishes_before in OtherConfig"):
        attached(recipe, replaces_weights=True)
    monkeypatch.setattr(OtherConfig, "finishes_before", ("qat",))
    assert attached(recipe, replaces_weights=True).is_attached


HOOKS = (
    "attach",
    "bake",
    "claims",
    "figures",
    "forward",
    "leave_unheld",
    "loss",
    "plan",
    "report",
    "state_dict",
    "swapped",
)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_returns_nothing_is_named(hook):
    with pytest.raises(TypeError, match=rf"other: {hook} must return"):
        session = attached({}, **{hook: lambda self, *_: None})
        run_steps(session, torch.optim.SGD([session.context.model.weight], lr=0.1))  # which does not hold the bias


@pytest.mark.parametrize("allow_partial", [True, False])
def test_a_technique_that_matches_nothing_is_refused(allow_partial):
    nothing = Touched({}, {"weight": "too small"}, "weights")
    with pytest.raises(MatchError, match=r"other: matches no weights \(weight: too small"):
        attached({"allow_partial": allow_partial}, attach=lambda self, context: nothing)


def test_figures_that_are_not_declared_are_refused():
    session = attached({}, figures=lambda self: {"wrong/name": 1.0})
    with pytest.raises(TypeError, match=r"other: OtherConfig.*wrong/name"):
        session.figures()


def test_a_state_that_cannot_be_saved_is_named(tmp_path):
    session = attached({}, state_dict=lambda self: {"masks": [{1, 2}]})
    with pytest.raises(TypeError, match=r"techniques\.other\.masks\.0: set cannot be saved"):
        save_state(tmp_path, session.state_dict())


def test_a_callback_takes_the_options_of_the_technique_whose_name_it_has():
    callback = type("GradientNoise", (OneTechnique, EffCallback), {"__doc__": "Adds noise."})
    assert callback(0.1).recipe == Recipe.from_dict({"noise": {"eta": 0.1}})
    with pytest.raises(ConfigError, match=r"Noise: .*name"):
        type("Noise", (OneTechnique, EffCallback), {})(0.1)


def test_its_docstring_and_ranges_are_in_the_list_of_flags(capsys):
    flags()
    assert "Adds noise of variance" in capsys.readouterr().out
    field = option(help="share of it, in (0, 1]", above=0.0, high=1.0)
    assert OtherConfig.meaning(field) == "Share of it, in (0, 1]."
