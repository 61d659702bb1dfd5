"""`eff doctor`, `eff init`, `eff explain`: what they tell is what a run then does, and they change nothing."""

import json
import sys
from importlib.metadata import version

import pytest
import torch
from commands import eff
from plain_loop import plain_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shared_core import Recipe, Session
from shared_core.cli.init import GOALS, commented_recipe
from shared_core.cli.planning import ExplainOptions
from shared_core.contrib.planning import PlannedRun
from shared_core.contrib.planning.plan import activation_bytes, counted_costs
from shared_core.engine.registry import REGISTRY
from shared_core.engine.services import Services
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MissingExtraError
from shared_core.front_ends.finding import front_ends
from shared_core.libraries import Library, libraries
from shared_core.tools.explain import explain
from shared_core.tools.step_shares import step_shares

STEPS = 8


def net():
    def block():
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU())

    return nn.Sequential(nn.Sequential(block(), block()), nn.Linear(32, 2))


def build():
    return net(), torch.randn(64, 32)


def build_refused():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Calibrating(Services):
    def calibrate(self, num_batches):
        raise AssertionError("no run here comes to its end with an average")


def started(recipe, model, total=STEPS):
    """Return a session that has begun on a model, and the batches it trains on."""
    session = Session(recipe, services=Calibrating())
    session.attach(model)
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 64, 32)), batch_size=64)
    if "dp" in recipe:
        loader = session.techniques["dp"].loader(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.begin([optimizer], total_steps=total)
    return session, optimizer, loader


# -- init


@pytest.mark.parametrize(("goal", "kind"), [*((goal, "transformer") for goal in GOALS), ("less-memory", "cnn")])
def test_the_recipe_of_each_goal_trains_as_it_stands(goal, kind):
    recipe = Recipe.from_yaml(commented_recipe(goal, kind, "hf", "recipe.yaml"))
    model = net()
    assert not explain(recipe, net().to("meta"), total_steps=STEPS).conflicts
    session, optimizer, loader = started(recipe, model)
    for (batch,) in loader:
        with session.forward():
            loss = session.loss(model(batch).square().sum(1).mean())
        loss.backward()
        plain_step(session, optimizer)
    session.finish()
    assert session.step == STEPS
    assert all(report for report in session.receipt()["techniques"].values())
    assert model.state_dict().keys() == net().state_dict().keys()


def test_every_line_of_a_recipe_tells_its_flag():
    for goal in GOALS:
        text = commented_recipe(goal, "other", "lightning", "recipe.yaml")
        flags = {}
        for line in text.splitlines():
            if line.startswith("  "):
                flag, value = line.rpartition("(--")[2].rstrip(")").split(" ")
                flags[flag] = value
        # a position is kept as it was written: "0.5" of a flag, 0.5 of the file
        by_flag, by_file = (
            {key: {name: str(value) for name, value in values.items()} for key, values in recipe.to_dict().items()}
            for recipe in (Recipe.from_flags(flags), Recipe.from_yaml(text))
        )
        assert by_flag == by_file


def test_init_writes_asks_and_never_overwrites(tmp_path, monkeypatch):
    out = tmp_path / "recipe.yaml"
    done = eff("init", "--goal", "smaller", "--out", out)
    assert done.exit_code == 0, done.output
    before = out.read_text()
    assert {*Recipe.from_yaml(out)} == {"prune", "cluster"}
    with pytest.raises(ConfigError, match="must be a new file"):
        eff("init", "--goal", "private", "--out", out)
    assert out.read_text() == before
    assert eff("init", "--goal", "private", "--out", out, "--force").exit_code == 0
    assert {*Recipe.from_yaml(out)} == {"dp"}

    monkeypatch.setattr(sys.modules["shared_core.cli.init"], "_at_a_terminal", lambda: True)
    asked = eff("init", "--out", tmp_path / "asked.yaml", input="less-memory\ntransformer\nlightning\n")
    assert asked.exit_code == 0, asked.output
    assert "EFF_RECIPE" in (tmp_path / "asked.yaml").read_text()
    assert {*Recipe.from_yaml(tmp_path / "asked.yaml")} == {"checkpointing"}


def test_init_runs_no_code_of_a_folder_and_asks_nobody(tmp_path, monkeypatch):
    told = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}, "architectures": ["Own"]}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *asked: "y")
    with pytest.raises(CheckpointError, match=r"eff init: cannot load [^\n]+$"):
        eff("init", "--goal", "smaller", "--model", tmp_path, "--out", tmp_path / "recipe.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("arguments", "error", "told"), [
    ([], ConfigError, "--goal must be given"),
    (["--goal", "smallr"], ConfigError, "did you mean 'smaller'"),
    (["--goal", "smaller", "--model", "gpt"], ConfigError, "model must be transformer"),
    (["--goal", "smaller", "--trainer", "keras"], ConfigError, "--trainer must be one of hf, lightning"),
    (["--goal", "private", "--model", "test_start:build_refused"], CompatibilityError, "GroupNorm"),
    (["--goal", "smaller", "--model", "test_start:nobody"], ConfigError, "^eff init: MODEL must name a function"),
])  # fmt: skip
def test_init_refuses_what_would_not_run(arguments, error, told, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rsplit("/", 1)[0])
    out = tmp_path / "recipe.yaml"
    with pytest.raises(error, match=told):
        eff("init", "--out", out, *arguments)
    assert not out.exists()


