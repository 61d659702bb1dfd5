"""Several runs of one process in one folder: each leaves its receipt, and `eff report` finds them all."""

import json

import pytest
from promise_drivers import run_accelerate, run_bare, run_fabric, run_hf, run_lightning

from shared_core.engine import receipt as receipts
from shared_core.reports.run_folder import read_run

RUNS = {"hf": run_hf, "lightning": run_lightning, "accelerate": run_accelerate, "fabric": run_fabric}


def recipe(sparsity):
    return {"prune": {"sparsity": sparsity, "schedule": "one_shot", "begin": 1}}


@pytest.mark.parametrize("front_end", RUNS)
def test_a_later_run_keeps_the_receipts_of_earlier_ones(front_end, tmp_path):
    for sparsity in (0.25, 0.5, 0.75):
        RUNS[front_end](recipe(sparsity), tmp_path)
    files = {"eff_receipt-1.json": 0.25, "eff_receipt-2.json": 0.5, "eff_receipt.json": 0.75}
    assert {file.name for file in tmp_path.glob("eff_receipt*")} == files.keys()
    for name, sparsity in files.items():
        assert json.loads((tmp_path / name).read_text())["recipe"]["prune"]["sparsity"] == sparsity
        assert read_run(tmp_path / name).receipt["recipe"]["prune"]["sparsity"] == sparsity
    whole = read_run(tmp_path)
    assert whole.receipt["recipe"]["prune"]["sparsity"] == 0.75
    assert whole.notes[0].endswith("eff_receipt-1.json, eff_receipt-2.json")


def test_one_run_writes_its_receipt_again_and_another_process_replaces_it(tmp_path, monkeypatch):
    for _ in range(2):
        first = receipts.Receipt(run_bare(recipe(0.25)).receipt, run=receipts)
        first.write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["eff_receipt.json"]
    monkeypatch.setattr(receipts, "_WRITTEN", {})
    receipts.Receipt(first.values, run=object()).write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["eff_receipt.json"]
