"""The replica of pruning runs every recipe for a few steps, and can tell wrong zeros from right ones."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def replica():
    sys.path.insert(0, str(BENCHMARKS))  # as for a script
    try:
        import replica_pruning

        yield replica_pruning
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_every_recipe_runs_and_leaves_the_zeros_it_promises(replica, monkeypatch, tmp_path):
    import replicas

    monkeypatch.setattr(replica, "AUGMENTATIONS", 1)
    file = tmp_path / "runs.jsonl"
    rows = replica.measure(True, replicas.Runs(file))
    (zeros,) = [row for row in rows if row.what.startswith("runs that ended with exactly the zeros")]
    assert zeros.met
    assert zeros.ours == f"{len(replica.variants())} of {len(replica.variants())}"

    monkeypatch.setattr(replica.Experiment, "run", None)  # a second time everything comes from the file
    assert replica.measure(True, replicas.Runs(file)) == rows


def test_all_recipes_leave_the_output_layer_alone(replica):
    assert all(recipe["skip"] == ["last"] for name, recipe in replica.variants().items() if name != "dense")


@pytest.mark.parametrize(
    ("recipe", "right", "wrong"),
    [
        ({}, [1, 1, 1, 1], [1, 0, 1, 1]),
        ({"sparsity": 0.5}, [0, 0, 1, 1], [0, 0, 0, 1]),
        ({"sparsity": 0.5, "granularity": "n_m"}, [0, 1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"sparsity": 0.5, "criterion": "wanda"}, [0, 1, 0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0, 0]),
    ],
)
def test_wrong_zeros_are_told_from_right_ones(replica, recipe, right, wrong):
    assert replica.is_as_asked([torch.tensor([right])], recipe)
    assert not replica.is_as_asked([torch.tensor([wrong])], recipe)


def test_under_one_threshold_layers_may_differ_and_alone_they_may_not(replica):
    weights = [torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])]
    assert replica.is_as_asked(weights, {"sparsity": 0.5})
    assert not replica.is_as_asked(weights, {"sparsity": 0.5, "scope": "local"})


def test_verdicts_follow_the_means(replica):
    accuracies = {"global": 90.0, "local": 89.0, "one-shot": 80.1, "random": 82.0}
    found = {"dense": [95.0, 95.0], **{f"0.98 {name}": [value, value] for name, value in accuracies.items()}}
    assert [row.met for row in replica.compared(found, 0.98)] == [False, True]  # 9.9 points, and the trap
    found["0.98 one-shot"] = [79.9, 80.1]
    row = replica.compared(found, 0.98)[0]
    assert row.met
    assert "80.00 (-15.00 ± 0.14)" in row.ours
