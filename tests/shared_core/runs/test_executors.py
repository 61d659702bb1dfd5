"""Runs of searches that are started elsewhere: by submitit with and without SLURM's commands, and by Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chain_stage import write_safetensors
from commands import eff
from lottery_runs import train

from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, MissingExtraError, TrainingError
from shared_core.files.journal import write_object
from shared_core.runs import LotterySearch, executor_of
from shared_core.runs.command import TrainingCommand
from shared_core.runs.executors import LocalExecutor, RemoteRun, run_training

SUPPORT = Path(__file__).resolve().parents[2] / "support"
LOCAL = ["cluster=local", "timeout_min=5"]
SLURM = {
    # takes the job that submitit wrote, and runs it as SLURM would: later, in a process of its own
    "sbatch": """#!/bin/bash
echo $$ > "$SLURM_STATE/42.pid"
export SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
export SLURM_JOB_NODELIST=here
grep '^#SBATCH' "$1" > "$SLURM_STATE/asked"
(cd /; bash "$1"; touch "$SLURM_STATE/42.done") > /dev/null 2>&1 &
echo Submitted batch job 42
""",
    "srun": """#!/bin/bash
while [[ "$1" == --* ]]; do [[ "$1" == --output || "$1" == --error ]] && shift; shift; done
exec "$@"
""",
    "sacct": """#!/bin/bash
state=RUNNING; [ -e "$SLURM_STATE/42.done" ] && state=COMPLETED
printf 'JobID|State|NodeList\\n42|%s|here\\n' $state
""",
    "scancel": """#!/bin/bash
echo "$@" >> "$SLURM_STATE/canceled"
""",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands, as far as submitit calls them; where what they did is noted."""
    tools, state = tmp_path / "bin", tmp_path / "state"
    tools.mkdir()
    state.mkdir()
    for name, text in SLURM.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STATE", str(state))
    return state


def chain(tmp_path, out, *more):
    if not (tmp_path / "big").exists():
        (tmp_path / "big").mkdir()
        write_safetensors(tmp_path / "big" / "model.safetensors", 40)
    stage = SUPPORT / "trainers" / "chain_stage.py"
    options = ["--teacher", tmp_path / "big", "--students", "20", "10", "--out", out, *more]
    command = ["env", sys.executable, "-S", stage, tmp_path, "{student}", "{out}"]
    return eff("chain", *options, "--", *command)


def stages(out):
    """What a chain noted, but for the time it took."""
    return [{**stage, "seconds": 0} for stage in json.loads((out / "chain.json").read_text())["stages"]]


@pytest.mark.parametrize("executor", ["submitit", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_chain_is_the_same_elsewhere(tmp_path, executor):
    pytest.importorskip(executor)
    assert chain(tmp_path, tmp_path / "here").exit_code == 0
    options = [
        part for one in (LOCAL if executor == "submitit" else ["num_cpus=1"]) for part in ("--executor-set", one)
    ]
    done = chain(tmp_path, tmp_path / "there", "--executor", executor, *options)
    assert done.exit_code == 0, done.output
    assert stages(tmp_path / "there") == stages(tmp_path / "here")
    logs = [(tmp_path / place / "stage-1.log").read_text() for place in ("here", "there")]
    assert logs[0].replace("/here/", "/there/") == logs[1] != ""


def test_a_search_waits_for_a_job_of_slurm(tmp_path, slurm):
    pytest.importorskip("submitit")
    executor = executor_of("submitit", ["timeout_min=90", "slurm_partition=gpu", "gpus_per_node=2"], tmp_path, "here")
    log = tmp_path / "run.log"
    run = executor.start([sys.executable, "-c", "import os; print(os.environ['SIGN'])"], {"SIGN": "seen"}, log)
    assert run.wait() == 0
    assert log.read_text() == "seen\n"
    asked = (slurm / "asked").read_text()
    assert all(f"#SBATCH --{one}\n" in asked for one in ("time=90", "partition=gpu", "gpus-per-node=2"))
    assert json.loads((tmp_path / "run.job.json").read_text()) == {"cluster": "slurm", "job": "42"}
    run.kill()
    assert (slurm / "canceled").read_text() == "42\n"


def test_a_job_that_a_killed_search_left_in_the_queue_is_waited_for(tmp_path, slurm):
    pytest.importorskip("submitit")
    executor = executor_of("submitit", ["timeout_min=90"], tmp_path, "eff chain")
    write_object(tmp_path / "run.job.json", {"cluster": "slurm", "job": "42"})
    with pytest.raises(TrainingError, match=r"job 42 of .* is still waiting or running.*scancel 42"):
        executor.start(["true"], {}, tmp_path / "run.log")
    (slurm / "42.done").touch()
    assert executor.start(["true"], {}, tmp_path / "run.log").wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["submitit", "ray"])
def test_a_lottery_search_is_the_same_elsewhere(tmp_path, executor):
    pytest.importorskip(executor)
    script = tmp_path / "my_train.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(SUPPORT / 'techniques')!r})\nfrom lottery_runs import train\n"
        "from shared_core import Recipe\ntrain(Recipe.from_yaml(os.environ['EFF_RECIPE']))\n"
    )
    options = {"rounds": 1, "rate": 0.5, "rewind_to": 2, "controls": ["random_mask", "random_reinit"]}
    here = LotterySearch(**options).run(train, tmp_path / "here")
    made = executor_of(executor, LOCAL if executor == "submitit" else [], tmp_path / "there", "lottery")
    seen = []
    there = LotterySearch(**options).run_command(
        [sys.executable, str(script)], tmp_path / "there", executor=made, progress=lambda curve: seen.append(curve)
    )
    assert there == here
    # nothing waits for controls
    assert [row.control for row in seen[-1].rows] == ["none", "none", "random_mask", "random_reinit"]
    for file in (tmp_path / "here").glob("*/ticket.safetensors"):
        assert file.read_bytes() == (tmp_path / "there" / file.parent.name / file.name).read_bytes()


