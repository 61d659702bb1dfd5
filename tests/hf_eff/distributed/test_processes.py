"""DDP, and models that transformers cuts by its plan, in gloo processes: as one process, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_ddp import AVERAGED, train, weights, with_features
from safetensors.torch import load_file
from two_ranks import ranks_of, run_scripts, run_two_ranks, saved_by_two_ranks

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
    assert "accelerate does not shard here" in lost


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


CUT_SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "hf_tensor_parallel.py"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run_scripts([([CUT_SCRIPT, folder], {})], folder)
    return folder


@pytest.fixture(scope="module", params=[2, 4], ids=["tp", "fsdp2+tp"])
def several(request, one, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(one / "start", folder / "start")
    run_scripts(ranks_of(CUT_SCRIPT, folder, folder, number=request.param), folder)
    return folder


@pytest.mark.slow
def test_files_are_those_of_one_process(one, several):
    losses = [json.loads((one / "told.json").read_text())["losses"]]
    losses += [json.loads(path.read_text())["losses"] for path in several.glob("told*.json")]
    for name in (path.parent.name for path in several.glob("*/final")):
        alone, parts = (load_file(folder / name / "final" / "model.safetensors") for folder in (one, several))
        assert alone.keys() == parts.keys()
        # one code more or less of a weight is 1e-3 and more
        torch.testing.assert_close(parts, alone, atol=1e-6, rtol=0, msg=name)
        zeros = [sum(int((value == 0).sum()) for value in weights.values()) for weights in (alone, parts)]
        assert zeros[0] == zeros[1]
        assert (zeros[0] > 1000) == name.startswith("prune average")
        in_loop = name.endswith("in a loop")
        receipts = [path.parent.name for path in (several / name).rglob("eff_receipt.json")]
        assert receipts == ["final" if in_loop else name]
        for told in () if in_loop else losses[1:]:
            assert told[name] == pytest.approx(losses[0][name], rel=1e-6)


@pytest.mark.slow
def test_what_does_not_work_is_refused_at_start(several):
    for path in several.glob("told*.json"):
        told = json.loads(path.read_text())
        assert "qat with range lsq cannot be combined with tensor parallelism" in told["lsq"]
        assert "lora cannot be combined with tensor parallelism" in told["lora"]
        assert "parallelism_config must place all" in told["places"]
        assert not any(line.count("\n") for line in (told["lsq"], told["lora"], told["places"]))
