"""A script run by one process and by two under FSDP2: what each of them left behind."""

import json

import torch
from two_ranks import run_scripts, run_two_ranks


def run_by_one_and_by_two(script, folder):
    for name in ("one", "two"):
        (folder / name).mkdir()
    run_scripts([([script, folder / "one"], {})], folder / "one")
    output = run_two_ranks(script, folder / "two", folder / "two")
    return {
        "alone": torch.load(folder / "one" / "alone.pt", weights_only=True),
        "ranks": [torch.load(folder / "two" / f"{rank}.pt", weights_only=True) for rank in (0, 1)],
        "told": [json.loads((folder / "two" / f"{rank}.json").read_text()) for rank in (0, 1)],
        "output": output,
        "folder": folder / "two",
    }


def assert_two_trained_what_one_did(runs, name):
    first, second = (found[name] for found in runs["ranks"])
    alone = runs["alone"][name]
    assert first.keys() == second.keys() == alone.keys()
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        # baked weights may differ by one code, where a rounding of the sum over ranks tips a weight over
        code = float(value.abs().max()) / 127 if "qat.ranges" in alone and value.dim() > 1 else 1e-6
        torch.testing.assert_close(first[key].double(), value.double(), rtol=1e-6, atol=code)
