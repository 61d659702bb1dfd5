from pathlib import Path

import torch
from two_ranks import run_two_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "lightning_ddp.py"


def test_both_ranks_agree_and_resume_exactly(tmp_path):
    run_two_ranks(SCRIPT, tmp_path, tmp_path)
    first, second = (torch.load(tmp_path / f"result-{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, weight in first["whole"].items():
        assert torch.equal(weight, second["whole"][name]), name
        assert torch.equal(weight, first["resumed"][name]), name
    for name, mask in first["masks"].items():
        assert torch.equal(mask, second["masks"][name]), name
    assert torch.equal(first["ranges"], second["ranges"])


def test_what_each_rank_alone_has_in_its_buffers_is_resumed(tmp_path):
    run_two_ranks(SCRIPT.with_name("lightning_ddp_buffers.py"), tmp_path, tmp_path)
    for rank in (0, 1):
        for case, (whole, resumed) in torch.load(tmp_path / f"result-{rank}.pt", weights_only=True).items():
            for name, value in whole.items():
                assert torch.equal(value, resumed[name]), (rank, case, name)
