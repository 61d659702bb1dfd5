"""The commands look for nothing on the network; that no training does is seen in all tests of this folder."""

import socket
import sys

import pytest
import torch
from commands import eff
from promise_table import make_net
from safetensors.torch import save_file

TASK = """
from promise_table import make_net
def quality(model):
    return -float(model.head.bias.abs().max())
"""


def test_commands_ask_no_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "offline_task.py").write_text(TASK)
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file(dict(make_net(seed=step).state_dict()), folder / "model.safetensors")
    for line in (
        "plan --params 7e9 --gpus 8",
        "compat",
        "flags",
        "formats",
        "soup run --eval offline_task:quality --model offline_task:make_net --out soup",
        "compress soup --out small",
        "decompress small --out large",
    ):
        result = eff(*line.split())
        assert result.exit_code == 0, (line, result.output)


def test_the_guard_works():
    # a BaseException, which nothing that tries the network catches
    with pytest.raises(BaseException, match="asked the network"):
        socket.create_connection(("127.0.0.1", 9))
    with pytest.raises(BaseException, match="asked the network"):
        torch.hub.load_state_dict_from_url("https://localhost/none")
