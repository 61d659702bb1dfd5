"""The greedy search: the authors' choices on random tables of scores, orders, margins, repeated evaluation."""

import json
import os
import random
import signal

import pytest
import torch

from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup import greedy_soup


class Table:
    """Scores of all sets of ingredients, drawn coarse enough that many are equal."""

    def __init__(self, seed, count):
        self._seed = seed
        self.members = [{"w": torch.eye(count, dtype=torch.float64)[i]} for i in range(count)]
        self.calls = []

    def __call__(self, weights):
        chosen = tuple(weights["w"].nonzero().flatten().tolist())
        self.calls.append(chosen)
        return random.Random(hash((self._seed, chosen))).randrange(20) / 20


def code_of_the_authors(members, evaluate):
    """Return what main.py of mlfoundations/model-soups chooses, and its weights: sort, then keep what is better."""
    ranked = sorted(range(len(members)), key=lambda i: evaluate(members[i]), reverse=True)
    chosen, soup = [ranked[0]], members[ranked[0]]["w"]
    best = evaluate({"w": soup})
    for i in ranked[1:]:
        n = len(chosen)
        trial = soup * (n / (n + 1.0)) + members[i]["w"] * (1.0 / (n + 1))
        if (score := evaluate({"w": trial})) > best:
            chosen, soup, best = [*chosen, i], trial, score
    return chosen, soup, best


@pytest.mark.slow
def test_strict_is_the_authors_script_on_a_thousand_tables_and_never_worse_than_the_best():
    sizes = set()
    for seed in range(1000):
        table = Table(seed, 2 + seed % 6)
        result = greedy_soup(table.members, table, strict=True)
        chosen, soup, best = code_of_the_authors(table.members, table)
        assert (result.ingredients, result.score) == ([f"ingredient {i}" for i in chosen], best)
        assert torch.allclose(result.state_dict["w"], soup, rtol=1e-14, atol=0)
        kept = greedy_soup(table.members, table)
        assert min(result.score, kept.score) >= max(row["single"] for row in kept.history)
        sizes.add(len(chosen))
    assert {1, 2, 3, 4} <= sizes


@pytest.mark.parametrize("order", ["random", "given"])
def test_another_order_evaluates_only_the_first_alone_and_never_falls_below_it(order):
    starts = set()
    for seed in range(40):
        table = Table(seed, 5)
        result = greedy_soup(table.members, table, order=order, seed=seed)
        assert [len(chosen) for chosen in table.calls].count(1) == 1
        assert len(table.calls) == 5
        first = result.history[0]
        assert first["name"] == result.ingredients[0]
        assert result.score >= first["single"] == first["score"]
        assert all(row["single"] is None for row in result.history[1:])
        starts.add(first["name"])
        again = greedy_soup(table.members, table, order=order, seed=seed)
        assert again.history == result.history
    assert len(starts) == (5 if order == "random" else 1)


def test_an_unusable_first_one_gives_way_to_the_next():
    members = [{"w": torch.tensor([value])} for value in (float("nan"), 7.0, 2.0, float("inf"), 4.0)]
    scores = {7.0: float("nan"), 2.0: 0.5, 3.0: 0.6}
    result = greedy_soup(members, lambda weights: scores[float(weights["w"])], order="given")
    assert result.ingredients == ["ingredient 2", "ingredient 4"]
    reasons = {row["name"]: row["reason"] for row in result.history}
    assert [bool(reasons[f"ingredient {i}"].startswith("left out")) for i in range(5)] == [
        True,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("strict", "min_delta", "size"), [(False, 0.25, 2), (True, 0.25, 1), (False, 0.26, 1), (True, 0.24, 2)]
)
def test_min_delta_is_the_least_gain_and_strict_asks_for_more(strict, min_delta, size):
    members = [{"w": torch.tensor([value])} for value in (0.0, 4.0)]
    scores = {0.0: -0.5, 4.0: -0.75, 2.0: -0.25}
    for sign, mode in ((1, "max"), (-1, "min")):
        result = greedy_soup(members, lambda weights, sign=sign: sign * scores[float(weights["w"])], mode=mode,
                             strict=strict, min_delta=min_delta)  # fmt: skip
        assert len(result.ingredients) == size
        assert ("less than min_delta" in result.history[1]["reason"]) == (size == 1)
    kept = greedy_soup(members, lambda weights: 0.0, min_delta=0.1)
    assert kept.ingredients == ["ingredient 0"]


