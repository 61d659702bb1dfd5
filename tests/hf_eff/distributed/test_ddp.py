"""DDP in the Trainer: compressed gradients by flag, another number of processes on resume, and what is refused."""

from pathlib import Path

import pytest
import torch
from hf_ddp import AVERAGED, train, weights, with_features
from two_ranks import run_two_ranks, saved_by_two_ranks

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "hf_ddp.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    alone = weights(train(folder / "one", AVERAGED)[0])
    run_two_ranks(SCRIPT, folder)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    return {"folder": folder, "alone": alone, "tensors": [rank["tensors"] for rank in ranks], "told": ranks[0]["told"]}


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["two", "grown"])
def test_two_processes_train_and_go_on_from_what_one_saved_as_one_does(runs, name):
    for tensors in runs["tensors"]:
        assert_close(tensors[name], runs["alone"])


def test_projected_features_are_learned_by_two_processes_as_by_one(runs, tmp_path):
    alone = weights(train(tmp_path, with_features())[0])
    for tensors in runs["tensors"]:
        assert_close(tensors["features"], alone)


def test_one_process_goes_on_from_what_two_saved(runs, tmp_path):
    trainer, session = train(tmp_path, AVERAGED, resume=str(runs["folder"] / "two" / "checkpoint-3"))
    assert session.step == 6
    assert any("saved by 2 processes and resumed by 1: " in note for note in session.receipt()["notes"])
    assert_close(weights(trainer), runs["alone"])


def test_powersgd_by_flag_resumes_exactly(runs):
    for tensors in runs["tensors"]:
        assert all(torch.equal(value, tensors["resumed"][name]) for name, value in tensors["powersgd"].items())
    assert runs["told"]["powersgd"] == runs["told"]["resumed"]
    assert runs["told"]["powersgd"]["ratio"] > 8


def test_what_cannot_be_right_is_refused(runs):
    hook, sharded, flat, parallel, lost = runs["told"]["refused"]
    assert "DDP must have no other communication hook, got fp16_compress_hook" in hook
    assert "prune cannot be combined with a model that was sharded before the trainer got it" in sharded
    assert "prune cannot be combined with FSDP version 1" in flat
    assert "average cannot be combined with torch.nn.DataParallel" in parallel
    assert "FSDP was asked for, but accelerate does not shard here" in lost


@pytest.mark.slow
def test_what_each_process_alone_holds_is_resumed(tmp_path):
    differing = [
        (rank, case, name)
        for rank, cases in enumerate(saved_by_two_ranks(SCRIPT.with_name("hf_own_state.py"), tmp_path))
        for case, (whole, resumed) in cases.items()
        for name in whole
        if not torch.equal(whole[name], resumed[name])
    ]
    assert differing == []
