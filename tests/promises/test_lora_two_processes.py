"""Adapters over a base that qat quantises, on two gloo processes: equal on both, and what one process trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from promise_drivers import difference, run_hf, run_lightning, states_at_finish
from promise_table import recipe_of

WORKER = Path(__file__).resolve().parent.parent / "support" / "two_process_worker.py"
RECIPES = ("lora-qat", "lora-qat-lsq")


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_two_processes_equal_one(front_end, tmp_path):
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    environment = os.environ | {"PYTHONPATH": str(WORKER.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER), front_end, str(tmp_path), *RECIPES],
        capture_output=True, text=True, check=False, env=environment, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for recipe in RECIPES:
        first, second = (torch.load(tmp_path / recipe / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
        assert difference(first["weights"], second["weights"]) is None
        assert difference(first["state"]["techniques"], second["state"]["techniques"]) is None
        run = {"hf": run_hf, "lightning": run_lightning}[front_end]
        with states_at_finish() as states:
            one = run(recipe_of(recipe), tmp_path / "one" / recipe, batch_norm=False, optim="sgd")
        two, alone = (state["techniques"]["lora"]["layers"] for state in (first["state"], states[0]))
        ((name, layer),) = alone.items()
        assert torch.equal(two[name]["frozen"]["weight"], layer["frozen"]["weight"])
        for ours, theirs in zip(two[name]["adapters"], layer["adapters"], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        for key, weight in one.weights.items():
            # A sum over ranks rounds otherwise and may tip a baked weight over to the next code.
            step = weight.flatten(1).abs().amax() / 7 if weight.dim() > 1 else 1e-4
            torch.testing.assert_close(first["weights"][key], weight, atol=float(step), rtol=0)
