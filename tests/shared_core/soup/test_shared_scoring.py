"""Greedy soups and diagnoses whose single ingredients several processes score: scores, order and bits of one."""

import json
from dataclasses import asdict

import pytest
import torch
from together import together

from shared_core.errors import ConfigError
from shared_core.soup.diagnosis import diagnose
from shared_core.soup.greedy import greedy_soup
from shared_core.soup.scoring import score_share

RUNS = [{"w": torch.tensor([value])} for value in (0.0, 4.0, 9.0, float("nan"), 2.0, 3.5, -7.0)]


def quality(weights):
    return -abs(float(weights["w"]) - 2.5)


@pytest.mark.parametrize("work", [greedy_soup, diagnose])
@pytest.mark.parametrize("size", [2, 3])
def test_the_result_and_the_journal_are_those_of_one_process(tmp_path, work, size):
    alone = work(RUNS, quality, journal=tmp_path / "one.json")
    counts = [0] * size

    def be(job):
        def counted(weights):
            counts[job.rank] += 1
            return quality(weights)

        if job.is_main:
            return work(RUNS, counted, job=job, journal=tmp_path / "many.json")
        return score_share(RUNS, counted, job)

    made, *others = together(be, size)
    assert others == [None] * (size - 1)
    if work is greedy_soup:
        assert (made.ingredients, made.score, made.history) == (alone.ingredients, alone.score, alone.history)
        assert torch.equal(made.state_dict["w"], alone.state_dict["w"])
    else:
        assert asdict(made) == asdict(alone)
    one, many = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "many.json"))
    assert many == one
    assert sum(counts) == len(one["scores"])  # nothing was scored twice


def test_scores_that_a_journal_has_are_shared_with_nobody(tmp_path):
    greedy_soup(RUNS, quality, journal=tmp_path / "j.json")
    (tmp_path / "j.json").write_text(
        json.dumps({**(kept := json.loads((tmp_path / "j.json").read_text())), "scores": {"0": kept["scores"]["0"]}})
    )
    seen = []

    def be(job):
        def noted(weights):
            seen.append(float(weights["w"]))
            return quality(weights)

        if job.is_main:
            return greedy_soup(RUNS, noted, job=job, journal=tmp_path / "j.json")
        return score_share(RUNS, noted, job)

    together(be)
    assert 0.0 not in seen
    assert {4.0, 9.0, 2.0, 3.5, -7.0} <= set(seen)


def test_an_evaluation_that_fails_in_one_process_ends_all():
    def be(job):
        if job.is_main:
            return greedy_soup(RUNS, lambda weights: job.get("never") and 0.0, job=job)
        return score_share(RUNS, lambda weights: "good", job)

    main, other = together(be)
    assert isinstance(other, ConfigError)
    assert str(main) == f"rank 1 of 2 failed: {other}"
    assert "evaluate must return a number" in str(other)
