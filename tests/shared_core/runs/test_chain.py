"""Chains of students: planned and refused before anything runs, killed and gone on with, never silently undistilled."""

import fcntl
import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from chain_stage import write_safetensors
from reports import report_of

from shared_core.errors import CheckpointError, ConfigError, EffError, TrainingError
from shared_core.runs import RunError, TeacherChain, plan_stages
from shared_core.runs.command import TrainingCommand

STAGE = Path(__file__).resolve().parents[2] / "support" / "trainers" / "chain_stage.py"


@pytest.fixture
def command(tmp_path):
    """A command that is no `python script.py` to the chain, so that its processes need not import torch."""
    return ["env", sys.executable, "-S", str(STAGE), str(tmp_path), "{student}", "{out}"]


@pytest.fixture
def big(tmp_path):
    (tmp_path / "big" / "checkpoint-9").mkdir(parents=True)
    write_safetensors(tmp_path / "big" / "checkpoint-9" / "model.safetensors", 40)
    return str(tmp_path / "big")


def started(tmp_path):
    return [json.loads(line) for line in (tmp_path / "started").read_text().splitlines()]


invoke = functools.partial(commands.eff, "chain")


def plan(*arguments, command=("train", "{student}", "{out}"), **options):
    return plan_stages(TrainingCommand.parse(command, "chain"), **options)


def test_students_learn_from_the_one_before(big):
    first, second = plan(teacher=big, students=["a", "b"], options={"temperature": ["4", "2"], "alpha": ["0.3"]})
    assert (first.teacher, second.teacher) == (f"{big}/checkpoint-9", "stage-1")
    assert first.flags == {"distill_temperature": "4", "distill_alpha": "0.3"}
    assert (
        second.recipe("runs/x").to_dict()["distill"] | {"teacher": "runs/x", "temperature": 2.0, "alpha": 0.3}
        == (second.recipe("runs/x").to_dict()["distill"])
    )


def test_generations_begin_without_a_teacher(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    flags = ["--distill_alpha", "0.2", "--prune_sparsity", "0.5"]
    stages = plan(generations=3, options={"temperature": ["1", "3"]}, command=["python", str(script), "{out}", *flags])
    assert [stage.teacher for stage in stages] == [None, "stage-1", "stage-2"]
    assert list(stages[0].recipe(None)) == ["prune"]
    assert [stage.flags.get("distill_temperature") for stage in stages] == [None, "1", "3"]
    assert stages[2].recipe("x")["distill"].alpha == 0.2


def test_a_teacher_may_be_on_the_hub_or_cached(tmp_path):
    for name in ("gpt2", "google/vit-base"):
        assert plan(teacher=name, students=["a"])[0].teacher == name
    assert plan(teacher=f"cache:{tmp_path}", students=["a"])[0].teacher == f"cache:{tmp_path}"


def test_a_baseline_is_a_chain_without_its_teacher():
    for options in ({}, {"generations": 1}, {"options": {"alpha": ["0.2"]}}):
        (stage,) = plan(command=["train", "{out}"], **options)
        assert (stage.teacher, stage.flags, dict(stage.recipe(None))) == (None, {}, {})


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"students": ["a"], "generations": 2}, ConfigError, "one of students and generations"),
    ({"generations": 0}, ConfigError, "generations must be at least 1, got 0"),
    ({"students": ["a", "b"], "command": ["train", "{student}"]}, ConfigError, r"must contain \{out\}"),
    ({"students": ["a", "b"], "command": ["train", "{out}"]}, ConfigError, r"must contain \{student\}"),
    ({"generations": 2}, ConfigError, r"must not contain \{student\}"),
    ({"generations": 2, "command": ["train", "{out}", "{teacher}"]}, ConfigError, r"must not contain \{teacher\}"),
    ({"teacher": "ema", "students": ["a"]}, ConfigError, "got ema"),
    ({"teacher": "./nowhere", "students": ["a"]}, CheckpointError, "or a Hub name"),
    ({"teacher": "/nowhere/at/all", "students": ["a"]}, CheckpointError, "or a Hub name"),
    ({"teacher": "cache:nowhere", "students": ["a"]}, CheckpointError, "eff cache-teacher"),
    ({"students": ["a", "b"], "options": {"alpha": ["2"]}}, ConfigError, "alpha must be"),
    ({"students": ["a", "b"], "options": {"alpa": ["0.2"]}}, ConfigError, "did you mean '--distill_alpha'"),
    ({"students": ["a", "b"], "options": {"teacher": ["x"]}}, ConfigError, "distill_teacher must not be given"),
    ({"students": ["a", "b"], "options": {"alpha": ["0", "1"]}}, ConfigError, "each of the 1 stages with a teach"),
])  # fmt: skip
def test_wrong_plans_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        plan(**options)


