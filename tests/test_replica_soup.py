"""The replica of soups runs, a few steps each, goes on where it stopped, and judges by means."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def replica():
    sys.path.insert(0, str(BENCHMARKS))  # as for a script
    try:
        import replica_soup

        yield replica_soup
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_it_runs_and_goes_on_from_what_it_kept(replica, monkeypatch, tmp_path):
    from replicas import Runs

    monkeypatch.setattr(replica, "COPIES", 1)
    rows = replica.measure(True, Runs(tmp_path / "runs.jsonl"))
    monkeypatch.setattr(replica, "Experiment", None)
    assert replica.measure(True, Runs(tmp_path / "runs.jsonl")) == rows
    assert [row.target for row in rows] == [
        "never below the best", "over best >= +0.1", "over best >= +0.8",
        "never below the best", "over uniform >= +2.0", "",
    ]  # fmt: skip
    assert rows[0].met


def test_rows_judge_by_the_mean_of_seeds(replica):
    def seed(test):
        names = ("best", "mean", "uniform", "greedy")
        base = {f"{name} {where}": 90.0 for name in names for where in ("chosen_on", "test", "shifted")}
        return {**base, "ingredients": 2, "greedy test": test}

    assert [row.met for row in replica.rows([seed(89.9), seed(90.4)], "members", "")] == [True, True, False]
    assert [row.met for row in replica.rows([seed(89.9), seed(90.2)], "members", "")] == [True, False, False]
    assert [row.met for row in replica.rows([seed(93.0), seed(91.0)], "members", "wild")] == [True, True, None]
