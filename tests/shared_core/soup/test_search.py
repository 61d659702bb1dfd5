"""The greedy search: the authors' choices on random tables of scores, orders, margins, journals, what trainers logged,
and scores that several processes make together.
"""

import gc
import json
import math
import os
import random
import signal
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soup_runs import runs, same_bits
from together import together

from shared_core.errors import CheckpointError, ConfigError, EffError
from shared_core.soup import greedy_soup, path_json, path_plot, path_table, uniform_soup
from shared_core.soup.diagnosis import diagnose
from shared_core.soup.scoring import score_share


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


@pytest.mark.parametrize("mode", ["max", "min"])
def test_strict_is_the_authors_script_on_many_tables_and_never_worse_than_the_best(mode):
    sizes, sign = set(), 1 if mode == "max" else -1
    for seed in range(200):
        table = Table(seed, 2 + seed % 6)
        result = greedy_soup(table.members, lambda weights, table=table: sign * table(weights), mode=mode, strict=True)
        chosen, soup, best = code_of_the_authors(table.members, table)
        assert (result.ingredients, result.score) == ([f"ingredient {i}" for i in chosen], sign * best)
        assert torch.allclose(result.state_dict["w"], soup, rtol=1e-14, atol=0)
        kept = greedy_soup(table.members, table)
        assert min(sign * result.score, kept.score) >= max(row["single"] for row in kept.history)
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
    left_out = [reasons[f"ingredient {i}"].startswith("left out") for i in range(5)]
    assert left_out == [True, True, False, True, False]


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


scores_of = st.lists(
    st.one_of(st.floats(allow_nan=True, allow_infinity=True, width=32), st.sampled_from([0.0, 1.0])),
    min_size=1,
    max_size=7,
)


@settings(max_examples=150, deadline=None)
@given(scores_of, st.data(), st.sampled_from(["max", "min"]), st.booleans())
def test_never_worse_than_the_best_single(singles, data, mode, strict):
    values = [math.sqrt(prime) for prime in (2, 3, 5, 7, 11, 13, 17)]  # no two averages of them are equal
    members = [{"w": torch.tensor([value], dtype=torch.float64)} for value, _ in zip(values, singles, strict=False)]
    by_value = dict(zip(values, singles, strict=False))
    calls = []

    def evaluate(weights):
        value = float(weights["w"])
        calls.append(value)
        if value not in by_value:
            by_value[value] = data.draw(scores_of)[0]
        return by_value[value]

    finite = [score for score in singles if math.isfinite(score)]
    if not finite:
        with pytest.raises(CheckpointError, match="at least one ingredient must have finite"):
            greedy_soup(members, evaluate, mode=mode, strict=strict)
        return
    result = greedy_soup(members, evaluate, mode=mode, strict=strict)
    better = max if mode == "max" else min
    assert better(result.score, better(finite)) == result.score
    assert len(calls) == len(singles) + len(finite) - 1
    assert len(set(calls)) == len(calls)  # nothing is evaluated twice
    assert by_value[float(result.state_dict["w"])] == result.score  # the score is that of the weights returned
    assert [row["order"] for row in result.history] == list(range(len(singles)))
    assert sum(row["accepted"] for row in result.history) == len(result.ingredients)
    assert sum("left out" in row["reason"] for row in result.history) == len(singles) - len(finite)


def test_equal_metrics_keep_the_given_order_and_strict_refuses_them():
    members = runs(4)
    result = greedy_soup(members, lambda weights: 0.5)
    assert result.ingredients == [f"ingredient {i}" for i in range(4)]
    assert torch.equal(result.state_dict["a"], uniform_soup(members)["a"])
    strict = greedy_soup(members, lambda weights: 0.5, strict=True)
    assert strict.ingredients == ["ingredient 0"]
    assert all(same_bits(strict.state_dict[name], members[0][name]) for name in members[0])


