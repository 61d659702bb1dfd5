"""A script run by one process and by two under FSDP2: what each of them left behind."""

import json
import os
import sys
from pathlib import Path

import torch
from codes import assert_codes_close, code_step
from torch.distributed.tensor import DTensor
from two_ranks import run_scripts, run_two_ranks

from shared_core.distributed.collectives import rank
from shared_core.lottery_ticket import read_ticket

SCALE = {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "telemetry_every": 1, "histogram_every": 2}}
FP8 = {recipe: {"fp8": {"recipe": recipe}} for recipe in ("tensorwise", "delayed")}
AVERAGE = {"average": {"kind": "ema", "decay": 0.7, "every": 2}}
PRUNE = {"prune": {"sparsity": 0.6, "begin": 0.2, "end": 0.8, "every": 2}}
DP = {"dp": {"noise_multiplier": 0.5, "seed": 1, "delta": 1e-3}}


def ticket(folder, out, found=None):
    """Return the recipe of a round, of the first or with what another found."""
    given = {} if found is None else {"ticket": str(folder / found / "ticket.safetensors")}
    return {"lottery": {"out": str(folder / out), "rewind_to": 2, "rate": 0.4, **given}}


def run_one_or_two(compared, sharded_only):
    """Be a script of `run_by_one_and_by_two`: one process saves what it can be compared by, each of two more."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    tensors = compared(folder)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        torch.save(tensors, folder / "alone.pt")
    else:
        more, told = sharded_only(folder)
        torch.save({**tensors, **more}, folder / f"{rank()}.pt")
        (folder / f"{rank()}.json").write_text(json.dumps(told))


def weights(model):
    """Return the state dict as whole tensors."""
    state = model.state_dict().items()
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in state}


def left(model, session):
    """Return all that two equal runs have in common, as whole tensors."""
    values = weights(model)
    bank = session.state_dict()["techniques"].get("fp8", {}).get("bank", {})
    if "qat" in session.techniques:
        values |= ranges_and_steps(session.techniques["qat"], values)
    return {**values, **{f"fp8.{name}": torch.as_tensor(value) for name, value in bank.items()}}


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
        else:  # of what is quantized no more than a code's share of a gradient
            tolerance = 1e-4 if "qat.ranges" in alone else 1e-6
            torch.testing.assert_close(first[key].double(), value.double(), rtol=tolerance, atol=tolerance)


def assert_second_round_replays(runs):
    """A lottery's second round begins with its ticket, replays the first one bit for bit and prunes on."""
    told = json.loads((runs["folder"] / "second" / "round.json").read_text())
    assert told["replay"] == "bit-equal"
    one, two = (
        read_ticket(runs["folder"].parent / number / "second" / "ticket.safetensors") for number in ("one", "two")
    )
    assert all(torch.equal(mask, two.masks[name]) for name, mask in one.masks.items())
    found = runs["ranks"][0]["ticket"]
    assert sum(int((found[name] == 0).sum()) for name in two.masks) == two.numel - told["kept"] > 0


def assert_both_left_out_a_step(runs, name, finite):
    """One process alone, or both, knew the step to be bad: `finite` is what each found, None where it is not asked."""
    first, second = (told[name] for told in runs["told"])
    if finite is not None:
        assert [first["finite"], second["finite"]] == finite
    for told in (first, second):
        assert (told["skipped"], told["applied"], told["rate"]) == (1, 5, 5)
    found = [tensors[name] for tensors in runs["ranks"]]
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())
    assert all(bool(value.isfinite().all()) for value in found[0].values())
