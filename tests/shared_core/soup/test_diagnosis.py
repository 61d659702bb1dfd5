"""Diagnosis of ingredients, and their evaluation in parallel processes."""

import functools
import json
import math
import os
import sys

import commands
import pytest
import torch
from rich.console import Console
from soup_runs import runs

from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup import diagnose, diagnosis_table, greedy_soup


def test_distances_and_cosines_are_those_of_the_whole_vectors():
    members = [{**member, "count": torch.tensor(i)} for i, member in enumerate(runs(5))]
    members[3] = {name: value.clone() for name, value in members[1].items()}
    members[2] = {name: value.bfloat16() if value.is_floating_point() else value for name, value in members[2].items()}
    found = diagnose(members, lambda weights: 0.0)
    vectors = torch.stack([torch.cat([member["a"].double().flatten(), member["b"].double()]) for member in members])
    assert torch.allclose(torch.tensor(found.distances).double(), torch.cdist(vectors, vectors), rtol=1e-6)
    assert found.distances[1][3] == 0.0
    centred = vectors - vectors.mean(0)
    assert torch.allclose(torch.tensor(found.from_mean).double(), centred.norm(dim=1), rtol=1e-6)
    expected = torch.nn.functional.cosine_similarity(centred[:, None], centred[None], dim=-1)
    assert torch.allclose(torch.tensor(found.cosines).double(), expected, rtol=1e-6)


def test_the_mean_itself_has_no_direction():
    found = diagnose([{"w": torch.tensor([value])} for value in (-1.0, 0.0, 1.0)], lambda weights: 0.0)
    assert found.cosines[0][2] == -1.0
    assert math.isnan(found.cosines[0][1])


@pytest.mark.parametrize("mode", ["max", "min"])
def test_barriers_and_the_warning_of_a_collapse(mode):
    """Two members in the basin around 0, the best at 0.5, and one in that around 10."""
    sign = 1 if mode == "max" else -1
    calls = []

    def quality(weights):
        calls.append(float(weights["w"]))
        return sign * math.exp(-min(abs(calls[-1] - 0.5), abs(calls[-1] - 10.5)) / 4)

    members = [{"w": torch.tensor([value], dtype=torch.float64)} for value in (0.0, 0.5, 10.0)]
    found = diagnose(members, quality, mode=mode)
    assert len(calls) == 4 * 3 - 2
    assert found.best == "ingredient 1"
    ends = [math.exp(0.0), math.exp(-0.5 / 4)]
    middle = math.exp(-(10.0 - 0.5) / 2 / 4)
    assert found.barriers["ingredient 2"] == pytest.approx(sum(ends) / 2 - middle)
    assert found.barriers["ingredient 0"] < 0.01
    assert found.paths["ingredient 0"][2] == pytest.approx(sign * math.exp(-0.25 / 4))
    assert found.uniform == pytest.approx(sign * math.exp(-(10.5 / 3 - 0.5) / 4))
    collapse, barrier = found.warnings
    assert "would collapse" in collapse
    assert barrier.endswith(": ingredient 2")
    near = diagnose(members[:2], quality, mode=mode)
    assert near.warnings == []


def test_a_candidate_without_a_metric_is_an_endless_barrier():
    found = diagnose(runs(2), lambda weights, calls=[]: calls.append(1) or (math.nan if len(calls) > 2 else 1.0))
    assert found.barriers == {"ingredient 1": math.inf}
    assert "its metric is nan" in found.warnings[0]


def test_left_out_ingredients_are_named():
    members = runs(3)
    members[0]["b"][1] = math.nan
    found = diagnose(members, lambda weights: 1.0)
    assert found.left_out == {"ingredient 0": "left out: 'b' holds a NaN or an infinity"}
    assert found.names == ["ingredient 1", "ingredient 2"]
    drawn = Console(width=120)
    with drawn.capture() as capture:
        drawn.print(diagnosis_table(found))
    assert "ingredient 0 left out: 'b' holds a NaN or an infinity" in capture.get()
    with pytest.raises(CheckpointError, match="at least two ingredients must"):
        diagnose(members[:2], lambda weights: 1.0)
    with pytest.raises(ConfigError, match="mode must"):
        diagnose(members, lambda weights: 1.0, mode="best")


