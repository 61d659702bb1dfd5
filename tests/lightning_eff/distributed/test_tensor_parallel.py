"""Lightning's ModelParallelStrategy with layers that the user's ``configure_model`` cuts: what one process trains."""

import json
from pathlib import Path

import pytest
import torch
from two_ranks import ranks_of, run_scripts

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "lightning_tensor_parallel.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 2], ids=["tp", "fsdp2+tp"])
def folders(request, tmp_path_factory):
    one, cut = (tmp_path_factory.mktemp(name) for name in ("one", "cut"))
    run_scripts([([SCRIPT, one], {})], one)
    run_scripts(ranks_of(SCRIPT, cut, cut, number=2 * request.param, DATA=str(request.param)), cut)
    return one, cut


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


def test_what_does_not_work_is_refused_at_start(folders):
    for path in folders[1].glob("refused*.json"):
        told = json.loads(path.read_text())
        assert "fp8 cannot be combined with tensor parallelism" in told["fp8"]
        assert "qat with range lsq cannot be combined with tensor parallelism" in told["lsq"]
        assert "prune with criterion wanda cannot be combined with tensor parallelism" in told["units"]
