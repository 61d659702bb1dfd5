"""A model that transformers cuts by its plan, two gloo processes: what one process trains, in plain files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from two_ranks import ranks_of, run_scripts

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "hf_tensor_parallel.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    run_scripts([([SCRIPT, one], {})], one)
    shutil.copytree(one / "start", two / "start")
    run_scripts(ranks_of(SCRIPT, two, two), two)
    return one, two


LOOPS = [f"{name} in a loop" for name in ("prune average", "distill", "checkpointing")]


@pytest.mark.parametrize("name", ["prune average", "distill", "checkpointing", "lottery", "soup", *LOOPS])
def test_files_are_those_of_one_process(folders, name):
    alone, parts = (load_file(folder / name / "final" / "model.safetensors") for folder in folders)
    assert alone.keys() == parts.keys()
    torch.testing.assert_close(parts, alone, atol=1e-6, rtol=0)
    zeros = [sum(int((value == 0).sum()) for value in weights.values()) for weights in (alone, parts)]
    assert zeros[0] == zeros[1]
    assert (zeros[0] > 1000) == name.startswith("prune average")
    assert [path.parent.name for path in (folders[1] / name).rglob("eff_receipt.json")] == [
        "final" if name in LOOPS else name
    ]


def test_what_does_not_work_is_refused_at_start(folders):
    for rank in range(2):
        told = json.loads((folders[1] / f"refused{rank}.json").read_text())
        assert "must compute by the forward of its class" in told["qat"]
        assert "lora cannot be combined with tensor parallelism" in told["lora"]
        assert not any(line.count("\n") for line in told.values())