def test_a_teacher_folder_without_a_model_and_foreign_files_are_refused(tmp_path, command, big):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no trained model"):
        plan(teacher=str(tmp_path / "empty"), students=["a"])
    for folder, message in (("big", "has 'checkpoint-9' and no chain.json"), ("a,b", "no comma")):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            TeacherChain(command, tmp_path / folder, teacher=big, students=["a"])
    (tmp_path / "recipe.yaml").write_text("distill: {teacher: x}")
    (tmp_path / "train.py").touch()
    script = ["python", str(tmp_path / "train.py"), "{out}", "--eff_recipe", str(tmp_path / "recipe.yaml")]
    with pytest.raises(ConfigError, match="must have no distill section"):
        plan(generations=2, command=script)
    for flags, message in ((["--distill_teacher", "x"], "must not be given"), (["--distill_alpha", "1"], "before and")):
        with pytest.raises(ConfigError, match=message):
            plan(generations=2, command=[*script[:3], *flags], options={"alpha": ["0.5"]})
    assert not (tmp_path / "started").exists()


def test_a_killed_stage_is_run_again_and_finished_ones_are_not(tmp_path, command, big):
    out = tmp_path / "out"
    line = ["--teacher", big, "--students", 30, 20, "--distill_temperature", 4, 2, "--out", out]
    (tmp_path / "die").touch()
    done = invoke(*line, "--", *command)
    assert done.exit_code == 128 + 9
    assert json.loads((out / "chain.json").read_text())["stages"] == []
    wrong = "stage-1 logged, got 'eval_acuracy'.*eval_accuracy.*finished stages are kept"
    with pytest.raises(EffError, match=wrong):
        invoke(*line, "--metric", "eval_acuracy", "--", *command)
    done = invoke(*line, "--metric", "eval_accuracy", "--json", "--", *command)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = told["stages"]
    assert [row["metric"] for row in rows] == [0.3, 0.2]
    assert "| 2 | 20 | 20 | stage-1 | eval_accuracy 0.2, eval_f1 0.2 |" in report_of(out)
    assert [(row["parameters"], row["teacher_parameters"]) for row in rows] == [(30, 40), (20, 30)]
    assert rows[0]["metrics"] == {"eval_accuracy": 0.3, "eval_f1": 0.3}
    assert "training stage-2" in done.stderr
    assert "stage-2: 20 learns from stage-1" in done.stderr
    half = ["stage-1", 30, "big", []]
    assert started(tmp_path) == [half, half, ["stage-2", 20, "stage-1", []]]
    assert "temperature: 2.0" in (out / "stage-2.yaml").read_text()

    line[3:5], line[7:9] = [30, 20, 25], [4, 2, 1]
    longer = invoke(*line, "--", *command)
    assert "--metric may be eval_accuracy, eval_f1" in " ".join(longer.stdout.split())
    assert "warning: stage-3: 25 has 25 parameters, not fewer than its teacher's 20" in longer.stderr
    assert len(started(tmp_path)) == 4

    for at, value, message in (
        (4, 21, "student is '20', now '21'"),
        (8, 3, "flags is"),
        (slice(5, 6), [], "--distill-temperature must have one value, or one for each of the 2"),
    ):
        changed = list(line)
        changed[at] = value
        with pytest.raises(EffError, match=message):
            invoke(*changed, "--", *command)
    with pytest.raises(EffError, match="command is"):
        invoke(*line, "--", *command, "--lr", 1)
    with pytest.raises(CheckpointError, match="at least the 3 finished stages, got 2"):
        TeacherChain(command, out, teacher=big, students=["30", "20"], options={"temperature": ["4", "2"]})
    (out / rows[0]["model"] / "model.safetensors").unlink()
    (out / rows[0]["model"] / "trainer_state.json").unlink()
    (out / rows[0]["model"]).rmdir()
    with pytest.raises(EffError, match="the model of stage-1"):
        invoke(*line, "--", *command)


