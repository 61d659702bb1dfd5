"""The replica of lottery tickets runs, a few steps each, and sees what it promises to see."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def replica():
    sys.path.insert(0, str(BENCHMARKS))  # as for a script
    try:
        import replica_lottery_ticket

        yield replica_lottery_ticket
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_it_runs_with_exact_counts_and_rewinding(replica, monkeypatch):
    from replicas import Runs

    monkeypatch.setattr(replica, "AUGMENTATIONS", 1)
    rows = replica.measure(True, Runs())
    assert [row.what.split(",")[0] for row in rows[1:4]] == ["winning ticket", "random reinit", "random mask"]
    assert rows[-1].met
    assert rows[-1].ours == "9 of 9; 6 of 6"


def test_the_rule_leaves_the_papers_shares(replica):
    total = sum(numel for numel, _ in replica.LAYERS)
    shares = [100 * replica.expected(rounds) / total for rounds in (0, 4, 6, 8, 10)]
    assert shares == pytest.approx([100, 41.1, 26.3, 16.9, 10.8], abs=0.1)


def test_it_sees_weights_that_were_not_rewound(replica):
    from digits28 import lenet

    model = lenet(0)
    assert replica.is_initialisation(model, lenet(0))
    with torch.no_grad():
        model[1].weight[0, 0] = 0.0
        assert replica.is_initialisation(model, lenet(0))
        model[1].weight[0, 0] = -0.0
        assert not replica.is_initialisation(model, lenet(0))
        model[1].weight[0, 0] = 0.5
        assert not replica.is_initialisation(model, lenet(0))


def test_images_are_new_in_every_batch_or_copies_made_once(replica):
    def distinct(copies):
        experiment = replica.Experiment(0, replica.Training(30, 1e-3, copies))
        return len({image.numpy().tobytes() for images, _ in experiment.batches for image in images})

    assert distinct(None) == 30 * 60
    assert distinct(1) <= 1197
    assert 1197 < distinct(6) < 30 * 60


@pytest.mark.parametrize(("step", "met"), [(800, True), (850, False)])
def test_early_stopping_is_judged_by_the_mean_iterations(replica, step, met):
    found = [
        {"0 none step": 500, "6 none step": step - 200},
        {"0 none step": 1500, "6 none step": step + 200},
    ]
    for run in found:
        run |= {"0 none accuracy": 90.0, "6 none accuracy": 91.0, "6 none left": 26.3}
    training = replica.Training(1600, 1e-3)
    dense, ticket = replica.early_rows("a name", training, found, 6, True)
    assert dense.ours == "90.00 ± 0.00, 1000 ± 707, 1 of 2"
    assert (ticket.met, ticket.ours[-5:]) == (met, f"{step / 1000:.2f}x")
    assert replica.early_rows("a name", training, found, 6, False)[1].met is None
