"""``--json``: stdout holds JSON alone, whatever the user's functions print. Plots that cannot be drawn stop early."""

import json

import pytest
import torch
from commands import eff, user_module
from safetensors.torch import save_file
from torch import nn

from shared_core.errors import ConfigError

TASK = """
import torch
from torch import nn

print("imported")

def model():
    print("built")
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(2, 8)

def batches():
    for _ in range(2):
        print("a batch")
        yield torch.ones(2, 8)

def quality(net):
    print("judged")
    return float(net(torch.ones(1, 8)).sum())
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "talk", TASK)
    for seed in range(2):
        torch.manual_seed(seed)
        save_file(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).state_dict(), f"{seed}.safetensors")


@pytest.mark.parametrize("words", [
    "prune talk:model --sparsity 0.5 --criterion wanda --calibration talk:batches --eval talk:quality --out pruned",
    "quantize talk:model --calibration talk:batches --eval talk:quality --out quantized",
    "low-rank talk:model --rank 2 --min-size 0 --eval talk:quality --out thin",
    "soup 0.safetensors 1.safetensors --eval talk:quality --model talk:model --out soup.safetensors",
], ids=lambda words: words.split()[0])  # fmt: skip
def test_what_functions_print_stands_on_stderr(words):
    result = eff(*words.split(), "--json")
    assert isinstance(json.loads(result.stdout), dict)
    assert "built" in result.stderr
    assert "judged" in result.stderr


@pytest.mark.parametrize("words", [
    "lottery --rounds 1 --out search --plot curve.foo -- python -c pass",
    "soup 0.safetensors 1.safetensors --eval talk:quality --model talk:model --out s.safetensors --plot p.foo",
], ids=lambda words: words.split()[0])  # fmt: skip
def test_a_plot_that_cannot_be_drawn_stops_before_the_work(words, tmp_path):
    with pytest.raises(ConfigError, match=r"--plot must be a file ending in \.png"):
        eff(*words.split())
    assert not (tmp_path / "search").exists()