# -- explain

ALL = {
    "prune": {"sparsity": 0.5, "begin": 0.25, "skip": "last"},
    "qat": {"scheme": "int8", "begin": 2, "freeze_observers": 0.75},
    "average": {"kind": "swa"},
}


def test_the_timeline_holds_the_steps_that_the_run_takes():
    recipe = Recipe.from_dict({"prune": ALL["prune"], "cluster": {"bits": 4}, "average": ALL["average"]})
    told = explain(recipe, net(), total_steps=STEPS)
    steps = {(event["technique"], event["step"]) for event in told.timeline}
    session, _, _ = started(recipe, net())
    prune, share, average = (session.techniques[key] for key in ("prune", "cluster", "average"))
    wanted = {
        ("prune", prune._schedule.begin),
        ("prune", prune._schedule.end),
        ("cluster", share._begin),
        ("average", average._first),
    }
    assert steps == {*wanted, ("average", None)}
    assert {prune._schedule.begin, prune._schedule.end, share._begin, average._first} == {2, 4, 6}


def test_matched_tensors_are_those_of_the_receipt():
    recipe = Recipe.from_dict(ALL)
    with torch.device("meta"):
        told = explain(recipe, net(), total_steps=STEPS)
    session, _, _ = started(recipe, net())
    report = session.receipt()["techniques"]
    assert [*told.touched["qat"].tensors] == [layer["name"] for layer in report["qat"]["per_layer"]]
    assert told.touched["prune"].left_out == report["prune"]["left_out"] != {}
    assert told.touched["prune"].tensors == {"0.0.0.weight": 1024, "0.1.0.weight": 1024}


@pytest.mark.parametrize(("recipe", "told"), [
    ({"qat": {"scheme": "int8"}, "fp8": {"recipe": "rowwise"}}, "qat cannot be combined with fp8"),
    ({"prune": {"sparsity": 0.5, "skip": "nothing*"}}, "skip pattern 'nothing\\*' matches no module"),
    ({"prune": {"sparsity": 0.5, "begin": 6, "end": 7}, "cluster": {"bits": 4, "begin": 3}}, "cluster: begin must not"),
    ({"average": {"kind": "ema", "begin": 9}}, "within the 8 steps"),
    ({"activations": {"pack": "none", "offload": True}}, "already in host memory"),
])  # fmt: skip
def test_conflicts_are_the_errors_of_the_start(recipe, told):
    recipe = Recipe.from_dict(recipe)
    conflicts = explain(recipe, net(), total_steps=STEPS).conflicts
    with pytest.raises(ValueError, match=told) as error:
        started(recipe, net())
    assert [line for line in conflicts if line in str(error.value)], conflicts


