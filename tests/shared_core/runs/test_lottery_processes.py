"""Searches in fresh processes: equal to those in one, killed and gone on with, by the command line too."""

import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import eff
from lottery_runs import train

from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.runs import LotterySearch

OPTIONS = {"rounds": 1, "rate": 0.5, "rewind_to": 2}
SUPPORT = Path(__file__).resolve().parents[2] / "support" / "techniques"
SCRIPT = f"""
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
from lottery_runs import train
from shared_core import Recipe

name, here = sys.argv[1], Path({{here!r}})
with (here / "started").open("a") as file:
    file.write(name + " " + json.dumps(sys.argv[2:]) + "\\n")

def each_step(session, model, optimizer):
    if session.step != 7:
        return
    if name == "round-01" and (here / "die").exists():
        (here / "die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "round-01" and (here / "orphan").exists():
        (here / "orphan").unlink()
        os.kill(int((here / "driver").read_text()), signal.SIGKILL)
        for _ in range(2400):
            if (here / "release").exists():
                break
            time.sleep(0.05)
        os._exit(1)

train(Recipe.from_yaml(Path(os.environ["EFF_RECIPE"])), each_step=each_step)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my_train.py"
    path.write_text(SCRIPT.format(here=str(tmp_path)))
    return path


def started(script):
    return [line.split(" ")[0] for line in (script.parent / "started").read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_training_is_run_again_and_finished_rounds_are_not(tmp_path, script):
    (tmp_path / "die").touch()
    command = [sys.executable, str(script), "{round}", "--recipe={recipe}"]
    with pytest.raises(TrainingError, match=r"round-01 failed: .* ended with exit code -9"):
        LotterySearch(**OPTIONS).run_command(command, tmp_path / "out")
    again = LotterySearch(**OPTIONS).run_command(command, tmp_path / "out")
    assert started(script) == ["round-00", "round-01", "round-01"]

    here = LotterySearch(**OPTIONS).run(train, tmp_path / "here")
    assert again == here
    for number in (0, 1):
        file = f"round-{number:02d}/ticket.safetensors"
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "here" / file).read_bytes()
    told = [json.loads(line.partition(" ")[2]) for line in (tmp_path / "started").read_text().splitlines()]
    assert told[2] == [f"--recipe={(tmp_path / 'out' / 'round-01' / 'recipe.yaml').resolve()}"]

    line = ["--rounds", 1, "--rate", 0.5, "--rewind_to", 2, "--out", tmp_path / "out"]
    plot = tmp_path / "curve.svg"
    done = eff("lottery", *line, "--plot", plot, "--", *command)
    assert "lottery tickets: val_loss" in done.stdout
    assert "round-01" in done.stderr
    assert "<svg" in plot.read_text()
    assert len(started(script)) == 3
    with pytest.raises(CheckpointError, match="command is"):
        LotterySearch(**OPTIONS).run_command(["true"], tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot start the command"):
        LotterySearch(**OPTIONS).run_command(["/no/such/program"], tmp_path / "none")


@pytest.mark.slow
def test_a_killed_search_waits_for_the_training_it_left_behind(tmp_path, script):
    (tmp_path / "orphan").touch()
    command = [sys.executable, str(script), "{round}"]
    line = ["--rounds", 1, "--rate", 0.5, "--rewind_to", 2, "--out", tmp_path / "out", "--json", "--", *command]
    code = "from shared_core.cli import main; main()"
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "lottery", *map(str, line)], stdout=log, stderr=log
        )
        (tmp_path / "driver").write_text(str(driver.pid))
        assert driver.wait(timeout=200) == -signal.SIGKILL, (tmp_path / "log").read_text()
    with pytest.raises(TrainingError, match="a training that a killed one left running"):
        LotterySearch(**OPTIONS).run_command(command, tmp_path / "out")
    (tmp_path / "release").touch()
    with (tmp_path / "out" / ".lottery.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the orphan's end
    curve = LotterySearch(**OPTIONS).run_command(command, tmp_path / "out")
    assert started(script) == ["round-00", "round-01", "round-01"]
    assert [row.replay for row in curve.rows] == [None, "bit-equal"]
