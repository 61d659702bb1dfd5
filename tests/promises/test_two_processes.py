"""Two gloo processes: equal on both ranks, and the same masks and ranges as one process on the joined batch.

A sum over ranks rounds otherwise and may tip a baked weight over to the next code.
"""

import pytest
import torch
from codes import assert_codes_close, grid_step
from promise_drivers import difference
from promise_table import STRUCTURED, TECHNIQUES, TOGETHER
from two_process_runs import by_two, by_two_and_by_one

KEYS = [key for key in TOGETHER if "two_processes" not in TECHNIQUES[key].exempt]
ROUNDED = "+".join(KEYS)
EXACT = "+".join(key for key in KEYS if key != "qat")
MUTUAL = "distill-mutual"  # whose other students DDP knows nothing of
ADAPTERS = ("lora-qat", "lora-qat-lsq")


FRONT_ENDS = pytest.mark.parametrize("front_end", ["hf", "lightning", "accelerate", "fabric"])


def assert_same_adapters(two, alone):
    ((name, layer),) = alone.items()
    assert torch.equal(two[name]["frozen"]["weight"], layer["frozen"]["weight"])
    for ours, theirs in zip(two[name]["adapters"], layer["adapters"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@FRONT_ENDS
def test_two_processes_equal_one(front_end, tmp_path):
    # private training needs all data in each process, and the Lightning run of the table gives each its own
    more = ("dp",) if front_end == "hf" else ()
    recipes = (EXACT, ROUNDED, MUTUAL, "low_rank", *ADAPTERS, *STRUCTURED, *more)
    for recipe, first, one in by_two_and_by_one(front_end, tmp_path, recipes):
        two, alone = (found["state"]["techniques"] for found in (first, one))
        assert first["state"]["step"] == one["state"]["step"] == 8
        if recipe in STRUCTURED:  # scores are sums over processes, and round otherwise
            assert difference(two["prune"]["masks"], alone["prune"]["masks"]) is None
            assert any(int(mask.count_nonzero()) < mask.numel() for mask in two["prune"]["masks"].values())
        elif "prune" in recipe:
            assert difference(two["prune"], alone["prune"]) is None
        if recipe == MUTUAL:
            for ours, theirs in zip(*(state["distill"]["teachers"]["peers"] for state in (two, alone)), strict=True):
                torch.testing.assert_close(ours["weights"], theirs["weights"], atol=1e-6, rtol=0)
        for name, weight in one["weights"].items():
            if "qat" in recipe and weight.dim() > 1:
                assert_codes_close(first["weights"][name], weight, grid_step(weight), max_flips=0.05)
                continue
            tolerance = 1e-4 if "qat" in recipe else 1e-6  # a code's share of a gradient
            torch.testing.assert_close(first["weights"][name], weight, atol=tolerance, rtol=0)
        if recipe in ADAPTERS:
            assert_same_adapters(two["lora"]["layers"], alone["lora"]["layers"])
        elif "qat" in recipe:
            torch.testing.assert_close(two["qat"]["ranges"], alone["qat"]["ranges"], atol=1e-4, rtol=0)


@FRONT_ENDS
def test_ranks_end_with_the_same_weights_and_buffers_where_each_has_batch_norms_of_its_own(front_end, tmp_path):
    keys = ["qat", "qat-lsq", "low_rank", "lora-qat", ROUNDED]
    keys += ["soup"] if front_end in ("hf", "lightning") else []
    for recipe, first, second in by_two(front_end, tmp_path, [f"{key}@batch_norm" for key in keys]):
        assert difference(first["weights"], second["weights"]) is None, recipe