def test_an_option_of_a_technique_is_not_taken_for_one_of_the_command(tmp_path):
    (tmp_path / "recipe.yaml").write_text("{fp8: {recipe: best}}")
    with pytest.raises(ConfigError, match=r"^fp8\.recipe: recipe must be one of"):
        eff("explain", tmp_path / "recipe.yaml")


def test_steps_come_from_epochs_as_trainers_count_them():
    epoch = {"recipe": "recipe.yaml", "examples": 10, "batch_size": 4}
    assert ExplainOptions(**epoch, epochs=2).length() == (6, 3)
    assert ExplainOptions(**epoch, epochs=0.5).length() == (2, 3)
    for wrong in ({"epochs": 2}, {**epoch, "steps": 3, "epochs": 2}, {"examples": 10}, {"steps": 0}):
        with pytest.raises(ConfigError, match="explain: "):
            ExplainOptions(**{"recipe": "recipe.yaml", **wrong})


def test_the_command_tells_all_of_it_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rsplit("/", 1)[0])
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(ALL | {"matmul": {"precision": "high"}}))
    before = torch.get_float32_matmul_precision()
    options = ["--epochs", 2, "--examples", 100, "--batch-size", 10, "--model", "test_start:build"]
    done = eff("explain", file, *options, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["steps"] == {"total": 20, "per_epoch": 10}
    assert told["model"]["parameters"] == told["model"]["trained"] == sum(p.numel() for p in net().parameters())
    assert told["model"]["without_values"]
    assert told["techniques"]["prune"]["elements"] == 2048
    (masks,) = [entry for entry in told["techniques"]["prune"]["estimates"] if "bytes" in entry]
    assert masks["bytes"] == pytest.approx(2048, rel=0.1)  # a byte a weight
    assert torch.get_float32_matmul_precision() == before
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    table = eff("explain", file, *options).stdout
    assert "step 5" in table
    assert "0.0.0.weight" in table
    without = eff("explain", file).stdout
    assert "--model" in without
    assert without.count("average") < table.count("average")  # no empty table of layers
    written = json.loads(eff("explain", file, "--json").stdout)  # neither steps nor a model
    assert [(event["technique"], event["at"]) for event in written["timeline"]] == [
        ("matmul", "step 0"), ("prune", "0.25"), ("prune", "0.5"), ("qat", "2"), ("qat", "0.75"), ("qat", "1.0"),
        ("average", "by default"),
    ]  # fmt: skip
    assert not written["conflicts"]
    refused = eff("explain", file, "--steps", 8, "--surrounding", "zero3")
    assert refused.exit_code == 1
    assert "DeepSpeed ZeRO stage 3" in refused.stdout


def test_shares_of_a_step_are_measured_on_copies_of_the_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rsplit("/", 1)[0])
    file = tmp_path / "recipe.yaml"
    recipe = {"prune": {"sparsity": 0.5, "begin": 0.25}, "qat": {"scheme": "int8", "begin": 0.75}}
    file.write_text(json.dumps(recipe | {"matmul": {"precision": "high"}}))
    threads = torch.get_num_threads()
    done = eff("explain", file, "--model", "test_start:build", "--measure", 3, "--json")
    assert done.exit_code == 0, done.output
    told = {one["technique"]: one for one in json.loads(done.stdout)["measured"]}
    assert list(told) == ["matmul", "prune", "qat", "all together"]
    for key in ("prune", "qat"):
        assert told[key]["plain"] > 0
        assert told[key]["seconds"] > 0
    assert "reason" in told["matmul"]  # it would act on the plain steps, too
    assert torch.get_num_threads() == threads
    assert json.loads(eff("explain", file, "--model", "test_start:build", "--json").stdout)["measured"] is None
    with pytest.raises(ConfigError):
        ExplainOptions(recipe="recipe.yaml", measure=3)


