"""`eff try`: what short runs show, what of it is noise, and what happens to a script that does not train."""

import json
import math
import socket
import statistics
from pathlib import Path

import pytest
import torch
from commands import eff
from safetensors.torch import save_file

from shared_core import Recipe, Session
from shared_core.engine.registry import REGISTRY, register
from shared_core.errors import ConfigError, TrainingError
from shared_core.reports.page import build_page
from shared_core.reports.try_page import try_page
from shared_core.runs import TryOut, chosen_metric, findings, short_run
from shared_core.runs.short_run import KEY, ShortRun, ShortRunConfig, short_run_of
from shared_core.runs.try_out import ALL, PLAIN, RESULT_FILE, Reading, without_output

RECIPE = Recipe.from_dict({"prune": {"sparsity": 0.5}, "average": {"kind": "ema"}})


def reading(name, factor=1.0, seed=0, **values):
    """A run of 21 blocks whose times rise as a machine gets busier, the same way for both runs of a pair."""
    seconds = [9.0 * factor, *(factor * (1 + 0.2 * number) for number in range(20))]
    usual = {"memory": 1000 + seed, "metrics": {"eval_loss": 1.0 + 0.01 * seed}, "bytes": 400, "packed": 300}
    return Reading(name, seed, {"seconds": seconds, "techniques": {}, "steps": 21, **usual, **values})


def pairs_of(*others, plain=3):
    still = [(reading(PLAIN, seed=n), reading(PLAIN, seed=n)) for n in range(plain)]
    return still + [(reading(PLAIN, seed=plain + n), other) for n, other in enumerate(others)]


def test_the_ratio_of_time_is_that_of_each_block_whatever_else_the_machine_does():
    found = findings(pairs_of(reading("prune", 1.5)))
    time = found.rows[0].figures["time"]
    assert time.value == pytest.approx(1.5)
    assert time.verdict == "worse"
    assert findings(pairs_of(reading("prune", 1.01))).rows[0].figures["time"].verdict == "noise"
    assert findings(pairs_of(reading("prune", 0.9))).rows[0].figures["time"].verdict == "better"


def test_plain_runs_that_differ_in_time_make_that_difference_noise():
    uneven = [(reading(PLAIN), reading(PLAIN, 1.3)), (reading(PLAIN), reading("prune", 1.2))]
    assert findings(uneven).rows[0].figures["time"].verdict == "noise"


def test_a_metric_is_judged_by_the_prediction_interval_of_the_plain_runs():
    """Student's t for n - 1 degrees of freedom, by hand for n = 4 plain runs: 3.18 s sqrt(1 + 1/4)."""
    plain = [1.0, 1.01, 1.02, 1.03]
    limit = 3.18 * statistics.stdev(plain) * math.sqrt(1 + 1 / 4)
    still = [(reading(PLAIN, seed=n), reading(PLAIN, seed=n + 1)) for n in (0,)]

    def verdict(loss):
        tried = (reading(PLAIN, seed=2), reading("prune", metrics={"eval_loss": loss}))
        last = (reading(PLAIN, seed=3), reading("average"))
        return findings([*still, tried, last]).rows[0].figures["metric"]

    center = statistics.fmean(plain)
    assert verdict(center + limit * 0.99).verdict == "noise"
    assert verdict(center + limit * 1.01).verdict == "worse"
    assert verdict(center - limit * 1.01).verdict == "better"
    assert verdict(math.nan).verdict == "worse"
    assert verdict(center + 0.01).noise == pytest.approx(limit)


@pytest.mark.parametrize(("values", "advice"), [
    ({}, "no difference seen in so few steps"),
    ({"packed": 100}, "keep: better packed file"),
    ({"packed": 100, "memory": 2000}, "keep: better packed file, but worse memory"),
    ({"packed": 100, "metrics": {"eval_loss": 3.0}}, "your choice: better packed file, but worse metric"),
    ({"metrics": {"eval_loss": 0.2}}, "keep: better metric"),
    ({"memory": 2000, "bytes": 900}, "leave out: worse memory and file, nothing better"),
])  # fmt: skip
def test_advice_follows_from_what_differs(values, advice):
    assert findings(pairs_of(reading("prune", **values))).rows[0].advice == advice


@pytest.mark.parametrize(("first", "last", "error", "is_judged"), [
    (0.6931, 0.6931, 0.001, False),
    (0.6931, 0.69, 0.01, False),  # within two standard errors
    (0.6931, 0.6910, 0.0, False),  # a third of a percent
    (2.0, math.nan, 0.1, False),
    (0.6931, 0.5, 0.01, True),
])  # fmt: skip
def test_nothing_is_advised_before_the_plain_run_learns(first, last, error, is_judged):
    learning = {"first": first, "last": last, "error": error}
    still = [(reading(PLAIN, learning=learning), reading(PLAIN, learning=learning))]
    better = (reading(PLAIN, learning=learning), reading("prune", packed=100, learning=learning))
    found = findings([*still, better])
    assert found.rows[0].advice.startswith("keep" if is_judged else "no verdict")
    assert any("--steps" in note for note in found.notes) is not is_judged
    assert found.rows[0].figures["packed"].verdict == "better"  # which the page shows all the same