def test_a_training_that_fails_elsewhere_ends_the_search_with_its_log(tmp_path):
    pytest.importorskip("submitit")
    made = executor_of("submitit", LOCAL, tmp_path, "lottery")
    with pytest.raises(TrainingError, match=r"ended with exit code 3; see .*round-00/output.log"):
        LotterySearch(rounds=1).run_command(["sh", "-c", "echo why; exit 3"], tmp_path / "s", executor=made)
    assert (tmp_path / "s" / "round-00" / "output.log").read_text() == "why\n"
    assert executor_of("submitit", LOCAL, tmp_path, "x").start(["/no/such"], {}, tmp_path / "log").wait() == 127
    assert "No such file" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_search_that_is_interrupted_stops_what_it_started(tmp_path):
    pytest.importorskip("submitit")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts jobs in the background
    try:
        run = executor_of("submitit", LOCAL, tmp_path, "x").start(
            ["sh", "-c", "echo $$; exec sleep 600"], {}, tmp_path / "log"
        )
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.1)
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        time.sleep(0.05)
    run.kill()
    with pytest.raises(TrainingError, match=r"job .* failed"):
        run.wait()
    with pytest.raises(ProcessLookupError):
        for _ in range(1200):
            os.kill(int((tmp_path / "log").read_text()), 0)
            time.sleep(0.05)


@pytest.mark.slow
def test_controls_that_run_are_stopped_when_a_round_fails(tmp_path):
    stopped = []

    class Elsewhere:
        def start(self, arguments, variables, log):
            if "random" not in str(log):
                code = 1 if "round-02" in str(log) else run_training(arguments, variables, str(tmp_path), str(log))
                return RemoteRun(lambda: True, lambda: code, lambda: None)
            return RemoteRun(lambda: False, lambda: 0, lambda: stopped.append(log.parent.name))

    script = (
        f"import os, sys\nsys.path.insert(0, {str(SUPPORT / 'techniques')!r})\nfrom lottery_runs import train\n"
        "from shared_core import Recipe\ntrain(Recipe.from_yaml(os.environ['EFF_RECIPE']))\n"
    )
    search = LotterySearch(rounds=2, rate=0.5, rewind_to=2, controls=["random_mask"])
    with pytest.raises(TrainingError, match="round-02 failed"):
        search.run_command([sys.executable, "-c", script], tmp_path / "s", executor=Elsewhere())
    assert stopped == ["round-01-random_mask"]


@pytest.mark.parametrize(("name", "options", "says"), [
    ("slrum", [], "--executor must be one of local, submitit, ray, got 'slrum'"),
    ("local", ["timeout_min=5"], "--executor-set .*submitit or ray, got timeout_min=5 with local"),
    ("submitit", ["timeout_min"], "--executor-set must be NAME=VALUE, got 'timeout_min'"),
    ("submitit", [], "must name a time limit"),
    ("submitit", ["timeout_min=5", "partitoin=gpu"], "--executor-set .*submitit"),
])  # fmt: skip
def test_wrong_options_are_refused(tmp_path, name, options, says):
    with pytest.raises(ConfigError, match=says):
        executor_of(name, options, tmp_path, "eff chain")


@pytest.mark.parametrize(("name", "extra"), [("submitit", "slurm"), ("ray", "ray")])
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"eff chain: --executor {name}: needs {name}.*efftrain\[{extra}\]"):
        executor_of(name, ["timeout_min=5"], tmp_path, "eff chain")


@pytest.mark.slow
def test_the_steps_of_a_loop_reach_the_runs_of_a_search(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text("import os, sys\nprint(os.environ['EFF_TOTAL_STEPS'], sys.argv[1:])\n")
    parsed = TrainingCommand.parse([sys.executable, str(script), "--eff_total_steps", "70", "--lr", "1"], "lottery")
    assert (parsed.steps, parsed.flags) == ("70", {})
    given = parsed.with_recipe(Recipe({}), tmp_path / "r.yaml", {})
    assert LocalExecutor("lottery").start(*given, tmp_path / "out").wait() == 0
    assert (tmp_path / "out").read_text() == "70 ['--lr', '1']\n"
    with pytest.raises(ConfigError, match="lottery: --eff_total_steps must be a number of optimizer steps, got 'all'"):
        TrainingCommand.parse([sys.executable, str(script), "--eff_total_steps", "all"], "lottery")
