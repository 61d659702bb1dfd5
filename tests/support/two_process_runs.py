"""A recipe trained by a front end on two gloo processes and, for comparison, in one."""

import sys
from pathlib import Path

import torch
from promise_drivers import difference, run_accelerate, run_fabric, run_hf, run_lightning, states_at_finish
from promise_table import recipe_of
from two_ranks import run_two_ranks

from shared_core.distributed import collectives as ranks


def by_two_and_by_one(front_end, folder, recipes):
    """For each recipe what the first of two equal ranks left, its weights and state, and the same of one process."""
    run = {"hf": run_hf, "lightning": run_lightning, "accelerate": run_accelerate, "fabric": run_fabric}[front_end]
    for recipe, first, second in by_two(front_end, folder, recipes):
        states = [rank["state"]["techniques"] for rank in (first, second)]
        for state in states:  # bytes of each rank's own activations
            state.get("activations", {}).pop("counts", None)
        found = difference(first["weights"], second["weights"]) or difference(*states)
        assert found is None, found
        with states_at_finish() as states:
            one = run(recipe_of(*recipe.split("+")), folder / "one" / recipe, batch_norm=False, optim="sgd")
        yield recipe, first, {"weights": one.weights, "state": states[0]}


def by_two(front_end, folder, recipes):
    """For each recipe what two ranks left; one that ends in ``@batch_norm`` trains a model with BatchNorm."""
    run_two_ranks(__file__, folder, front_end, folder, *recipes, seconds=280)
    for recipe in recipes:
        yield recipe, *(torch.load(folder / recipe / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))


def rank_of_two(front_end, folder, recipes):
    """One rank; writes weights and session state, a file a recipe."""
    for recipe in recipes:
        out = folder / recipe
        out.mkdir(parents=True, exist_ok=True)  # the main process makes it, but perhaps later than this one saves
        keys, _, norm = recipe.partition("@")
        wanted = recipe_of(*keys.split("+"))
        options = {"batch_norm": bool(norm), "batch": 4, "optim": "sgd"}
        with states_at_finish() as states:
            if front_end == "hf":
                result = run_hf(wanted, out, ddp_find_unused_parameters=False, **options)
            elif front_end == "accelerate":
                result = run_accelerate(wanted, out, **options)
            elif front_end == "fabric":
                result = run_fabric(wanted, out, devices=2, strategy="ddp", **options)
            else:
                result = run_lightning(wanted, out, devices=2, strategy="ddp", **options)
        torch.save({"weights": result.weights, "state": states[0]}, out / f"rank{ranks.rank()}.pt")


if __name__ == "__main__":
    rank_of_two(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
