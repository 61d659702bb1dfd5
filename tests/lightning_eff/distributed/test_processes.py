"""Gloo processes in Lightning and Fabric: what one process trains, resumed, also of layers that are cut or sharded."""

import json
from pathlib import Path

import pytest
import torch
from fabric_sharded import RECIPES, Net, train
from two_ranks import ranks_of, run_scripts, run_two_ranks

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "lightning_ddp.py"


def test_both_ranks_agree_and_resume_exactly(tmp_path):
    run_two_ranks(SCRIPT, tmp_path, tmp_path)
    first, second = (torch.load(tmp_path / f"result-{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, weight in first["whole"].items():
        assert torch.equal(weight, second["whole"][name]), name
        assert torch.equal(weight, first["resumed"][name]), name
    for name, mask in first["masks"].items():
        assert torch.equal(mask, second["masks"][name]), name
    assert torch.equal(first["ranges"], second["ranges"])


@pytest.fixture(scope="module")
def own_state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_state")
    run_two_ranks(SCRIPT.with_name("lightning_own_state.py"), folder, folder)
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_what_each_rank_alone_holds_is_resumed(own_state):
    differing = [
        (rank, case, name)
        for rank, cases in enumerate(own_state)
        for case, (whole, resumed) in cases.items()
        for name in whole.keys() | resumed.keys()
        if name not in whole or name not in resumed or not torch.equal(whole[name], resumed[name])
    ]
    assert differing == []


def test_scales_learned_for_folded_weights_are_equal_on_all_ranks(own_state):
    first, second = (cases["learned, 4"][0] for cases in own_state)
    learned = [name for name in first if name.endswith("weight_magnitude")]
    assert learned
    for name in learned:
        assert torch.equal(first[name], second[name]), name


CUT_SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "lightning_tensor_parallel.py"


@pytest.fixture(scope="module", params=[1, 2], ids=["tp", "fsdp2+tp"])
def folders(request, tmp_path_factory):
    one, cut = (tmp_path_factory.mktemp(name) for name in ("one", "cut"))
    run_scripts([([CUT_SCRIPT, one], {})], one)
    run_scripts(ranks_of(CUT_SCRIPT, cut, cut, number=2 * request.param, DATA=str(request.param)), cut)
    return one, cut


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qat", "prune average"])
def test_files_are_those_of_one_process(folders, name):
    alone, cut, resumed = (
        torch.load(folder / name / file, weights_only=True)["state_dict"]
        for folder, file in zip((*folders, folders[1]), ("final.ckpt", "final.ckpt", "final resumed.ckpt"), strict=True)
    )
    torch.testing.assert_close(cut, alone, atol=1e-6, rtol=0)
    assert all(torch.equal(value, cut[key]) for key, value in resumed.items())
    for key in ("net.2.weight", "net.4.weight"):
        zeros = int((cut[key] == 0).sum())
        assert zeros == int((alone[key] == 0).sum())
        assert (zeros > 300) == (name == "prune average")


@pytest.mark.slow
def test_what_does_not_work_is_refused_at_start(folders):
    for path in folders[1].glob("refused*.json"):
        told = json.loads(path.read_text())
        assert "fp8 cannot be combined with tensor parallelism" in told["fp8"]
        assert "qat with range lsq cannot be combined with tensor parallelism" in told["lsq"]
        assert "prune with criterion wanda cannot be combined with tensor parallelism" in told["units"]


FABRIC_SCRIPT = train.__code__.co_filename
ROUNDED = {"qat": 1e-4, "fp8": 1e-5, "comm": 0.01}
"""By how much weights differ where processes round what they see or send."""


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    run_scripts(ranks_of(FABRIC_SCRIPT, folder, folder, number=request.param), folder)
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


@pytest.mark.slow
def test_processes_train_what_one_does_and_resume(ranks, tmp_path):
    folder, found = ranks
    alone = {name: train(tmp_path, {} if name == "comm" else recipe) for name, recipe in RECIPES.items()}
    for run, weights in found[0].items():
        layout, name = run.removesuffix(" resumed").split(" ", 1)
        for other in (*(each[run] for each in found[1:]), found[0][f"{layout} {name}"]):
            assert all(torch.equal(value, other[key]) for key, value in weights.items()), run
        torch.testing.assert_close(weights, alone[name], atol=ROUNDED.get(name, 1e-6), rtol=0)
        zeros = [sum(int((value == 0).sum()) for value in each.values()) for each in (weights, alone[name])]
        assert zeros[0] == zeros[1]
        assert (zeros[0] > 300) == (name == "prune average")
        path = folder / layout / name
        assert json.loads((path / "eff_receipt.json").read_text())["finished"]
        assert (path / "middle.ckpt").is_dir() == (path / "end.ckpt").is_dir() == (name == "prune average")
        if name == "qat":
            plain = torch.load(path / "end.ckpt", weights_only=True)
            assert "eff" not in plain
            Net().double().load_state_dict(plain["model"])


@pytest.mark.slow
def test_what_does_not_work_in_fabric_is_refused_at_start(ranks):
    for path in ranks[0].glob("[0-9].json"):
        told = json.loads(path.read_text())
        assert "low_rank cannot be combined with tensor parallelism" in told["low_rank"]
        assert "fp8 cannot be combined with tensor parallelism" in told["fp8"]
        assert "prune with criterion wanda cannot be combined with tensor parallelism" in told["wanda"]
        assert "DDP" in told["ddp"]
        assert "must hold its weights before it is sharded, got some on the meta device" in told["meta"]
