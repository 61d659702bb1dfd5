"""A recipe trained by a front end on two gloo processes and, for comparison, in one."""

import subprocess
import sys
from pathlib import Path

import torch
from promise_drivers import difference, run_hf, run_lightning, states_at_finish
from promise_table import recipe_of
from two_ranks import ENVIRONMENT

WORKER = Path(__file__).parent / "two_process_worker.py"


def by_two_and_by_one(front_end, folder, recipes):
    """For each recipe what the first of two equal ranks left, its weights and state, and the same of one process."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    done = subprocess.run(
        [*command, str(WORKER), front_end, str(folder), *recipes],
        capture_output=True, text=True, check=False, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    run = {"hf": run_hf, "lightning": run_lightning}[front_end]
    for recipe in recipes:
        first, second = (torch.load(folder / recipe / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
        states = (rank["state"]["techniques"] for rank in (first, second))
        found = difference(first["weights"], second["weights"]) or difference(*states)
        assert found is None, found
        with states_at_finish() as states:
            one = run(recipe_of(*recipe.split("+")), folder / "one" / recipe, batch_norm=False, optim="sgd")
        yield recipe, first, {"weights": one.weights, "state": states[0]}
