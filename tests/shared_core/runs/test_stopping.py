"""A command that is stopped ends its training, with all that this started, and says what is kept."""

import os
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
pathlib.Path("pids.part").write_text(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""
COMMANDS = {
    "chain": (["chain", "--out", "out", "--", "python", "train.py", "{out}"], "0 of 1 stages are finished in out"),
    "lottery": (["lottery", "--out", "out", "--", "python", "train.py"], "0 runs are finished in out"),
    "try": (["try", "--out", "out", "train.py", "--prune_sparsity", "0.5"], "logs"),
}


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def as_at_a_terminal():
    """Take signals, which a test run in the background, or under nohup, ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at processes in /proc")
@pytest.mark.parametrize(("command", "number"), [
    ("chain", signal.SIGTERM),
    pytest.param("chain", signal.SIGINT, marks=pytest.mark.slow),
    pytest.param("chain", signal.SIGHUP, marks=pytest.mark.slow),
    pytest.param("lottery", signal.SIGINT, marks=pytest.mark.slow),
    pytest.param("try", signal.SIGTERM, marks=pytest.mark.slow),
])  # fmt: skip
def test_what_it_started_ends_with_it(tmp_path, command, number):
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments, kept = COMMANDS[command]
    run = subprocess.Popen(
        [sys.executable, "-P", "-m", "efftrain", *arguments], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
        preexec_fn=as_at_a_terminal,
    )  # fmt: skip
    pids = []
    try:
        end = time.monotonic() + 200
        while not (tmp_path / "pids").exists():
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        run.send_signal(number)
        _, errors = run.communicate(timeout=200)
        assert run.returncode == 128 + number
        assert "stopped" in errors
        assert kept in errors
        assert not any(map(is_alive, pids))
    finally:
        run.kill()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
