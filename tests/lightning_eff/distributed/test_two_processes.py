from pathlib import Path

import pytest
import torch
from two_ranks import run_two_ranks

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
