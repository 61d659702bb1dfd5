"""Diagnosis of ingredients, their evaluation in parallel processes, and ranking by metrics that trainers logged."""

import functools
import json
import math
import os
import sys

import commands
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from soup_runs import runs

from shared_core.checkpoint_formats import open_ingredient
from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup import diagnose, diagnosis_table, greedy_soup, logged_metrics, rank_by_logged


def test_distances_and_cosines_are_those_of_the_whole_vectors():
    members = [{**member, "count": torch.tensor(i)} for i, member in enumerate(runs(5))]
    members[3] = {name: value.clone() for name, value in members[1].items()}
    members[2] = {name: value.bfloat16() if value.is_floating_point() else value for name, value in members[2].items()}
    found = diagnose(members, lambda weights: 0.0)
    vectors = torch.stack([torch.cat([member["a"].double().flatten(), member["b"].double()]) for member in members])
    assert torch.allclose(torch.tensor(found.distances).double(), torch.cdist(vectors, vectors), rtol=1e-6)
    assert found.distances[1][3] == 0.0
    centered = vectors - vectors.mean(0)
    assert torch.allclose(torch.tensor(found.from_mean).double(), centered.norm(dim=1), rtol=1e-6)
    expected = torch.nn.functional.cosine_similarity(centered[:, None], centered[None], dim=-1)
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
    assert found.left_out.keys() == {"ingredient 0"}
    assert "'b' contains NaN" in found.left_out["ingredient 0"]
    assert found.names == ["ingredient 1", "ingredient 2"]
    drawn = Console(width=120)
    with drawn.capture() as capture:
        drawn.print(diagnosis_table(found))
    assert "ingredient 0 left out: 'b'" in capture.get()
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
    assert "niform soup of 4" in table
    assert len((room / "processes").read_text().split()) == 4 * 4 - 2
    for more, match in (
        (["--out", "a.pt"], "--diagnose .*--out"),
        (["--strict"], r"--diagnose .*--strict"),
        (["--kind", "uniform"], "--diagnose .*--kind"),
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
    assert "'b' contains NaN" in two["history"][-1]["reason"]
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
    with pytest.raises(ConfigError, match="--jobs "):
        eff(*SCORED, "--out", "soup.pt", "--jobs", "2", "--order", "given")


def folder_of(root, step, log):
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"w": torch.full((2,), float(step))}, folder / "model.safetensors")
    state = {"global_step": step, "log_history": log}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


RANKED = """
import torch
seen = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
def score(model):
    seen.append(float(model.w[0]))
    return -abs(seen[-1] - 2.2)
"""


@pytest.fixture
def run(tmp_path):
    """A run whose accuracy is best in the middle, logged as the Trainer does: all steps so far, losses apart."""
    log = []
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        log += [{"loss": 9.0 / step, "step": step}]
        log += [
            {"eval_accuracy": accuracy, "eval_loss": 1 - accuracy, "eval_fid": accuracy, "step": step, "epoch": 0.1}
        ]
        folder_of(tmp_path / "run", step, log)
    return tmp_path / "run"


def test_the_order_is_that_of_the_own_step(run):
    paths = [run / f"checkpoint-{step}" for step in (1, 2, 3)]
    assert logged_metrics(open_ingredient(paths[1])) == {
        "loss": 4.5, "eval_accuracy": 0.9, "eval_loss": pytest.approx(0.1), "eval_fid": 0.9,
    }  # fmt: skip
    for metric, mode, order in (
        ("eval_accuracy", "auto", "231"),
        ("eval_loss", "auto", "231"),
        ("eval_loss", "max", "132"),
        ("eval_fid", "min", "132"),
    ):
        ranked, values = rank_by_logged(paths, metric, mode)
        assert "".join(item.name[-1] for item in ranked) == order
        assert values == sorted(values, reverse=mode == "max" or metric == "eval_accuracy")


def test_ingredients_without_the_metric_are_refused_by_name(run):
    paths = sorted(run.iterdir())
    late = folder_of(run, 4, json.loads((paths[2] / "trainer_state.json").read_text())["log_history"])
    with pytest.raises(CheckpointError, match=r"checkpoint-4 must be saved with .* no metric of its step"):
        rank_by_logged([*paths, late], "eval_accuracy")
    with pytest.raises(CheckpointError, match=r"checkpoint-1 must be saved with 'eval_acuracy'.*eval_accuracy"):
        rank_by_logged(paths, "eval_acuracy")
    (late / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-4 must"):
        rank_by_logged([*paths, late], "eval_accuracy")
    state = {"global_step": 1, "log_history": [{"step": 1, "eval_accuracy": math.nan}]}
    (paths[0] / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"checkpoint-1 must be saved with .* as a finite number"):
        rank_by_logged(paths, "eval_accuracy")
    with pytest.raises(CheckpointError, match="ingredient 0 must be saved with"):
        rank_by_logged([{"w": torch.ones(1)}], "eval_accuracy")


def test_lightning_checkpoints(tmp_path):
    for number, score in enumerate((0.3, 0.8)):
        state = {"monitor": "val_acc", "best_k_models": {f"/elsewhere/{number}.ckpt": torch.tensor(score)}}
        torch.save({"state_dict": {"w": torch.ones(2)}, "callbacks": {"ModelCheckpoint{'monitor': 'val_acc'}": state},
                    "eff_run": {"id": "a", "step": 1, "metrics": {"val_loss": float(number)}}},
                   tmp_path / f"{number}.ckpt")  # fmt: skip
    paths = [tmp_path / "0.ckpt", tmp_path / "1.ckpt"]
    assert rank_by_logged(paths, "val_acc")[1] == [pytest.approx(0.8), pytest.approx(0.3)]
    assert rank_by_logged(paths, "val_loss")[1] == [0.0, 1.0]
    (tmp_path / "0.ckpt").rename(tmp_path / "last.ckpt")  # its own name is not among those scored
    with pytest.raises(CheckpointError, match=r"last\.ckpt must be saved with 'val_acc'"):
        rank_by_logged([tmp_path / "last.ckpt", paths[1]], "val_acc")


def test_the_command_ranks_by_what_was_logged(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (run.parent / "ranked_task.py").write_text(RANKED)
    scored = ["soup", str(run), "--eval", "ranked_task:score", "--model", "ranked_task:Net"]
    arguments = [*scored, "--json", "--journal", "journal.json", "--rank-by"]
    result = commands.eff(*arguments, "eval_accuracy", "--out", "one")
    assert sys.modules["ranked_task"].seen == [2.0, 2.0, 2.5, 1.5]  # the first one twice, then averages alone
    path = json.loads(result.stdout)
    assert path["ingredients"] == [f"{run}/checkpoint-2"]
    assert [row["logged"] for row in path["history"]] == [0.9, 0.7, 0.5]
    for rank_by, kind, match in (("eval_fid:min", CheckpointError, "its rank_by were 'eval_accuracy'"),
                                 ("eval_fid:low", ConfigError, "metric:min")):  # fmt: skip
        with pytest.raises(kind, match=match):
            commands.eff(*arguments, rank_by, "--out", "two")
    with pytest.raises(ConfigError, match=r"--rank-by .*--order"):
        commands.eff(*arguments, "a", "--order", "given", "--out", "two")
    sys.modules.pop("ranked_task")