def test_non_finite_ingredients_are_left_out_and_named():
    members = runs(4)
    members[0]["a"][3, 3] = math.nan
    seen = []

    def evaluate(weights):
        seen.append(bool(torch.isfinite(weights["a"]).all()))
        return math.nan if torch.equal(weights["a"], members[2]["a"]) else 1.0

    result = greedy_soup(members, evaluate)
    assert all(seen)
    assert result.ingredients == ["ingredient 1", "ingredient 3"]
    reasons = {row["name"]: row["reason"] for row in result.history}
    assert "'a' contains NaN" in reasons["ingredient 0"]
    assert "its metric is nan" in reasons["ingredient 2"]
    known = greedy_soup(members, lambda weights: 1.0, scores=[9.0, 1.0, None, 0.5])
    assert "ingredient 0" not in known.ingredients


def test_known_scores_are_not_evaluated_again():
    calls = []

    def evaluate(weights):
        calls.append(1)
        return -1.0

    result = greedy_soup(runs(5), evaluate, scores=[0.1, 0.5, 0.3, 0.2, 0.4])
    assert len(calls) == 4
    assert [row["name"] for row in result.history] == [f"ingredient {i}" for i in (1, 4, 2, 3, 0)]
    assert result.score == 0.5


def test_what_evaluate_does_to_the_candidate_does_not_last():
    members = runs(4)

    def ruin(weights):
        score = -float(weights["a"].square().sum())
        for value in weights.values():
            value.fill_(math.nan)
        return score

    def leave(weights):
        return -float(weights["a"].square().sum())

    ruined, left = greedy_soup(members, ruin), greedy_soup(members, leave)
    assert ruined.history == left.history
    assert all(same_bits(ruined.state_dict[name], left.state_dict[name]) for name in members[0])


def test_after_average_sees_every_candidate_and_the_result():
    mask = torch.arange(5) % 2 == 0

    def remask(weights):
        weights["b"].mul_(mask)

    def evaluate(weights):
        assert not weights["b"][~mask].any()
        return 0.0

    result = greedy_soup(runs(3), evaluate, after_average=remask)
    assert not result.state_dict["b"][~mask].any()
    assert result.state_dict["b"][mask].all()


def test_max_ingredients():
    result = greedy_soup(runs(6), lambda weights: 0.0, max_ingredients=3)
    assert len(result.ingredients) == 3
    assert "not tried" in result.history[5]["reason"]


def test_candidates_do_not_pile_up():
    shape = (311, 313)  # no other tensor in this process has it

    def copies():
        return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.shape == shape)

    members = [{"w": torch.randn(shape)} for _ in range(8)]
    given_before, most = copies(), []

    def evaluate(weights):
        most.append(copies() - given_before)
        return 0.0

    greedy_soup(members, evaluate)
    assert max(most) <= 2  # the mean and the candidate