def test_a_killed_diagnosis_goes_on(tmp_path):
    members, journal = runs(3), tmp_path / "journal.json"

    def score(weights):
        calls.append(1)
        if len(calls) == kill_at:
            raise KeyboardInterrupt
        return float(weights["a"].sum())

    calls, kill_at = [], None
    whole = diagnose(members, score)
    calls, kill_at = [], 7
    with pytest.raises(KeyboardInterrupt):
        diagnose(members, score, journal=journal)
    kill_at = None
    assert diagnose(members, score, journal=journal) == whole
    assert len(calls) == 10 + 1
    with pytest.raises(CheckpointError, match="its kind were 'diagnosis', now 'greedy'"):
        greedy_soup(members, score, journal=journal)


# --- the command, and processes ---------------------------------------------------------------------------------------

SCORED = ["--eval", "parallel_task:score", "--model", "parallel_task:Net"]
TASK = """
import os
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(33, 7)), torch.nn.Parameter(torch.zeros(5))
def score(model):
    with open("processes", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return -float((model.a - 0.1).square().mean())
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parallel_task.py").write_text(TASK)
    for number, member in enumerate(runs(4)):
        torch.save(member, tmp_path / f"{number}.pt")
    yield tmp_path
    sys.modules.pop("parallel_task", None)


eff = functools.partial(commands.eff, "soup", "0.pt", "1.pt", "2.pt", "3.pt")


def test_the_command_tells_a_diagnosis(room):
    arguments = ("--diagnose", *SCORED, "--journal", "journal.json")
    found = json.loads(eff(*arguments, "--json", "--plot", "ways.svg").stdout)
    assert len(found["distances"]) == len(found["metrics"]) == 4
    assert found["alphas"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert b"<svg" in (room / "ways.svg").read_bytes()
    table = eff(*arguments).stdout
    assert "uniform soup of 4" in table
    assert len((room / "processes").read_text().split()) == 4 * 4 - 2
    for more, match in (
        (["--out", "a.pt"], "--diagnose must stand without --out"),
        (["--strict"], "stand without --strict"),
        (["--kind", "uniform"], "--diagnose must stand without --kind"),
    ):
        with pytest.raises(ConfigError, match=match):
            eff(*arguments, *more)


@pytest.mark.slow
def test_processes_give_the_same_soup(room):
    torch.save({**runs(4)[0], "b": torch.full((5,), math.nan)}, "0.pt")
    one = json.loads(eff(*SCORED, "--out", "one.pt", "--json").stdout)
    (room / "processes").unlink()
    two = json.loads(eff(*SCORED, "--out", "two.pt", "--json", "--jobs", "2", "--journal", "j").stdout)
    assert one == two
    assert "'b' holds a NaN" in two["history"][-1]["reason"]
    numbers = [int(number) for number in (room / "processes").read_text().split()]
    assert len(numbers) == 6  # three alone, the best again, two averages
    assert sum(number != os.getpid() for number in numbers) == 3
    first, second = (torch.load(room / f"{name}.pt", weights_only=True) for name in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    eff(*SCORED, "--out", "three.pt", "--jobs", "2", "--journal", "j")
    assert len((room / "processes").read_text().split()) == 6


def test_what_processes_cannot_do_is_refused(room):
    with pytest.raises(ConfigError, match="another process can import"):
        greedy_soup(["1.pt", "2.pt"], lambda weights: 0.0, jobs=2)
    with pytest.raises(ConfigError, match="got ingredient 0 in memory"):
        greedy_soup(runs(2), math.fsum, jobs=2)
    with pytest.raises(ConfigError, match="jobs must be 1 for order given"):
        greedy_soup(runs(2), math.fsum, jobs=2, order="given")
    with pytest.raises(ConfigError, match="jobs must be at least 1"):
        greedy_soup(runs(2), math.fsum, jobs=0)
    with pytest.raises(ConfigError, match="--jobs must stand without"):
        eff(*SCORED, "--out", "soup.pt", "--jobs", "2", "--order", "given")
