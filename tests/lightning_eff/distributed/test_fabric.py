"""A loop of Fabric under ModelParallelStrategy, gloo processes: what one process trains, resumed in mid-window."""

import json

import pytest
import torch
from fabric_sharded import RECIPES, Net, train
from two_ranks import ranks_of, run_scripts

pytestmark = pytest.mark.slow  # tests/promises/test_sharded.py has the same of a plain loop
SCRIPT = train.__code__.co_filename
ROUNDED = {"qat": 1e-4, "fp8": 1e-5, "comm": 0.01}
"""By how much weights differ where processes round what they see or send."""


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    run_scripts(ranks_of(SCRIPT, folder, folder, number=request.param), folder)
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


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


def test_what_does_not_work_is_refused_at_start(ranks):
    for path in ranks[0].glob("[0-9].json"):
        told = json.loads(path.read_text())
        assert "low_rank cannot be combined with tensor parallelism" in told["low_rank"]
        assert "fp8 cannot be combined with tensor parallelism" in told["fp8"]
        assert "prune with criterion wanda cannot be combined with tensor parallelism" in told["wanda"]
        assert "the trainer puts its parts into DDP" in told["ddp"]
        assert "must hold its weights before it is sharded, got some on the meta device" in told["meta"]