def test_a_journal_keeps_scores_that_json_has_no_name_for(tmp_path):
    scores = [math.nan, math.inf, 0.1 + 0.2, 1e-320]
    members = [{"w": torch.tensor([float(i)])} for i in range(4)]
    first = greedy_soup(members, lambda w: scores[int(w["w"])] if w["w"] % 1 == 0 else -1.0, journal=tmp_path / "j")
    again = greedy_soup(members, lambda w: 1 / 0, journal=tmp_path / "j")
    assert again.history == first.history
    json.loads((tmp_path / "j").read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"min_delta": 0.1}, "its min_delta were"),
        ({"order": "given"}, "its order were"),
        ({"seed": 1}, "its seed were"),
        ({"mode": "min"}, "its mode were"),
        ({"strict": True}, "its strict were"),
        ({"about": {"evaluate": "other"}}, "its evaluate were"),
        ({"about": {}}, "its evaluate were"),
        (lambda members: members[2].update(w=torch.zeros(3, dtype=torch.float64)), "its ingredients were others"),
        (lambda members: members.reverse(), "its ingredients were others"),
        ("{", "journal"),
        ('{"a": 1}', "journal .* soup search wrote"),
        ('{"search": {"format": 1}, "scores": {}}', "must have format 2, got 1 of another version of efftrain"),
        ('{"search": {}, "scores": {}}', "must have format 2, got None of another version of efftrain"),
    ],
)
def test_a_journal_of_another_search_is_refused(tmp_path, change, match):
    table, journal = Table(0, 3), tmp_path / "journal"
    options = {"order": "random", "about": {"evaluate": "one"}, "journal": journal}
    greedy_soup(table.members, table, **options)
    if isinstance(change, str):
        journal.write_text(change)
    elif callable(change):
        change(table.members)
    with pytest.raises(CheckpointError, match=match):
        greedy_soup(table.members, table, **options | (change if isinstance(change, dict) else {}))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"min_delta": -0.1}, "min_delta must"),
        ({"min_delta": math.nan}, "min_delta must"),
        ({"order": "best"}, "order must"),
        ({"mode": "best"}, "mode must be one of max, min"),
        ({"max_ingredients": 0}, "max_ingredients must"),
        ({"scores": [1.0]}, "scores must be one for each of 2"),
        ({"ingredients": []}, "at least one"),
        ({"ingredients": "checkpoint-1"}, "sequence of paths"),
        ({"jobs": 2, "evaluate": math.fsum}, "got ingredient 0 in memory"),
        ({"jobs": 2, "order": "given"}, "jobs must be 1 for order given"),
        ({"jobs": 0}, r"jobs must be in \[1, inf\)"),
        *(({"evaluate": lambda weights, bad=bad: bad}, "evaluate must return a number")
          for bad in ({"accuracy": 1.0}, None, torch.ones(2), "much")),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(EffError, match=match):
        greedy_soup(**{"ingredients": runs(2), "evaluate": lambda weights: 0.0, **options})


SHARED = [{"w": torch.tensor([value])} for value in (0.0, 4.0, 9.0, float("nan"), 2.0, 3.5, -7.0)]


def nearness(weights):
    return -abs(float(weights["w"]) - 2.5)


@pytest.mark.parametrize("work", [greedy_soup, diagnose])
@pytest.mark.parametrize("size", [2, 3])
def test_the_result_and_the_journal_are_those_of_one_process(tmp_path, work, size):
    alone = work(SHARED, nearness, journal=tmp_path / "one.json")
    counts = [0] * size

    def be(job):
        def counted(weights):
            counts[job.rank] += 1
            return nearness(weights)

        if job.is_main:
            return work(SHARED, counted, job=job, journal=tmp_path / "many.json")
        return score_share(SHARED, counted, job)

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
    greedy_soup(SHARED, nearness, journal=tmp_path / "j.json")
    (tmp_path / "j.json").write_text(
        json.dumps({**(kept := json.loads((tmp_path / "j.json").read_text())), "scores": {"0": kept["scores"]["0"]}})
    )
    seen = []

    def be(job):
        def noted(weights):
            seen.append(float(weights["w"]))
            return nearness(weights)

        if job.is_main:
            return greedy_soup(SHARED, noted, job=job, journal=tmp_path / "j.json")
        return score_share(SHARED, noted, job)

    together(be)
    assert 0.0 not in seen
    assert {4.0, 9.0, 2.0, 3.5, -7.0} <= set(seen)


def test_an_evaluation_that_fails_in_one_process_ends_all():
    def be(job):
        if job.is_main:
            return greedy_soup(SHARED, lambda weights: job.get("never") and 0.0, job=job)
        return score_share(SHARED, lambda weights: "good", job)

    main, other = together(be)
    assert isinstance(other, ConfigError)
    assert str(main) == f"rank 1 of 2 failed: {other}"
    assert "evaluate must return a number" in str(other)


def test_path_as_table_json_and_plot(tmp_path):
    from rich.console import Console

    result = greedy_soup(runs(4), lambda weights: math.nan if weights["a"][0, 0] > 1e9 else 0.25)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(path_table(result))
    assert "oup of 4 of 4" in console.export_text()
    assert json.loads(path_json(result))["history"] == result.history
    plot = path_plot(result, tmp_path / "path.png")
    assert plot.read_bytes()[:4] == b"\x89PNG"
