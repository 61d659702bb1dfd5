"""Recipe, positions, module matching, state file, atomic files, compatibility, receipt: the frame without a trainer."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from plain_loop import begun_session, plain_step
from torch import nn
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from shared_core import Recipe, Session
from shared_core.checkpoint_formats.plain import PlainKeys
from shared_core.cli import app
from shared_core.config.environments import EVERY_TECHNIQUE, RUN_ENVIRONMENTS
from shared_core.config.options import TechniqueConfig
from shared_core.config.training_time import parse_position
from shared_core.engine.checks import compatibility
from shared_core.engine.hooks import Hooks
from shared_core.engine.registry import REGISTRY, in_order
from shared_core.engine.saving.state_file import STATE_FILE, load_state, rng_state, save_state, set_rng_state
from shared_core.engine.services import Services
from shared_core.engine.technique import Context, Technique
from shared_core.errors import (
    CheckpointError,
    CompatibilityError,
    ConfigError,
    MatchError,
    TrainingError,
)
from shared_core.front_ends.flags import recipe_of, take_flags
from shared_core.low_rank import factorize
from shared_core.modules.matching import match_modules
from shared_core.pruning import PruneConfig, prune
from shared_core.quantization import convert, quantize


def resolve(value, total=100, epoch=10):
    return parse_position(value).resolve("prune.begin", total_steps=total, steps_per_epoch=epoch)


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (0, 0),
        (1, 1),
        (1.0, 100),
        ("1", 1),
        ("1.0", 100),
        ("0.3", 30),
        (0.305, 31),
        ("2ep", 20),
        ("0.25ep", 3),
        ("1e-1", 10),
    ],
)
def test_positions(value, step):
    assert resolve(value) == step


@pytest.mark.parametrize(
    "value", [-1, 1.5, "1.5", "abc", "ep", None, True, float("nan"), "nan", float("inf"), "-2ep", [1]]
)
def test_bad_positions_are_refused(value):
    with pytest.raises(ConfigError, match=r"prune\.begin: begin must be a step"):
        parse_position(value, "prune.begin")


def test_positions_need_a_known_length():
    with pytest.raises(ConfigError, match="number of training steps is unknown"):
        resolve(0.5, total=None)
    with pytest.raises(ConfigError, match="length of an epoch is unknown"):
        resolve("2ep", epoch=None)
    assert resolve(7, total=None, epoch=None) == 7
    for start in (0, 0.0, "0", "0.0", "0ep"):
        assert resolve(start, total=None, epoch=None) == 0


@pytest.mark.parametrize(
    "recipe",
    [
        {"prune": {"sparsity": 0.5, "begin": 0.0, "end": 4}},
        {"qat": {"scheme": "int8", "begin": "0.0", "freeze_observers": 3}},
        {"average": {"kind": "swa", "begin": 0.0}},
        {"distill": {"teacher": "ema", "begin": 0.0, "end": 4}},
        {"cluster": {"bits": 2, "begin": "0.0", "min_size": 0}},
        {"lottery": {"out": "ticket", "rewind_to": 0.0}},
    ],
    ids=lambda recipe: next(iter(recipe)),
)
def test_the_start_needs_no_known_length_in_any_technique(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = Session(recipe)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.begin([optimizer], total_steps=None)
    assert session.has_begun
    ((key, options),) = recipe.items()
    position = "rewind_to" if key == "lottery" else "begin"
    other = Session({key: {**options, position: 0.25}})
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    other.attach(model)
    with pytest.raises(ConfigError, match=f"{position}: 0.25 must be a step number here"):
        other.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=None)


def test_recipes_are_equal_from_dict_yaml_json_and_flags(tmp_path):
    by_dict = Recipe.from_dict({"prune": {"sparsity": 0.001, "skip": ["last"]}})
    (tmp_path / "recipe.yaml").write_text("prune: {sparsity: 1e-3, skip: [last]}\n")
    assert Recipe.from_yaml(tmp_path / "recipe.yaml") == by_dict
    assert Recipe.from_yaml("prune: {sparsity: 1e-3, skip: last}") == by_dict
    assert Recipe.from_json(json.dumps(by_dict.to_dict())) == by_dict
    assert Recipe.from_flags({"prune_sparsity": "1e-3", "prune_skip": "last", "qat_scheme": None}) == by_dict
    assert Recipe.from_yaml(by_dict.to_yaml()) == by_dict
    assert eval(repr(by_dict)) == by_dict
    assert hash(by_dict) == hash(Recipe.from_dict(by_dict.to_dict()))
    assert Recipe.from_yaml("{}") == Recipe({})


def test_recipe_order_is_the_order_of_composition():
    given = {"soup": {"kind": "uniform"}, "qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5}}
    assert list(Recipe.from_dict(given)) == ["prune", "qat", "soup"]
    assert in_order(given, "finish") == ["prune", "soup", "qat"]


class Steps(Technique):
    def before_step(self, context):
        context.drop(self.before_step)


class PrivateSteps(Steps):
    makes_gradients_private = True


def test_hooks_are_bound_methods_of_what_has_its_own_private_gradients_first():
    techniques = {
        key: make(TechniqueConfig()) for key, make in (("a", Steps), ("none", Technique), ("b", PrivateSteps))
    }
    hooks = Hooks(techniques)
    first = [("b", techniques["b"].before_step), ("a", techniques["a"].before_step)]
    assert hooks.before_step == first
    assert hooks.forward == hooks.loss == hooks.after_step == hooks.swapped == []


def test_a_round_of_hooks_ends_as_it_began_and_is_shorter_the_next_time():
    hooks = Hooks({key: Steps(TechniqueConfig()) for key in "ab"})
    context, called = Context(nn.Linear(1, 1), drop=hooks.drop), []
    for key, hook in hooks.before_step:
        hook(context)
        called.append(key)
    assert called == ["a", "b"]
    assert hooks.before_step == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"prun": {}}, r"'prun' is not a technique; did you mean 'prune'\?"),
        ({"prune_sparsity": 0.8}, r"it is a flag.*\{'prune': \{'sparsity': VALUE\}\}"),
        ([{"prune": {"sparsity": 0.8}}], "must be a mapping of techniques.*write"),
        ({"pruning": {}}, r"'pruning' is not a technique; did you mean 'prune'\?"),
        ({"quantization": {}}, r"did you mean 'qat'\?"),
        ({"average": {"kind": "EMA"}}, r"must be one of ema, swa, last_k, got 'EMA'; did you mean 'ema'\?"),
        ({"average": {"kind": "mean"}}, r"must be one of ema, swa, last_k, got 'mean'$"),
        ({"prune": {"sparsity": 80}}, r"must be in \[0, 1\), got 80.0; 80 % is written 0.8"),
        ({"prune": {"sparsity": "80%"}}, "must be a finite number, got '80%'; 80 % is written 0.8"),
        ({"prune": {"sparsity": 0.5, "begin": "50 %"}}, "got '50 %'; 50 % is written 0.5"),
        ({"prune": {"sparsitty": 0.5}}, r"prune\.sparsitty is not an option; did you mean 'sparsity'\?"),
        ({"prune": {}}, r"prune\.sparsity must be given"),
        ({"prune": None}, r"prune\.sparsity must be given"),
        ({"prune": 0.8}, "prune must be a mapping"),
        ({"prune": {"sparsity": "lots"}}, r"sparsity must be a finite number, got 'lots'"),
        ({"prune": {"sparsity": float("nan")}}, "sparsity must be a finite number"),
        ({"prune": {"sparsity": 1.0}}, "sparsity must"),
        ({"prune": {"sparsity": True}}, "sparsity must be a finite number"),
        ({"prune": {"sparsity": 0.5, "every": 2.5}}, "every must be a whole number"),
        ({"prune": {"sparsity": 0.5, "schedule": "cubik"}}, "schedule must be one of .*; did you mean 'cubic'"),
        ({"prune": {"sparsity": 0.5, "skip": 3}}, "skip must be a list"),
        ({"distill": {"teacher": ""}}, "teacher must"),
        ([], "must be a mapping"),
        ({"loss_scale": {"kind": "dynamic", "growth_factor": 0.5}}, "growth_factor must"),
    ],
)
def test_bad_recipes_are_refused_by_name(recipe, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.from_dict(recipe)


@pytest.mark.parametrize(("suffix", "read"), [("YAML", Recipe.from_yaml), ("JSON", Recipe.from_json)])
def test_a_broken_recipe_file_is_named(suffix, read, tmp_path):
    file = tmp_path / "broken"
    file.write_text("{prune: {sparsity: 0.5}")
    with pytest.raises(ConfigError, match=rf"recipe: {file} is not valid {suffix}: "):
        read(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=rf"recipe: {file} must be a mapping"):
        read(file)


def test_what_is_no_recipe_no_option_and_no_model_is_told():
    assert Session({"prune": {"sparsity": 0.5}}).recipe == Recipe.from_dict({"prune": {"sparsity": 0.5}})
    with pytest.raises(ConfigError, match="must be a mapping"):
        Session("prune")
    with pytest.raises(ConfigError, match=r"prune must be a PruneConfig.*Recipe\.from_dict takes options"):
        Recipe({"prune": {"sparsity": 0.5}})
    with pytest.raises(ConfigError, match=r"prune\.sparsitty is not an option; did you mean 'sparsity'"):
        PruneConfig(sparsitty=0.5)
    options = {prune: {"sparsity": 0.5}, quantize: "int8_weight", factorize: {"rank": 2}, convert: None}
    for function, config in options.items():
        with pytest.raises(ConfigError, match="model must be a module, got dict; build it first"):
            function({"0.weight": torch.ones(2, 2)}, config)


def test_flags_without_their_switch_are_refused():
    with pytest.raises(ConfigError, match=r"--prune_begin needs --prune_sparsity"):
        Recipe.from_flags({"prune_begin": "0.1"})
    with pytest.raises(ConfigError, match="did you mean '--prune_sparsity'"):
        Recipe.from_flags({"prune_sparsty": 0.5})


def test_a_technique_given_twice_is_refused():
    one = Recipe.from_dict({"prune": {"sparsity": 0.5}})
    with pytest.raises(ConfigError, match="prune was given twice"):
        one.merged(one)


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Conv1d(1, 1, 3), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["0", "2", "4"]),
        ({"skip": ["first"]}, ["2", "4"]),
        ({"skip": ["last"]}, ["0", "2"]),
        ({"include": ["2"]}, ["2"]),
        ({"include": ["[02]"], "skip": ["first"]}, ["2"]),
        ({"include": ["Linear"], "min_size": 20}, ["0", "2"]),
        ({"skip": ["LayerNorm"]}, ["0", "2", "4"]),
    ],
)
def test_module_match(options, names):
    assert [found.name for found in match_modules(net(), (nn.Linear,), where="prune", **options)] == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["encoder.*"]}, r"include pattern 'encoder\.\*' matches no module"),
        ({"skip": ["9"]}, "skip pattern '9' matches no module"),
        ({"min_size": 1000}, "got none of 3 with .* min_size=1000; the largest left has 64 weights: lower min_size"),
        ({"include": ["0"], "skip": ["0"]}, "got none of 3 with .* min_size=0; change include or skip"),
    ],
)
def test_matching_nothing_is_an_error(options, message):
    with pytest.raises(MatchError, match=message):
        match_modules(net(), (nn.Linear,), where="prune", **options)
    with pytest.raises(MatchError, match="has no Bilinear"):
        match_modules(net(), (nn.Bilinear,), where="prune")


def test_known_modules_are_listed_as_far_as_a_line_is_read():
    many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    with pytest.raises(MatchError, match=r"known: 0, 1, 10, .* and 70 more$"):
        match_modules(many, (nn.Linear,), where="prune", skip=["zzz"])


def test_compiled_modules_keep_their_names():
    compiled = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"))
    assert [found.name for found in match_modules(compiled, (nn.Linear,), where="prune", include=["0.0"])] == ["0.0"]


def test_a_state_file_round_trip(tmp_path):
    shared = torch.arange(3.0)
    state = {
        "a": shared,
        "b": [shared, {"c": torch.tensor(True)}],
        "d": 1e-3,
        "e": None,
        "f": "x",
        "empty": torch.ones(0),
    }
    save_state(tmp_path, state)
    loaded = load_state(tmp_path)
    assert torch.equal(loaded["b"][0], shared)
    assert (loaded["d"], loaded["e"], loaded["f"], bool(loaded["b"][1]["c"])) == (1e-3, None, "x", True)
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    (tmp_path / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_state(tmp_path)
    with pytest.raises(TypeError, match="cannot be saved"):
        save_state(tmp_path, {"x": object()})


def test_every_random_generator_is_restored():
    state = rng_state()
    drawn = torch.rand(2), random.random(), np.random.rand()
    torch.rand(7), random.random(), np.random.rand(3)
    set_rng_state(state)
    again = torch.rand(2), random.random(), np.random.rand()
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]


def test_plain_keys_name_what_differs():
    plain = PlainKeys(nn.Linear(2, 2))
    plain.check(nn.Linear(2, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"missing \['weight'\], unexpected \['weight_orig'\]"):
        plain.check({"weight_orig": torch.ones(2, 2), "bias": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"other shapes \{'bias'"):
        plain.check({"weight": torch.ones(2, 2), "bias": torch.ones(3)})


def test_every_refusal_has_a_known_name_and_a_reason():
    refused = {(key, other) for key, one in REGISTRY.items() for other in one.config_class.conflicts}
    for first, second in refused | set(itertools.product(REGISTRY, EVERY_TECHNIQUE)):
        assert second in REGISTRY or second in RUN_ENVIRONMENTS
        if second in REGISTRY[first].config_class.works_in:
            continue
        with pytest.raises(CompatibilityError, match=r"cannot be combined with .*: \w+"):
            compatibility.check([first], [second]) if second not in REGISTRY else compatibility.check([first, second])
    refusing = ("low_rank", "fp8", "lora", "lottery", "cluster", "dp")  # qat or prune
    compatibility.check(key for key in REGISTRY if key not in refusing)
    assert len(compatibility.matrix()) == len(REGISTRY)


def test_flags_are_taken_out_of_a_command_line():
    ours, rest = take_flags(
        ["--lr", "1", "--prune-sparsity", "0.5", "--x", "--soup_strict", "pos", "--", "--prune_sparsity=1"]
    )
    assert ours == {"prune_sparsity": "0.5", "soup_strict": "true"}
    assert rest == ["--lr", "1", "--x", "pos", "--prune_sparsity=1"]
    for wrong, message in [
        (["--prune_sparsty", "0.5"], "did you mean '--prune_sparsity'"),
        (["--prune_sparsity"], "must have a value"),
        (["--prune_sparsity=1", "--prune_sparsity=1"], "given once"),
    ]:
        with pytest.raises(ConfigError, match=message):
            take_flags(wrong)


def test_flags_and_a_recipe_file_make_one_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("prune: {sparsity: 0.5}")
    assert list(recipe_of({"eff_recipe": str(tmp_path / "r.yaml"), "qat_scheme": "int8"})) == ["prune", "qat"]
    with pytest.raises(ConfigError, match="cannot read"):
        recipe_of({"eff_recipe": str(tmp_path / "none.yaml")})


def test_a_session_with_nothing_on_changes_nothing():
    model = net()
    before = {name: type(module) for name, module in model.named_modules()}
    session = Session(Recipe({}))
    session.attach(model)
    session.begin([], total_steps=3)
    loss = torch.tensor(1.0)
    assert session.loss(loss) is loss
    session.before_step()
    session.after_step()
    with session.swapped("evaluate"), session.swapped("evaluate"):
        pass
    session.finish()
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert session.receipt()["steps"]["applied"] == 1
    assert "1 step applied" in session.receipt().text()


def test_a_receipt_is_json_for_every_parser(tmp_path):
    model, session = net(), Session({"qat": {"scheme": "int8_weight", "include": ["0"]}})
    model[0].weight.data.zero_()  # no noise: infinitely many dB
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=1)
    text = session.receipt().write(tmp_path).read_text()
    (entry,) = json.loads(text, parse_constant=pytest.fail)["techniques"]["qat"]["per_layer"]
    assert entry["sqnr_db"] is None
    printed = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    told = json.loads(printed.output)
    assert told.pop("report")["files"] == ["eff_receipt.json"]
    assert told == json.loads(text)


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_cut_short_still_has_a_receipt(begun):
    model, session = net(), Session({"qat": {"scheme": "int8"}})
    session.attach(model)
    if begun:
        session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=3)
    session.detach()
    assert session.receipt()["techniques"]["qat"]["layers"] == len(session.techniques["qat"].layers)
    assert all(type(module).__module__.startswith("torch.nn") for module in model.modules())


def test_a_run_cut_short_after_its_target_has_reached_it():
    model = net()
    session, optimizer = begun_session({"prune": {"sparsity": 0.5, "end": 1, "begin": 0}}, model, 3)
    plain_step(session, optimizer, sum(value.square().sum() for value in model.parameters()))
    session.detach()
    assert session.receipt()["unreached"] == {}


def test_a_session_refuses_wrong_order_and_a_second_model():
    session = Session(Recipe({}))
    for call in (lambda: session.begin([], total_steps=1), lambda: session.prepare_optimizers([])):
        with pytest.raises(TrainingError, match=r"attach must come before (begin|prepare_optimizers)"):
            call()
    model = net()
    session.attach(model)
    session.attach(model)
    with pytest.raises(TrainingError, match="optimizers must be a list"):
        session.begin(torch.optim.SGD(model.parameters(), lr=0.1), total_steps=1)
    with pytest.raises(TrainingError, match="attached to one model only"):
        session.attach(net())
    with pytest.raises(CheckpointError, match="cannot read the checkpoint's state"):
        session.load_state_dict({"step": 1})


def test_a_failed_attach_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4))
    session = Session({"qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5, "include": ["nothing"]}})
    with pytest.raises(MatchError, match="include pattern 'nothing'"):
        session.attach(model)
    assert type(model[0]) is nn.Linear
    assert not session.is_attached


def test_positions_in_epochs_of_different_lengths():
    assert [resolve(value, epoch=(10, 10, 4)) for value in ("1ep", "2ep", "2.5ep", "3ep", "5ep")] == [
        10,
        20,
        22,
        24,
        32,
    ]


@pytest.mark.parametrize(
    "recipe",
    [
        {"prune": {"sparsity": 0.5, "begin": 0, "end": 1}},
        {"qat": {"scheme": "int8"}},
        {"qat": {"scheme": "int8", "range": "lsq"}},
        {"lora": {"rank": 2}},
        {"low_rank": {"rank": 4, "force": True, "min_size": 1}},
        {"fp8": {"recipe": "delayed", "include": ["1"]}},
        {"average": {"kind": "ema"}},
        {"loss_scale": {"kind": "auto"}},
        {"lottery": {"rewind_to": 1, "out": "out"}},
        {"cluster": {"bits": 2, "begin": 1, "min_size": 1}},
        {"primary_weights": {"kind": "fp32_copy"}},
    ],
    ids=lambda recipe: "+".join(recipe),
)
def test_a_default_device_is_the_scripts_own_affair(recipe, tmp_path, monkeypatch):
    # Lightning configures a model under its accelerator, and scripts call torch.set_default_device. On meta every
    # tensor that names no device would be lost.
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    if "primary_weights" in recipe:
        model = model.bfloat16()
    session = Session(recipe)
    with torch.device("meta"):
        session.attach(model)
        session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=4)
    assert not [name for name, value in model.state_dict().items() if value.is_meta]
    for technique in session.techniques.values():
        leaves = tree_leaves(technique.state_dict())
        assert not [value for value in leaves if isinstance(value, torch.Tensor) and value.is_meta]


def test_calibration_runs_the_model_under_the_scripts_default_device():
    class Asks(Services):
        def calibrate(self, num_batches):
            found.append(torch.get_default_device())

    found, model = [], nn.Linear(4, 4)
    context = Context(model, services=Asks())
    context.default_device = torch.device("meta")
    with torch.device("cpu"):
        context.calibrate(1)
    assert found == [torch.device("meta")]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_weights_that_are_not_finite_at_the_end_are_told(value):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = Session({"prune": {"sparsity": 0.5}})
    session.attach(model)
    session.begin([optimizer], total_steps=1)
    session.loss(model(torch.ones(2, 4)).sum()).backward()
    session.before_step()
    optimizer.step()
    session.after_step()
    with torch.no_grad():
        model.bias[1] = value
    session.finish()
    told = [note for note in session.receipt().values["notes"] if "NaN or infinity, such as bias:" in note]
    assert len(told) == (value != 0.0)
