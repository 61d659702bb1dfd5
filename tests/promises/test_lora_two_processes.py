"""Adapters over a base that qat quantises, on two gloo processes: equal on both, and what one process trains."""

import pytest
import torch
from two_process_runs import by_two_and_by_one


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_two_processes_equal_one(front_end, tmp_path):
    for _, first, one in by_two_and_by_one(front_end, tmp_path, ("lora-qat", "lora-qat-lsq")):
        two, alone = (found["state"]["techniques"]["lora"]["layers"] for found in (first, one))
        ((name, layer),) = alone.items()
        assert torch.equal(two[name]["frozen"]["weight"], layer["frozen"]["weight"])
        for ours, theirs in zip(two[name]["adapters"], layer["adapters"], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        for key, weight in one["weights"].items():
            # A sum over ranks rounds otherwise and may tip a baked weight over to the next code.
            step = weight.flatten(1).abs().amax() / 7 if weight.dim() > 1 else 1e-4
            torch.testing.assert_close(first["weights"][key], weight, atol=float(step), rtol=0)