def test_variants_that_cannot_be_combined_are_not_run(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    recipe = Recipe.from_dict({"qat": {"scheme": "int8"}, "fp8": {"recipe": "tensorwise"}})
    work = TryOut(str(script), [], recipe, tmp_path)
    assert {*work.refused} == {ALL}
    assert "qat cannot be combined with fp8" in work.refused[ALL]


def test_a_metric_that_is_better_when_larger():
    plain = [(reading(PLAIN, metrics={"accuracy": 0.5}), reading(PLAIN, metrics={"accuracy": 0.51}))]
    better = (reading(PLAIN, metrics={"accuracy": 0.5}), reading("distill", metrics={"accuracy": 0.9}))
    assert findings([*plain, better], metric="accuracy").rows[0].figures["metric"].verdict == "better"
    assert findings([*plain, better], metric="accuracy", mode="min").rows[0].figures["metric"].verdict == "worse"


def test_a_metric_that_nobody_reports_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'eval_loss'"):
        chosen_metric(pairs_of()[0], "eval_los", "auto")
    nothing = reading(PLAIN, metrics={})
    assert findings([(nothing, nothing), (nothing, reading("prune"))]).metric is None


def test_a_variant_that_fails_is_a_row_and_the_page_shows_it():
    failed = Reading("average", 0, {"error": "average: decay must be in (0, 1), got 2"})
    found = findings(pairs_of(reading("prune"), failed))
    assert found.rows[1].advice == "failed: average: decay must be in (0, 1), got 2"
    page, text = build_page(*try_page(found, "train.py", 42, 2))
    assert "failed: average: decay must be in (0, 1), got 2" in page
    assert "turns of 2 steps" in text
    assert json.loads(json.dumps(found.as_dict()))["rows"][0]["figures"]["time"]["verdict"] == "same"


def test_equal_plain_runs_are_told():
    same = [(reading(PLAIN), reading(PLAIN)), (reading(PLAIN), reading("prune"))]
    assert "was the same in all plain runs" in findings(same).notes[0]


def test_variants_are_each_technique_and_all(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    work = TryOut(str(script), [], RECIPE, tmp_path, steps=200, repeats=2)
    assert {name: set(recipe) for name, recipe in work.variants.items()} == {
        "prune": {"prune"}, "average": {"average"}, ALL: {"prune", "average"},
    }  # fmt: skip
    assert [second for _, second in work.pairs] == [PLAIN, "prune", "average", ALL] * 2
    with pytest.raises(ConfigError, match=r"--steps must be in \[8, inf\), got 4"):
        TryOut(str(script), [], RECIPE, tmp_path, steps=4)


def test_flags_that_name_an_output_folder_name_another():
    given = ["a.py", "--output-dir", "mine", "--default_root_dir=mine", "--outer", "mine"]
    assert without_output(given, "x") == ["a.py", "--output-dir", "x", "--default_root_dir=x", "--outer", "mine"]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A short run in this process, whose turns have all been given."""
    ours, theirs = socket.socketpair()
    ours.send(b"." * 100)
    options = {"steps": 8, "block": 2, "folder": str(tmp_path), "eval_batches": 0, "seed": 3}
    monkeypatch.setattr(short_run.os, "_exit", lambda code: None)
    register(ShortRun, ShortRunConfig)
    yield Recipe.from_dict({KEY: {**options, "turns": theirs.fileno()}}), ours
    REGISTRY.remove(KEY)
    ours.close()
    theirs.close()


def train(recipe):
    """Eight steps of a small model: its weights, the session, the loss of each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session, losses = Session(recipe), []
    session.attach(model)
    session.begin([optimizer], total_steps=8)
    inputs = torch.ones(16, 4)
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        losses.append(loss.item())
        session.loss(loss).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
    session.finish()
    return model.state_dict(), session, losses


def test_a_measured_run_trains_what_it_would_without_and_tells_each_turn(measured, tmp_path):
    recipe, told = measured
    weights, session, losses = train(recipe)
    assert torch.equal(weights["weight"], train(Recipe({}))[0]["weight"])
    assert told.recv(100) == b"....."  # before the first step, and behind each of four blocks
    metrics = {"eval_loss": 0.5, "eval_runtime": 3.0}
    short_run_of(session).conclude(session, lambda: metrics, lambda place: save_file(weights, place))
    found = json.loads((tmp_path / RESULT_FILE).read_text())
    assert found["steps"] == 8
    assert len(found["seconds"]) == 4
    assert found["metrics"] == {"eval_loss": 0.5, "train_loss": pytest.approx(statistics.fmean(losses[-2:]))}
    assert found["bytes"] == (tmp_path / "model").stat().st_size
    assert found["techniques"] == {}


def test_random_numbers_of_a_run_are_its_own(measured):
    torch.manual_seed(0)
    Session(measured[0]).attach(torch.nn.Linear(4, 1))
    assert torch.initial_seed() == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error"),
    [("print('nothing to see')", "the script ended before a training"), ("1 / 0", "ZeroDivisionError: division by")],
)
def test_a_script_that_does_not_train_ends_the_try(tmp_path, text, error, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text)
    with pytest.raises(TrainingError, match=f"without techniques: {error}"):
        TryOut("train.py", [], RECIPE, tmp_path / "out").run()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["logs"]


def test_the_command_refuses_what_it_cannot_try(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for given, told in (
        (["train.py"], "at least one technique must be switched on"),
        (["--mode", "up", "train.py", "--prune_sparsity", "0.5"], "--mode must be one of auto, min, max"),
        (["none.py", "--prune_sparsity", "0.5"], "script must be a file"),
        (["train.py", "--prune_sparsitty", "0.5"], "did you mean"),
    ):
        with pytest.raises(ConfigError, match=told):
            eff("try", *given)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