def test_a_technique_acts_in_the_measured_steps_however_late_it_begins():
    zeros = []

    class Counting(nn.Linear):
        def forward(self, x):
            zeros.append(int((self.weight == 0).sum()))
            return super().forward(x)

    recipe = Recipe.from_dict({"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 0.9}})
    (told,) = step_shares(lambda: (Counting(8, 4), torch.ones(2, 8)), recipe, steps=2, total_steps=100)
    assert "reason" not in told
    assert set(zeros[-2:]) == {0, 16}  # the last plain step and the last one with masks


def test_memory_is_that_of_the_model_that_trains():
    model, inputs = net(), torch.randn(16, 32)
    costs = {cost.what: cost for cost in counted_costs(model, PlannedRun(), {}, touched={}, activations=0)}
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(inputs).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert costs["weights"].held == costs["gradients"].during == size
    assert costs["moments of adamw"].held == sum(value.nbytes for value in states)
    # inputs of three linear layers, of which the ReLUs keep the results that two of them are fed
    kept = 4 * 16 * (32 + 32 + 32)
    assert activation_bytes(net(), inputs) == activation_bytes(net().to("meta"), inputs) == kept


# -- doctor


def test_the_version_is_told():
    assert eff("--version").stdout.split() == ["efftrain", version("efftrain")]


def test_doctor_tells_every_technique_and_missing_library(monkeypatch):
    done = eff("doctor", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == (0 if told["usable"] else 1)
    assert told["techniques"].keys() == REGISTRY.keys()
    assert told["devices"][0]["device"] == "cpu"
    assert {library["name"] for library in told["libraries"]} >= {"torch", "transformers", "opacus"}
    missing = [Library("torch", ">=2", "1.0", ""), Library("peft", ">=0.15", None, "lora")]
    monkeypatch.setattr("shared_core.libraries.libraries", lambda: missing)
    wrong = eff("doctor")
    assert wrong.exit_code == 1
    assert 'pip install "efftrain[lora]"' in wrong.stdout
    assert "torch 1.0 is out of range" in wrong.stdout


def test_versions_are_held_against_the_ranges_of_the_metadata():
    spec = "!=2.6.2,<2.7,>=2.6.1"
    states = {found: Library("x", spec, found, "e").state for found in ("2.6.1", "2.6.2", "2.7.0", "2.6.3+cpu", None)}
    assert [*states.values()] == ["ok", "known bad", "out of range", "ok", "missing"]
    found = libraries(["torch>=1", 'peft>=1; extra == "lora"', 'ruff; extra == "dev"', 'peft>=1; extra == "all"'])
    assert [(each.name, each.extra) for each in found] == [("torch", ""), ("peft", "lora")]


def test_a_technique_without_its_library_is_refused_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("shared_core.config.environments.find_spec", lambda name: None)
    ability = REGISTRY["dp"].config_class.ability(torch.device("cpu"))
    assert ability.level == "refused"
    written = eff("init", "--goal", "private", "--out", tmp_path / "recipe.yaml").stdout
    assert "pip install 'efftrain[privacy]'" in ability.why
    assert ability.why in written


@pytest.mark.parametrize("flag", ["--pruning_sparsity", "--prune-sparcity"])
def test_a_run_with_nothing_switched_on_tells_the_nearest_flag(flag):
    with pytest.raises(ConfigError, match=r"eff run: .*did you mean '(--)?prune_sparsity'"):
        eff("run", "train.py", "--lr", "1", flag)


def test_without_a_trainer_what_needs_one_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["shared_core.front_ends.finding"], "find_spec", lambda name: None)
    (tmp_path / "train.py").touch()
    assert front_ends() == []  # which is what `eff doctor` shows
    with pytest.raises(ConfigError, match=r"eff run: needs a trainer; pip install 'efftrain\[hf\]'"):
        eff("run", tmp_path / "train.py", "--prune_sparsity", "0.5")
    with pytest.raises(MissingExtraError, match=r"eff prune: a model folder: needs transformers.*efftrain\[hf\]"):
        eff("prune", tmp_path, "--sparsity", "0.5", "--out", tmp_path / "out")


def test_a_shell_completes_commands_and_options():
    for words, expected in (("eff qu", "quantize"), ("eff soup --ki", "--kind")):
        asked = {"_EFF_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        assert eff(prog_name="eff", env=asked).output.split() == [expected]
