"""FSDP2 in Lightning (ModelParallelStrategy): sharded weights train, save and resume like whole ones."""

from pathlib import Path

import pytest
import torch
from fsdp2_runs import (
    assert_both_left_out_a_step,
    assert_second_round_replays,
    assert_two_trained_what_one_did,
    run_by_one_and_by_two,
)

from shared_core.checkpoint_formats import open_ingredient
from shared_core.soup import save_soup, uniform_soup

pytestmark = pytest.mark.slow  # tests/promises/test_sharded.py has the same of a plain loop
SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "lightning_fsdp2.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_by_one_and_by_two(SCRIPT, tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("name", ["loss_scale", "ticket", "all", "tensorwise", "distill", "qat", "dp", "soup"])
def test_two_processes_train_what_one_does(runs, name):
    assert_two_trained_what_one_did(runs, name)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_layers_are_matched_wherever_they_are_made_and_however_they_are_sharded(runs, late, each):
    name = f"late={late} each={each}"
    for found, told in zip(runs["ranks"], (one["layers"][name] for one in runs["told"]), strict=True):
        assert told["matched"] == ["net.2", "net.4"]
        assert all(count == 6 for layer in told["products"] for count in layer.values())
        assert told["sharded"]
        assert told["stock"]
        assert told["classes"] == ["FSDPLinear" if each else "Linear"] * 4
        for key, value in runs["alone"]["all"].items():
            torch.testing.assert_close(found[name][key].double(), value.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_run_resumed_inside_an_accumulation_window_equals_one_that_was_never_stopped(runs, distributed):
    name = f"distributed={distributed}"
    assert (runs["folder"] / name / "saved" / "4.ckpt").is_dir() == distributed
    for found in runs["ranks"]:
        assert found[name]["fp8.num_updates"] == 2
        for run in (name, f"qat {name}", *(f"{key} {name}" for key in ("lora", "lsq", "dp"))):
            assert all(torch.equal(value, found[f"{run} resumed"][key]) for key, value in found[run].items())


def test_files_of_weights_hold_codes(runs):
    whole = runs["folder"] / "qat distributed=False" / "saved" / "5.ckpt"
    weight = torch.load(whole, weights_only=True)["state_dict"]["net.2.weight"]
    assert all(len(row.unique()) <= 255 for row in weight)
    assert torch.equal(weight, runs["ranks"][0]["qat distributed=False"]["net.2.weight"])


def test_files_of_weights_hold_the_average_of_merged_adapters(runs):
    whole = runs["folder"] / "lora distributed=False" / "saved" / "5.ckpt"
    weights, found = torch.load(whole, weights_only=True)["state_dict"], runs["ranks"][0]["lora distributed=False"]
    assert weights.keys() == found.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, found[name], atol=1e-6, rtol=0)


def test_a_full_checkpoint_loads_in_the_plain_module(runs):
    found = runs["ranks"][0]
    assert all(torch.equal(value, found["distributed=False"][key]) for key, value in found["whole"].items())


def test_a_soup_reads_the_shards_of_both_processes(runs, tmp_path):
    whole, shards = (
        runs["folder"] / f"distributed={distributed}" / "saved" / "5.ckpt" for distributed in (False, True)
    )
    soup, expected = uniform_soup([shards, whole]), torch.load(whole, weights_only=True)["state_dict"]
    assert all(torch.equal(soup[name], value) for name, value in expected.items())
    assert (save_soup(soup, open_ingredient(shards), tmp_path / "soup.ckpt") / "meta.pt").is_file()


@pytest.mark.parametrize(("name", "finite"), [("scaler", [False, True]), ("fp16", [False, True]), ("fp8", None)])
def test_all_processes_leave_out_a_step_that_one_alone_knows_to_be_bad(runs, name, finite):
    assert_both_left_out_a_step(runs, name, finite)


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_gradients_travel_in_16_bits(runs, hook):
    first, second = (found[f"comm {hook}"] for found in runs["ranks"])
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    for told in (one[f"comm {hook}"] for one in runs["told"]):
        assert told["bytes"]["sent"] * 2 == told["bytes"]["gradients"] > 0
        assert told.get("discarded_steps", 0) == 0


def test_what_is_not_proven_on_shards_is_refused(runs):
    for told in runs["told"]:
        prune, flush, parallel, learned = told["refused"]
        assert "prune cannot be combined with FSDP version 2: criterion fisher keeps" in prune
        assert "loss_scale with flush_every cannot be combined with FSDP version 2" in flush
        assert "fp8 cannot be combined with tensor parallelism" in parallel
        assert "net.0 is in torch.bfloat16 and its learned scales are in torch.float32" in learned


def test_a_second_round_replays_the_first_bit_for_bit(runs):
    assert_second_round_replays(runs)


def test_a_run_writes_one_receipt(runs):
    receipts = list(runs["folder"].rglob("eff_receipt.json"))
    # one of each run that came to its end, the ten resumed ones over the first one's
    assert runs["output"].count("efftrain receipt") == len(receipts) + 10
