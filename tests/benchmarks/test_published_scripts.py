"""The table of TRL's scripts is the committed results, and a recount refuses files that a technique did not leave."""

import json

import published_scripts as scripts
import pytest
import torch
from published_recounts import RECOUNTS, RecountError, Saved, weights_of
from safetensors.torch import save_file


def test_the_page_has_every_cell_and_none_fails():
    results = dict(json.loads(line) for line in scripts.FILE.read_text().splitlines())
    expected = {f"{script} x {technique}" for script in scripts.SCRIPTS for technique in scripts.TECHNIQUES}
    assert set(results) == expected, "run `make scripts`"
    assert {result["status"] for result in results.values()} == {"works", "refused"}
    assert scripts.page_text(results) in scripts.PAGE.read_text(encoding="utf-8"), "run `make scripts`"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    scripts.make_inputs(folder)
    torch.manual_seed(0)
    start = weights_of(folder / "student")
    for name in ("out", "without"):
        (folder / name).mkdir()
        moved = {key: value + 0.1 * torch.randn_like(value) for key, value in start.items()}
        save_file(moved, folder / name / "model.safetensors")
        (folder / name / "stdout").write_text("{'loss': '1', 'grad_norm': '1', 'distill/soft_loss': '1'}\n")
    return Saved(*(folder / name for name in ("out", "without", "student", "teacher")))


@pytest.mark.parametrize("technique", scripts.TECHNIQUES)
def test_a_run_without_the_technique_is_no_result(saved, technique):
    for recount in RECOUNTS[technique][1]:
        with pytest.raises(RecountError):
            recount(saved)