def test_what_fails_says_why_and_can_be_gone_on_with(tmp_path, command, big):
    out, students = tmp_path / "out", {"teacher": big, "students": ["30"]}
    (tmp_path / "fail").touch()
    done = invoke("--teacher", big, "--students", 30, "--out", out, "--", *command)
    assert done.exit_code == 7
    assert done.stderr.count("first line") == 14
    assert done.stderr.rstrip().endswith("the loss is NaN")
    (tmp_path / "undistilled").touch()
    with pytest.raises(TrainingError, match="no distilled batch"):
        TeacherChain(command, out, **students).run()
    (tmp_path / "unheard").touch()
    with pytest.raises(TrainingError, match="no distillation"):
        TeacherChain(command, out, **students).run()
    (tmp_path / "lost").touch()
    with pytest.raises(CheckpointError, match=r"has no trained model.*--model"):
        TeacherChain(command, out, **students).run()
    before = len(started(tmp_path))
    table = TeacherChain(command, out, model="hid*", **students).run()
    assert (table.rows[0].model, len(started(tmp_path))) == ("stage-1/hidden", before)  # it was not trained again


def test_generations_hand_over(tmp_path, command):
    command[command.index("{student}")] = "3{stage}"
    rows = TeacherChain(command, tmp_path / "out", generations=2).run().rows
    assert [(row.parameters, row.teacher_parameters) for row in rows] == [(31, None), (32, 31)]
    assert (rows[0].batches, rows[1].batches, rows[1].warnings) == (0, 3, ())
    assert (tmp_path / "out" / "stage-1.yaml").read_text() == "{}\n"
    assert len(TeacherChain(command, tmp_path / "out", generations=3).run().rows) == 3
    assert [name for name, *_ in started(tmp_path)] == ["stage-1", "stage-2", "stage-3"]


def test_resume_leaves_the_folder_of_a_half_run_stage(tmp_path, command, big):
    (tmp_path / "die").touch()
    work = TeacherChain(command, tmp_path / "out", teacher=big, students=["30"])
    with pytest.raises(RunError, match="exit code -9"):
        work.run()
    assert work.run(resume=True).rows[0].parameters == 30
    assert started(tmp_path)[1][3] == ["half"]
    assert (tmp_path / "out" / "stage-1.log").read_text().count("training stage-1") == 2


@pytest.mark.slow
def test_a_killed_chain_waits_for_the_training_it_left_behind(tmp_path, command, big):
    (tmp_path / "kill-driver").touch()
    line = ["chain", "--teacher", big, "--students", "30", "--out", str(tmp_path / "out"), "--", *command]
    with (tmp_path / "log").open("w") as log:
        code = "from shared_core.cli import main; main()"
        driver = subprocess.Popen([sys.executable, "-P", "-c", code, *line], stdout=log, stderr=log)
        assert driver.wait(timeout=200) == -signal.SIGKILL, (tmp_path / "log").read_text()
    work = TeacherChain(command, tmp_path / "out", teacher=big, students=["30"])
    with pytest.raises(TrainingError, match="a training that a killed one left running"):
        work.run()
    (tmp_path / "release").touch()
    with (tmp_path / "out" / ".chain.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the orphan's end
    assert work.run().rows[0].batches == 3


def test_the_command_line_wants_values(tmp_path):
    for arguments, message in (
        (["--generations", 2, "--out", tmp_path / "o"], "COMMAND must be given"),
        (["--generations", 2, "--out", tmp_path / "o", "--distill_alpha", "--", "true", "{out}"], "must have a value"),
        (["--generations", 2, "--out", tmp_path / "o", "--", "python", "no.py"], "script must be a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            invoke(*arguments)
    assert not (tmp_path / "o").exists()
