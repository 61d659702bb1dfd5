"""A search for small models: within the limit, gone on with after a kill, its front loads, and what is refused."""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import commands
import pytest
import torch
from reports import report_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MissingExtraError, TrainingError
from shared_core.files.json_yaml import parse_yaml
from shared_core.runs import Candidates, ModelSearch, RunError, SearchRow, SearchTable

pytest.importorskip("optuna")

STAGE = Path(__file__).resolve().parents[2] / "support" / "trainers" / "search_stage.py"
TASK = """
import torch
from transformers import AutoModelForCausalLM

def batches():
    tokens = torch.randint(1, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": tokens, "labels": tokens}]

def build():
    return AutoModelForCausalLM.from_pretrained("big"), batches()[0]

def plain():
    return torch.nn.Linear(4, 2), torch.ones(1, 4)
"""
SIZES = ("--layers", "1,2,3", "--intermediate-size", "8,16,24")
invoke = functools.partial(commands.eff, "search")


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A command that trains nothing, in a folder with a trained model and a task."""
    commands.user_module(tmp_path, monkeypatch, "search_task", TASK)
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained("big")
    return ["env", sys.executable, "-S", str(STAGE), str(tmp_path), "{student}", "{out}"]


def line(out, trials, *more):
    return ["big", "--calibration", "search_task:batches", *SIZES, "--out", out, "--trials", trials, *more, "--"]


def rows_of(out):
    return [{**row, "seconds": 0} for row in json.loads(Path(out, "search.json").read_text())["rows"]]


def trials_of(out):
    """Return number of place, sizes and value of what Optuna was told, without what a kill left behind."""
    import optuna

    backend = optuna.storages.journal.JournalFileBackend(str(Path(out, "optuna.journal")))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))
    told = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    return [(trial.params, trial.value, trial.state.name, trial.constraints) for trial in told]


def test_every_model_of_the_front_is_within_the_limit_loads_and_has_the_parameters_reported(command):
    done = invoke(*line("out", 6, "--limit", 0.6, "--json"), *command)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = {row["name"]: row for row in told["rows"]}
    trained = [row for row in told["rows"] if row["state"] == "trained"]
    assert len(trained) == 6
    assert trained[0]["name"] == told["front"][-1] == "uncut"
    assert all(row["share"] <= 0.6 for row in trained[1:])
    assert all(row["share"] > 0.6 and row["model"] is None for row in rows.values() if row["state"] == "too costly")
    assert Path("started").read_text().split() == [row["name"] for row in trained]
    assert len({json.dumps(row["sizes"]) for row in rows.values()}) == len(rows)
    for name in told["front"]:
        model = AutoModelForCausalLM.from_pretrained(Path("out", rows[name]["model"]))
        assert sum(weight.numel() for weight in model.parameters()) == rows[name]["parameters"]
        assert 4 * rows[name]["parameters"] == rows[name]["cost"]
        assert model.config.num_hidden_layers == rows[name]["sizes"]["layers"]
        assert rows[name]["quality"] == rows[name]["metrics"]["eval_loss"]
    for row in trained:  # nothing trained is both cheaper and better
        better = [rows[name] for name in told["front"] if rows[name]["share"] <= row["share"]]
        assert min(one["quality"] for one in better) <= row["quality"]
    assert Path("out", "front.png").is_file()
    assert f"| {told['front'][0]} |" in report_of(Path("out"))
    more = json.loads(invoke(*line("out", 7, "--limit", 0.6, "--json"), *command).stdout)
    assert [row["name"] for row in more["rows"] if row["state"] == "trained"][:6] == [row["name"] for row in trained]


@pytest.mark.slow
def test_a_killed_search_proposes_the_same_as_one_that_was_never_stopped(command):
    from search_task import batches, build

    model, example = build()
    candidates = Candidates(model, batches(), example, sizes={"layers": [1, 2, 3], "intermediate_size": [8, 16, 24]})

    def search(out, trials):
        ModelSearch(command, out, candidates, teacher=Path("big")).run(trials)

    Path("die").touch()
    with pytest.raises(RunError):
        search("killed", 2)
    Path("kill-driver").touch()
    script = [sys.executable, "-P", "-m", "efftrain", "search"]
    killed = subprocess.run([*script, *map(str, line("killed", 3)), *command], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    for trials in (3, 5):
        with Path("killed", "optuna.journal").open("a") as file:
            file.write('{"op_code": 4, "trial_')  # a line that a kill cut
        search("killed", trials)
    search("whole", 5)
    assert rows_of("killed") == rows_of("whole")
    assert trials_of("killed") == trials_of("whole")
    assert len(trials_of("whole")) > 6  # also what TPE proposed, after random ones
    Path("killed", "optuna.journal").unlink()  # is made again from the candidates, without training
    before = Path("started").read_text().split()
    search("killed", 6)
    assert len(Path("started").read_text().split()) == len(before) + 1
    assert trials_of("killed")[: len(trials_of("whole"))] == trials_of("whole")


def test_a_model_of_a_function_is_saved_and_random_sizes_are_a_baseline(command):
    options = ["--calibration", "search_task:batches", "--layers", "2", "--cost", "flops", "--limit", 0.9]
    done = invoke(
        "search_task:build", *options, "--sampler", "random", "--out", "out", "--distill_temperature", 3, "--", *command
    )
    assert done.exit_code == 0, done.output
    assert {one["name"]: one["state"] for one in rows_of("out")} == {"uncut": "trained", "candidate-01": "trained"}
    assert "temperature: 3" in Path("out", "candidate-01.yaml").read_text()
    assert LlamaForCausalLM.from_pretrained("out/candidate-01/checkpoint-9").config.num_hidden_layers == 2


@pytest.mark.slow
def test_a_hopeless_training_is_stopped(command):
    assert invoke(*line("out", 5, "--limit", 1), *command).exit_code == 0
    Path("hopeless").touch()
    assert invoke(*line("out", 6, "--limit", 1), *command).exit_code == 0
    rows = rows_of("out")
    assert [one["state"] for one in rows] == ["trained"] * 5 + ["stopped"]
    assert rows[-1]["validations"] == [[4, 100.0]]
    assert rows[-1]["quality"] is None


def row(name, share, quality, noise=0.0):
    return SearchRow(name, {"layers": 1}, "trained", 1.0, share, noise, 1, quality, {}, (), name)


def test_the_front_keeps_no_model_that_is_cheaper_by_less_than_the_noise():
    rows = (row("a", 0.2, 0.5), row("b", 0.3, 0.4), row("c", 0.4, 0.7), row("d", 0.41, 0.8, 0.02), row("e", 0.9, None))
    found = SearchTable(rows, "latency", 0.405, "eval_accuracy")
    assert [one.name for one in found.front] == ["a", "d"]
    assert found.best.name == "a"
    assert [one.name for one in SearchTable(rows, "bytes", 1, "eval_loss", False).front] == ["a", "b"]


def test_latency_is_measured_against_the_uncut_model(command):
    import search_task

    model, example = search_task.build()
    found = Candidates(model, search_task.batches(), example, sizes={"layers": [1]}, cost="latency")
    cost = found.cost(found.cut({"layers": 1}))
    assert cost.value > 0
    assert cost.share > 0
    assert cost.noise >= 0


def test_bits_are_planned_within_their_mean_and_cost_the_bytes_of_codes_and_scales(command):
    import search_task

    model, example = search_task.build()
    found = Candidates(model, search_task.batches(), example, sizes={"layers": [2], "bits": [4, 6]})
    assert found.values == {"layers": (2, 4), "bits": (4, 6, 32)}
    assert found.plan(model, {"layers": 4, "bits": 32}) is None
    small = found.cut({"layers": 2, "bits": 6})
    plan = found.plan(small, {"layers": 2, "bits": 6})
    linear = {name: one for name, one in small.named_modules() if isinstance(one, torch.nn.Linear)}
    assert {*plan.bits} >= {*linear}
    assert {*plan.bits.values()} == {4, 8}
    assert plan.average_bits <= 6
    expected = 4 * sum(weight.numel() for weight in small.parameters())
    for name, bits in plan.bits.items():
        weight = small.get_submodule(name).weight
        expected -= 4 * weight.numel() - bits * weight.numel() // 8 - 4 * weight.shape[0]
    assert found.cost(small, plan).value == expected


def test_tied_weights_get_one_number_of_bits(command):
    import search_task

    model, example = search_task.build()
    model.lm_head.weight = model.model.embed_tokens.weight
    found = Candidates(model, search_task.batches(), example, sizes={"bits": [6]})
    bits = found.plan(model, {"bits": 6}).bits
    assert bits["lm_head"] == bits["model.embed_tokens"] == 8


def test_a_search_for_bits_trains_each_candidate_in_its_own(command):
    bits = ["--calibration", "search_task:batches", "--bits", "4,8", "--scheme", "int8_weight", "--limit", 0.5]
    done = invoke("big", *bits, "--out", "out", "--trials", 3, "--json", "--", *command)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["sizes"]["bits"] for row in rows] == [32, 8, 4]
    assert rows[2]["cost"] < rows[1]["cost"] < rows[0]["cost"] / 2
    for row in rows:
        recipe = parse_yaml(Path("out", f"{row['name']}.yaml").read_text())
        qat = recipe.get("qat")
        assert (qat is None) == (row["sizes"]["bits"] == 32)
        assert qat is None or qat["scheme"] == "int8_weight"
        assert qat is None or {one.rpartition("=")[2] for one in qat["overrides"]} == {str(row["sizes"]["bits"])}


@pytest.mark.slow
def test_a_trained_candidate_holds_as_many_values_as_its_bits_allow(command):
    script = str(STAGE.with_name("search_script.py"))
    bits = ["--calibration", "search_task:batches", "--bits", "4", "--limit", 0.9]
    line = ["--out", "out", "--trials", 2, "--json", "--", sys.executable, script, "{student}", "{out}"]
    done = invoke("big", *bits, *line)
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)["rows"][1]
    model = AutoModelForCausalLM.from_pretrained(Path("out", row["model"]))
    linear = [one.weight for one in model.modules() if isinstance(one, torch.nn.Linear)]
    assert linear
    assert all(len(channel.unique()) <= 15 for weight in linear for channel in weight)


@pytest.mark.skipif(not importlib.util.find_spec("onnxruntime"), reason="needs onnxruntime")
def test_latency_in_onnxruntime_is_that_of_the_exported_model(command):
    import search_task

    model, example = search_task.build()
    example = {"input_ids": example["input_ids"], "use_cache": False}
    found = Candidates(model, search_task.batches(), example, sizes={"bits": [8]}, cost="onnxruntime")
    cost = found.cost(model, found.plan(model, {"bits": 8}))
    assert min(cost.value, cost.share) > 0


@pytest.mark.slow
def test_sizes_that_cannot_be_cut_are_left_out_and_those_that_do_not_fit_are_not_trained(command):
    import search_task

    model, example = search_task.build()
    found = Candidates(model, search_task.batches(), example)
    assert found.values["layers"] == (1, 2, 3, 4)
    assert found.values["attention_heads"] == (2, 4)
    assert found.uniform([0.5]) == [{"layers": 2, "hidden_size": 8, "intermediate_size": 16, "attention_heads": 2}]
    heads = ["--attention-heads", "2", "--key-value-heads", "1", "--limit", "1"]
    done = invoke("big", "--calibration", "search_task:batches", *heads, "--out", "out", "--", *command)
    assert done.exit_code == 0, done.output
    states = {(*one["sizes"].values(),): one["state"] for one in rows_of("out")}
    assert states == {(4, 2): "trained", (4, 1): "impossible", (2, 2): "trained", (2, 1): "trained"}


@pytest.mark.parametrize(
    ("mishap", "error", "message"),
    [
        ("fail", RunError, "the loss is NaN"),
        ("other-bits", TrainingError, "candidate-01 must be trained with the planned bits"),
        ("undistilled", TrainingError, "uncut must learn from its teacher"),
        ("other", TrainingError, r"candidate-01 must be trained from \{student\}"),
    ],
)
def test_a_training_that_does_not_do_its_part_is_told_and_repeated(command, mishap, error, message):
    from search_task import batches, build

    model, example = build()
    sizes = {"bits": [4]} if mishap == "other-bits" else {"layers": [2]}
    candidates = Candidates(model, batches(), example, sizes=sizes)
    search = ModelSearch(command, "out", candidates, teacher=Path("big"), limit=0.9)
    if mishap != "undistilled":
        search.run(1)
    Path(mishap).touch()
    with pytest.raises(error, match=message):
        search.run(2)
    assert [one.state for one in search.run(2).rows] == ["trained", "trained"]


def test_bits_are_not_given_twice(command):
    import search_task

    model, example = search_task.build()
    found = Candidates(model, search_task.batches(), example, sizes={"bits": [8]})
    script = [sys.executable, str(STAGE), "{student}", "{out}", "--qat_scheme", "int8_weight"]
    with pytest.raises(ConfigError, match="qat must not be given"):
        ModelSearch(script, "out", found, teacher=Path("big"))


def test_what_cannot_work_is_refused_before_any_training(command, monkeypatch):
    data = ["--calibration", "search_task:batches"]
    for arguments, error, message in (
        (line("out", 3, "--cost", "energy"), ConfigError, "--cost must be one of bytes, flops, latency"),
        (line("out", 3, "--limit", 2), ConfigError, "--limit must be"),
        (line("out", 3, "--bits", "3,8"), ConfigError, "bits must be"),
        (line("out", 3, "--bits", 8, "--cost", "flops"), ConfigError, "got flops, which bits do not change"),
        (line("out", 3, "--distill_alpha", 2), ConfigError, "alpha must be"),
        (line("out", 3, "--distill_teacher", "x"), ConfigError, "teacher must not be given"),
        (["search_task:plain", *data, "--out", "out", "--"], CompatibilityError, "a model with a config, got Linear"),
        (["big", *data, "--layers", 9, "--out", "out", "--"], ConfigError, "--layers must be"),
        (["big", *data, "--key-value-heads", 1, "--out", "out", "--"], ConfigError, "attention-heads must"),
        (line("big", 3), CheckpointError, "no search.json"),
    ):
        with pytest.raises(error, match=message):
            invoke(*arguments, *command)
    for sign in ("{student}", "{out}"):
        with pytest.raises(ConfigError, match=f"COMMAND must contain {sign}"):
            invoke(*line("out", 3), *(part for part in command if part != sign))
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"eff search: needs optuna.*efftrain\[search\]"):
        invoke(*line("out", 3), *command)
    assert not Path("started").exists()


def test_the_metric_is_chosen_once_and_another_search_needs_another_folder(command):
    with pytest.raises(TrainingError, match=r"metric must be one that uncut logged, got 'eval_acc'.*'eval_accuracy'"):
        invoke(*line("out", 1, "--metric", "eval_acc"), *command)
    told = commands.told_by("search", *line("out", 2, "--metric", "eval_accuracy"), *command)
    assert told["larger_is_better"]
    for more, message in (("--metric", "eval_loss"), "metric must be eval_accuracy"), (("--seed", 1), "its seed is 0"):
        with pytest.raises(CheckpointError, match=message):
            invoke(*line("out", 2, *more), *command)
