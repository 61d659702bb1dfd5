"""A script run by one process and by two under FSDP2: what each of them left behind."""

import json

import torch
from codes import assert_codes_close, code_step
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


def ranges_and_steps(technique, weights):
    """Return what two runs with qat are compared by: ranges of inputs, and the step of each weight's codes."""
    steps = {name: code_step(told, weights[f"{name}.weight"]) for name, told in technique.ranges().items()}
    return {"qat.ranges": technique.bank.ranges, **{f"qat.step of {name}.weight": step for name, step in steps.items()}}


def assert_two_trained_what_one_did(runs, name):
    first, second = (found[name] for found in runs["ranks"])
    alone = runs["alone"][name]
    assert first.keys() == second.keys() == alone.keys()
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        if f"qat.step of {key}" in alone:
            # a sum over ranks rounds otherwise and may tip a weight over to the next code
            assert_codes_close(first[key], value, alone[f"qat.step of {key}"], max_flips=0.05)
        else:  # of what is quantised no more than a code's share of a gradient
            tolerance = 1e-4 if "qat.ranges" in alone else 1e-6
            torch.testing.assert_close(first[key].double(), value.double(), rtol=tolerance, atol=tolerance)
