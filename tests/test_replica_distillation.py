"""The replica of distillation runs, a few steps each, moves biases to where they belong, and judges by means."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def replica():
    sys.path.insert(0, str(BENCHMARKS))  # as for a script
    try:
        import replica_distillation

        yield replica_distillation
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_every_run_of_the_plan_is_taught_as_it_says(replica, monkeypatch, tmp_path):
    from replicas import Runs

    monkeypatch.setattr(replica, "AUGMENTATIONS", 1)
    recipes = []
    taught = replica.Experiment.taught

    def noted(self, model, data, recipe, steps, anew):
        recipes.append((recipe.get("temperature"), recipe.get("alpha"), sorted(set(data[1].tolist()))))
        return taught(self, model, data, recipe, steps, anew)

    monkeypatch.setattr(replica.Experiment, "taught", noted)
    file = tmp_path / "runs.jsonl"
    rows = replica.measure(True, Runs(file))
    every = list(range(10))
    assert recipes[:3] == [(None, None, every), (None, None, [0, 1, 2, 4, 5, 6, 7, 8, 9]), (8.0, 0.0, recipes[1][2])]
    assert (8.0, 0.0, [7, 8]) in recipes
    assert (4.0, 0.1, [-100, *every]) in recipes  # images without labels are judged too
    assert len(recipes) == 1 + len(replica.plan())
    (unseen,) = [row for row in rows if row.what.startswith("transfer set without 3s, labels alone")]
    assert unseen.met
    assert unseen.ours.startswith("0.0;")

    monkeypatch.setattr(replica.Experiment, "taught", None)  # a second time everything comes from the file
    assert replica.measure(True, Runs(file)) == rows


def test_the_moved_bias_brings_the_share_that_was_asked_for(replica):
    logits = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    for classes, share in (([3], 0.3), ([7, 8], 0.05)):
        moved = logits.clone()
        moved[:, classes] += replica.balancing_bias(logits, classes, share)
        found = torch.isin(moved.argmax(1), torch.tensor(classes)).float().mean().item()
        assert found == pytest.approx(share, abs=2e-3)


@pytest.mark.parametrize(("after", "met"), [([87.0, 89.1], True), ([87.0, 88.9], False)])
def test_the_missing_digit_is_judged_by_the_mean_after_the_fix(replica, after, met):
    run = {"accuracy": 90.0, "on 3": 50.0, "bias": 2.0, "fixed": 92.0}
    found = {name: [run | {"fixed on 3": value} for value in after] for name in replica.plan()}
    (judged,) = [row for row in replica.transfer_rows(found) if row.target == "moved: >= 88"]
    assert judged.met == met
    assert "+2.0" in judged.ours
