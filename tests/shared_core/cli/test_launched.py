"""Commands under torchrun: those that share work write what one process writes, the others are refused."""

import os
import subprocess
import sys

import commands
import pytest

from shared_core.errors import CompatibilityError

TASK = """
import os
import torch
from safetensors.torch import save_file
from torch import nn

def model():
    # what looks for the other processes, as metrics and trainers do, must find none
    assert not torch.distributed.is_initialized() and "WORLD_SIZE" not in os.environ
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 300))

def batches():
    return list(torch.randn(4000, 16, generator=torch.Generator().manual_seed(1)).split(40))

def broken():
    net = model()
    def fail(x):
        if os.path.exists("first"):
            os.rename("first", "gone")  # of the processes the first that comes here
            raise ValueError("no such disk")
        return nn.Sequential.forward(net, x)
    net.forward = fail
    return net

def quality(net):
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return -float((net(x) - x.repeat(1, 19)[:, :300]).square().mean())

def runs():
    for number in range(4):
        net = model()
        torch.manual_seed(10 + number)
        for parameter in net.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        save_file(net.state_dict(), f"{number}.safetensors")
"""

COMMANDS = {
    "cache-teacher": ["launched_task:model", "--data", "launched_task:batches", "--shard-mb", "1"],
    "quantize": ["launched_task:model", "--calibration", "launched_task:batches", "--eval", "launched_task:quality"],
    "soup": [*(f"{n}.safetensors" for n in range(4)), "--eval", "launched_task:quality", "--model",
             "launched_task:model"],
}  # fmt: skip


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launched_task.py").write_text(TASK)
    return tmp_path


def eff(*arguments, processes=1):
    command = [sys.executable, "-P", "-c", "from shared_core.cli import main; main()"]
    if processes > 1:
        starter = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
        command = [*starter, f"--nproc-per-node={processes}", "--no-python", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_two_processes_write_and_print_what_one_does(room, command):
    subprocess.run([sys.executable, "-c", "import launched_task; launched_task.runs()"], check=True)
    outputs = []
    for processes, name in ((1, "folder-1"), (2, "folder-2")):
        out = room / name / "soup.safetensors" if command == "soup" else room / name
        done = eff(command, *COMMANDS[command], "--out", out, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        # a narrow table cuts the folder's name in its title anywhere
        outputs.append("".join(done.stdout.split()).replace(name, "NAME"))
    assert outputs[0] == outputs[1]
    one, two = (sorted((room / name).iterdir()) for name in ("folder-1", "folder-2"))
    assert [file.name for file in one] == [file.name for file in two]
    assert all(mine.read_bytes() == theirs.read_bytes() for mine, theirs in zip(one, two, strict=True))
    assert command != "cache-teacher" or sum("shard" in file.name for file in two) > 2


@pytest.mark.slow
def test_one_that_fails_ends_all_with_its_error(room):
    (room / "first").touch()
    done = eff("quantize", "launched_task:broken", "--calibration", "launched_task:batches", "--out", "o", processes=2)
    assert done.returncode != 0
    assert "no such disk" in done.stderr
    assert "wrote" not in done.stdout
    assert not (room / "o").exists()


@pytest.mark.parametrize("command", ["prune", "shrink", "lottery", "chain", "search", "export"])
def test_a_command_that_shares_no_work_is_refused(monkeypatch, command):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = f"^eff {command}: must run in one process, but a launcher started 2; start it without torchrun$"
    with pytest.raises(CompatibilityError, match=told):
        commands.eff(command, "--out", "x", "model")
