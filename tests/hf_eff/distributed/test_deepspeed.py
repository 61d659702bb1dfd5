"""DeepSpeed in the Trainer, on a CPU where it is installed (make test-deepspeed): what is trained without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_deepspeed import REFUSED, names_of
from safetensors.torch import load_file
from two_ranks import ENVIRONMENT

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "hf_deepspeed.py"
CONFIGS = {1: ("1", "2-offload", "1-bf16", "3"), 2: ("2", "2-bf16-offload", "3")}
PORTS = {1: "29613", 2: "29614"}


def ended(processes):
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what each run saved: ``plain``, and by number of processes and config."""
    folder = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-P", str(SCRIPT)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    ended([subprocess.Popen([*command, str(folder)], env=ENVIRONMENT | {"DS_ACCELERATOR": "cpu"}, **pipes)])
    for world, configs in CONFIGS.items():
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORTS[world]}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"} for rank in range(world)]
        mine = [*command, str(folder / str(world)), *configs]
        ended([subprocess.Popen(mine, env=ENVIRONMENT | place | rank, **pipes) for rank in ranks])
    return folder


def weights(folder):
    (file,) = folder.glob("*.safetensors")  # low_rank names its own
    return load_file(file)


def zeros(found):
    return {name: int((value == 0).sum()) for name, value in found.items()}


@pytest.mark.parametrize(
    ("world", "config", "name"),
    [(*run, name) for run in ((1, "1"), (1, "2-offload"), (2, "2")) for name in names_of(run[1], run[0])],
)
def test_each_technique_trains_what_it_trains_without_deepspeed(folder, world, config, name):
    plain, found = weights(folder / "plain" / name / "final"), weights(folder / str(world) / config / name / "whole")
    assert plain.keys() == found.keys()
    assert max(float((value - found[key]).abs().max()) for key, value in plain.items()) < 1e-6
    assert zeros(plain) == zeros(found)
    nothing = weights(folder / "plain" / "nothing" / "final")
    if name not in ("nothing", "checkpointing", "activations"):
        assert any(not torch.equal(value, found[key]) for key, value in nothing.items())


@pytest.mark.parametrize(
    ("world", "config", "name"),
    [
        (world, config, name)
        for world, configs in CONFIGS.items()
        for config in configs
        for name in names_of(config, world)
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(folder, world, config, name):
    run = folder / str(world) / config / name
    whole, resumed = weights(run / "whole"), weights(run / "final")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())


@pytest.mark.parametrize("world", CONFIGS)
@pytest.mark.parametrize("name", ["prune", "taylor", "rigl", "movement", "prune+qat+average"])
def test_receipts_tell_the_zeros_of_files(folder, world, name):
    for config in CONFIGS[world]:
        run = folder / str(world) / config / name
        if not run.is_dir():
            continue
        receipt = json.loads(next(run.glob("eff_receipt*.json")).read_text())
        told = {entry["name"]: entry["pruned"] for entry in receipt["techniques"]["prune"]["tensors"]}
        found = zeros(weights(run / "final"))
        assert sum(told.values()) >= 0.59 * sum(entry["numel"] for entry in receipt["techniques"]["prune"]["tensors"])
        assert told == {key: found[key] for key in told}


@pytest.mark.parametrize("world", CONFIGS)
def test_checkpointing_in_stage_3_changes_no_bit(folder, world):
    nothing, found = (weights(folder / str(world) / "3" / name / "whole") for name in ("nothing", "checkpointing"))
    assert all(torch.equal(value, found[key]) for key, value in nothing.items())


def test_bf16_weights_are_averaged_and_masked_in_float32(folder):
    told = json.loads((folder / "1" / "told-0.json").read_text())
    of_float32, of_bf16 = told["away"]
    assert of_float32 < 1e-3 < 0.05 < of_bf16  # a last bit of float32 may decide a tie
    assert told["zeros"][-1] == told["end"] > 3000
    assert told["zeros"] == sorted(told["zeros"])


def test_the_rest_is_refused_by_name(folder):
    told = json.loads((folder / "1" / "told-0.json").read_text())
    assert "distill with teacher mutual cannot be combined with DeepSpeed" in told["mutual"]
    names = {"3": "DeepSpeed ZeRO stage 3", "2-fp16": "DeepSpeed in fp16"}
    for config, keys in REFUSED.items():
        for key in keys:
            assert f"{key} cannot be combined with {names[config]}" in told[f"{config} {key}"]