def test_noise_in_the_evaluation_shows():
    noise = iter(range(100))
    members = [{"w": torch.tensor([value])} for value in (1.0, 2.0)]
    assert greedy_soup(members, lambda weights: -float(next(noise)), repeat=True).repeat == (0.0, -2.0)
    assert greedy_soup(members, lambda weights: float(weights["w"]), repeat=True).repeat == (2.0, 2.0)
    assert greedy_soup(members, lambda weights: float(weights["w"])).repeat is None


class KilledError(Exception):
    pass


@pytest.mark.parametrize("order", ["metric", "random", "given"])
def test_a_killed_search_goes_on_to_the_same_answer(tmp_path, order):
    options = {"order": order, "seed": 5, "min_delta": 0.05, "repeat": True, "about": {"evaluate": "table"}}
    whole_table = Table(1, 5)
    whole = greedy_soup(whole_table.members, whole_table, **options)
    for kill_at in range(len(whole_table.calls)):
        table, left = Table(1, 5), [kill_at]

        def until_killed(weights, table=table, left=left):
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            return table(weights)

        journal = tmp_path / f"{kill_at}.json"
        with pytest.raises(KilledError):
            greedy_soup(table.members, until_killed, journal=journal, **options)
        result = greedy_soup(table.members, table, journal=journal, **options)
        assert table.calls == whole_table.calls
        assert (result.history, result.repeat) == (whole.history, whole.repeat)
        assert torch.equal(result.state_dict["w"], whole.state_dict["w"])


def test_a_search_ended_by_kill_9_goes_on_to_the_same_bits(tmp_path):
    generator = torch.Generator().manual_seed(0)
    members = [{"w": torch.randn(9, generator=generator)} for _ in range(4)]

    def quality(weights):
        return -float((weights["w"] - 0.3).square().sum())

    whole = greedy_soup(members, quality, repeat=True)
    for kill_at in (0, 3, 5, 7):
        journal, calls = tmp_path / f"{kill_at}.json", []

        def until_killed(weights, kill_at=kill_at, calls=calls):
            if len(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(1)
            return quality(weights)

        if (process := os.fork()) == 0:
            greedy_soup(members, until_killed, repeat=True, journal=journal)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
        assert len(json.loads(journal.read_text())["scores"]) == kill_at
        result = greedy_soup(members, quality, repeat=True, journal=journal)
        assert (result.history, result.repeat) == (whole.history, whole.repeat)
        assert torch.equal(result.state_dict["w"], whole.state_dict["w"])


def test_a_journal_of_another_version_is_refused(tmp_path):
    table, journal = Table(0, 3), tmp_path / "journal"
    greedy_soup(table.members, table, journal=journal)
    content = json.loads(journal.read_text())
    for other in (1, None):
        content["search"]["format"] = other
        journal.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=f"must have format 2, got {other} of another version of efftrain"):
            greedy_soup(table.members, table, journal=journal)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("min_delta", {"min_delta": 0.1}),
        ("order", {"order": "given"}),
        ("seed", {"seed": 1}),
        ("evaluate", {"about": {"evaluate": "other"}}),
        ("evaluate", {"about": {}}),
    ],
)
def test_a_journal_of_other_options_is_refused(tmp_path, name, other):
    table, options = Table(0, 3), {"order": "random", "about": {"evaluate": "one"}, "journal": tmp_path / "journal"}
    greedy_soup(table.members, table, **options)
    with pytest.raises(CheckpointError, match=f"its {name} were"):
        greedy_soup(table.members, table, **{**options, **other})


@pytest.mark.parametrize("bad", [{"min_delta": -0.1}, {"min_delta": float("nan")}, {"order": "best"}])
def test_bad_options(bad):
    with pytest.raises(ConfigError, match=f"soup: {next(iter(bad))} must"):
        greedy_soup(Table(0, 2).members, Table(0, 2), **bad)
