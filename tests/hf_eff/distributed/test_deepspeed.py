"""DeepSpeed in the Trainer, on a CPU where it is installed: distillation under ZeRO-Offload is that without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from two_ranks import ENVIRONMENT

pytest.importorskip("deepspeed")

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "hf_deepspeed.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    command = [sys.executable, "-P", str(SCRIPT), str(folder)]
    done = subprocess.run(
        command, env=ENVIRONMENT | alone | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "told.json").read_text())


def test_distillation_trains_what_it_trains_without_deepspeed(told):
    assert told["accumulated"] == told["resumed"] == 0
    assert told["effect"] > 0.01


def test_what_acts_on_weights_or_gradients_is_refused_by_name(told):
    allowed = {"matmul", "distill"}
    assert set(told["refused"]) == set(told["keys"]) - allowed
    assert all(f"{key} cannot be combined with DeepSpeed" in line for key, line in told["refused"].items())
    assert "distill cannot be combined with DeepSpeed ZeRO stage 3" in told["stage_3"]
