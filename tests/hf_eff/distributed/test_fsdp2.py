"""FSDP2 in the Trainer: sharded weights train, save and resume like whole ones, and flags that do nothing are told."""

import shutil
from pathlib import Path

import pytest
import torch
from fsdp2_runs import (
    assert_both_left_out_a_step,
    assert_second_round_replays,
    assert_two_trained_what_one_did,
    run_by_one_and_by_two,
)

from hf_eff._checkpoints import newest_whole
from shared_core.checkpoint_formats import open_ingredient
from shared_core.engine.saving.state_file import load_state
from shared_core.soup import save_soup, uniform_soup

pytestmark = pytest.mark.slow  # tests/promises/test_sharded.py has the same of a plain loop
SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "hf_fsdp2.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_by_one_and_by_two(SCRIPT, tmp_path_factory.mktemp("fsdp2"))


def test_every_weight_is_really_sharded_and_multiplied_in_fp8_and_saved_whole(runs):
    for told in (one["typed"] for one in runs["told"]):
        assert told["is_fsdp2"]
        assert told["sharded"]
        assert told["weights"] / 2 <= told["held"] + 64
        assert told["held"] < told["weights"] * 0.6
        assert len(told["products"]) == 13
        assert all(count > 0 for layer in told["products"] for count in layer.values())
        assert told["stock"]
        assert told["saved"]


@pytest.mark.parametrize(
    "name",
    [
        "soup",
        "loss_scale",
        "ticket",
        "lora FULL_STATE_DICT",
        "all",
        "tensorwise",
        "distill",
        "dp",
        "steady qat FULL_STATE_DICT",
        "steady qat SHARDED_STATE_DICT",
    ],
)
def test_two_processes_train_what_one_does(runs, name):
    assert_two_trained_what_one_did(runs, name)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_resumed_run_equals_one_that_was_never_stopped(runs, kind):
    for found in runs["ranks"]:
        assert found[kind]["fp8.num_updates"] == 6
        for run in (kind, f"qat {kind}", f"primary {kind}", f"lora {kind}", f"dp {kind}"):
            assert all(torch.equal(value, found[f"{run} resumed"][name]) for name, value in found[run].items())


@pytest.mark.parametrize(("name", "finite"), [("scaler", [False, True]), ("fp8", None)])
def test_all_processes_leave_out_a_step_that_one_alone_knows_to_be_bad(runs, name, finite):
    assert_both_left_out_a_step(runs, name, finite)


@pytest.mark.parametrize(
    ("kind", "file"), [("FULL_STATE_DICT", "optimizer.bin"), ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0/.metadata")]
)
def test_a_damaged_checkpoint_is_passed_over(runs, tmp_path, kind, file):
    shutil.copytree(runs["folder"] / kind, tmp_path / "run")
    newest, damaged = newest_whole(tmp_path / "run")
    assert newest.name == "checkpoint-6"
    assert not damaged
    (newest / file).write_bytes(b"") if file.endswith(".bin") else (newest / file).unlink()
    newest, damaged = newest_whole(tmp_path / "run")
    assert newest.name == "checkpoint-3"
    assert len(damaged) == 1


def test_a_soup_reads_the_shards_of_both_processes(runs, tmp_path):
    whole, shards = (runs["folder"] / f"{kind}_STATE_DICT" / "checkpoint-6" for kind in ("FULL", "SHARDED"))
    soup, expected = uniform_soup([shards, whole]), open_ingredient(whole)
    assert all(torch.equal(soup[name], expected.tensor(name)) for name in expected.specs)
    assert (save_soup(soup, open_ingredient(shards), tmp_path / "soup") / "pytorch_model_fsdp_0").is_dir()


def test_no_process_holds_the_whole_teacher(runs):
    for told in (one["teacher"] for one in runs["told"]):
        assert told["held"] < told["weights"] * 0.6
        assert told["batches"] == 6


def test_gradients_in_16_bits_are_those_of_ddp(runs):
    for found, told in zip(runs["ranks"], runs["told"], strict=True):
        for key, value in found["comm under DDP"].items():
            torch.testing.assert_close(found["comm"][key], value, rtol=1e-6, atol=1e-6)
        assert told["comm"]["ratio"] == 2
        assert told["comm"]["bytes"]["gradients"] >= told["comm under DDP"]["bytes"]["gradients"]  # padded


def test_training_sees_nothing_of_averages_that_were_validated(runs):
    for found in runs["ranks"]:
        assert all(torch.equal(value, found["unseen"][name]) for name, value in found["validated"].items())


def test_the_best_model_comes_back(runs):
    first, second = (found["best"] for found in runs["ranks"])
    assert runs["told"][0]["best"] == runs["told"][1]["best"]
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    folder = runs["folder"] / "best" / runs["told"][0]["best"]
    saved = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    (average,) = load_state(folder)["techniques"]["average"]["kept"]
    assert all(torch.equal(value, first[name]) for name, value in average.items())
    assert not all(torch.equal(value, saved[name]) for name, value in average.items())


def test_what_is_not_proven_on_shards_is_refused(runs):
    for told in runs["told"]:
        prune, flush, mutual, power, narrow, filled, ranged = told["refused"]
        assert "lora cannot be combined with cpu_ram_efficient_loading of FSDP: Accelerate would fill" in filled
        assert "qat with range lsq cannot be combined with cpu_ram_efficient_loading of FSDP" in ranged
        assert "comm with hook powersgd cannot be combined with FSDP version 2" in power
        assert "comm: FSDP2 must reduce gradients in float32" in narrow
        assert "distill cannot be combined with FSDP version 2: teacher mutual" in mutual
        assert "prune cannot be combined with FSDP version 2: criterion fisher keeps" in prune
        assert "loss_scale with flush_every cannot be combined with FSDP version 2" in flush


def test_flags_that_do_not_shard_are_refused(runs):
    for told in (one["lost"] for one in runs["told"]):
        assert "accelerate does not shard here (distributed type MULTI_CPU)" in told


def test_a_second_round_replays_the_first_bit_for_bit(runs):
    assert_second_round_replays(runs)


def test_a_run_writes_one_receipt(runs):
    receipts = list(runs["folder"].rglob("eff_receipt.json"))
    assert {receipt.parent.parent for receipt in receipts} == {runs["folder"]}
    # one of each run that came to its end, resumed ones over the first one's
    assert runs["output"].count("efftrain receipt") == len(receipts) + 10
