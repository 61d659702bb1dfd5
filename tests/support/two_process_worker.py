"""One rank of two-process runs; Writes weights and session state, one file a rank and recipe."""

import sys
from pathlib import Path

import torch
from promise_drivers import run_hf, run_lightning, states_at_finish
from promise_table import recipe_of

from shared_core.distributed import collectives as ranks


def main(front_end: str, folder: Path, recipes: list[str]) -> None:
    for recipe in recipes:
        out = folder / recipe
        out.mkdir(parents=True, exist_ok=True)  # the main process makes it, but perhaps later than this one saves
        options = {"batch_norm": False, "batch": 4, "optim": "sgd"}
        with states_at_finish() as states:
            if front_end == "hf":
                result = run_hf(recipe_of(*recipe.split("+")), out, ddp_find_unused_parameters=False, **options)
            else:
                result = run_lightning(recipe_of(*recipe.split("+")), out, devices=2, strategy="ddp", **options)
        torch.save({"weights": result.weights, "state": states[0]}, out / f"rank{ranks.rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
