"""`eff soup`: what it writes, what it refuses."""

import functools
import json
import re
import subprocess
import sys

import commands
import numpy as np
import pytest
import torch
import transformers
from plain_loop import begun_session, plain_step
from reports import report_of, row
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shared_core.checkpoint_formats.plain import (
    DEPLOYMENT_FILE,
    DEPLOYMENT_KEY,
    add_section,
    read_deployment,
    write_deployment,
)
from shared_core.engine.saving.state_file import save_state
from shared_core.errors import CheckpointError, ConfigError, EffError

TASK = """
import torch
import transformers
calls = []
class Net(torch.nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(size, size))
def net():
    return Net()
def small():
    return Net(2)
def quality(model):
    calls.append(1)
    return -float((model.w - 1.6).abs().max())
def two(model):
    return -float((model.w - 2).abs().max())
def nan(model):
    return float("nan") if float(model.w[0, 0]) == 1.0 else 0.0
def all_nan(model):
    return float("nan")
def never(model):
    raise AssertionError("the search has begun")
number = 3
"""
NET = ["--model", "soup_task:net"]
QUALITY = ["--eval", "soup_task:quality", *NET]


@pytest.fixture
def room(tmp_path, monkeypatch):
    commands.user_module(tmp_path, monkeypatch, "soup_task", TASK)
    for step in (1, 2, 3):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((4, 4), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"width": 4}')
    return tmp_path


eff = functools.partial(commands.eff, "soup")


def test_a_run_that_saved_its_model_too_is_refused_with_the_pattern_of_its_checkpoints(room):
    save_file({"w": torch.ones(4, 4)}, room / "run" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"at least two checkpoints, got 1; .*run/checkpoint-\*"):
        eff("run", *QUALITY, "--out", "soup")


def test_a_greedy_soup_of_a_run(room):
    result = eff("run", *QUALITY, "--out", "soup", "--plot", "path.svg")
    assert result.exit_code == 0
    assert re.search("2 of 3 checkpoints.* -0.1", result.output)
    assert load_file("soup/model.safetensors")["w"].unique().tolist() == [1.5]
    path = json.loads((room / "soup" / "soup_path.json").read_text())
    assert [name.rsplit("-", 1)[1] for name in path["ingredients"]] == ["2", "1"]
    assert [row["accepted"] for row in path["history"]] == [True, True, False]
    assert {file.name for file in (room / "soup").iterdir()} == {"model.safetensors", "config.json", "soup_path.json"}
    assert b"<svg" in (room / "path.svg").read_bytes()
    text = report_of(room / "soup")
    assert row(text, "held-out metric, first ingredient and soup")[:2] == ["-0.4", "-0.1"]
    assert [line.split(" | ")[4] for line in text.splitlines() if "checkpoint-" in line] == ["yes", "yes", "no"]


@pytest.mark.parametrize(("kind", "what"), [
    (["--kind", "uniform"], "The average"),
    (["--kind", "slerp", "--t", "0.5"], "The slerp merge"),
])  # fmt: skip
def test_a_model_card_tells_of_the_soup_not_of_a_run(room, kind, what):
    card = room / "run" / "checkpoint-1" / "README.md"
    card.write_text("# Mine\n")
    add_section(card, "76 steps applied")
    (card.parent / "model.onnx.eff.json").write_text("{}")
    names = ["run/checkpoint-1", "run/checkpoint-2"]
    assert eff(*names, *kind, "--out", "soup").exit_code == 0
    assert {file.name for file in (room / "soup").iterdir()} == {
        "model.safetensors", "config.json", "soup_path.json", "README.md",
    }  # fmt: skip
    told = (room / "soup" / "README.md").read_text()
    assert told.startswith("# Mine")
    assert f"{what} of checkpoints: {', '.join(names)} (soup_path.json)." in told
    assert "76 steps" not in told


def test_json_is_all_that_goes_to_stdout(room):
    result = eff("run", *QUALITY, "--out", "soup", "--json", "--mode", "min", "--strict")
    assert json.loads(result.stdout)["ingredients"] == ["run/checkpoint-3"]


def test_a_journal_spares_evaluations(room):
    eff("run", *QUALITY, "--out", "one", "--journal", "journal.json")
    import soup_task

    assert len(soup_task.calls) == 6  # three alone, the best once more, two averages
    eff("run", *QUALITY, "--out", "two", "--journal", "journal.json")
    assert len(soup_task.calls) == 6
    assert (room / "one" / "model.safetensors").read_bytes() == (room / "two" / "model.safetensors").read_bytes()
    (room / "soup_task.py").write_text(TASK.replace("1.6", "1.7"))
    with pytest.raises(CheckpointError, match="its evaluate_file were"):
        eff("run", *QUALITY, "--out", "three", "--journal", "journal.json")


def test_order_min_delta_and_an_evaluation_with_noise(room):
    arguments = ("run", *QUALITY, "--no-repeat", "--order", "given", "--min-delta")
    result = eff(*arguments, 0.4, "--out", "one", "--json")
    assert [row["score"] for row in json.loads(result.stdout)["history"]] == pytest.approx([-0.6, -0.1, -0.4])
    assert len(sys.modules["soup_task"].calls) == 3
    result = eff(*arguments, 0.6, "--out", "two", "--json")
    assert json.loads(result.stdout)["ingredients"] == ["run/checkpoint-1"]
    (room / "soup_noise.py").write_text("from itertools import count\nnext_one = count()\n"
                                        "def noisy(model):\n    return -float(next(next_one))\n")  # fmt: skip
    result = eff("run", "--eval", "soup_noise:noisy", *NET, "--out", "three", "--json")
    assert "not deterministic: run/checkpoint-1 got 0, then -3" in result.stderr
    assert json.loads(result.stdout)["repeat"] == [0.0, -3.0]
    sys.modules.pop("soup_noise")


def test_uniform_and_weighted(room):
    eff("run", "--kind", "uniform", "--out", "mean")
    assert load_file("mean/model.safetensors")["w"].unique().tolist() == [2.0]
    eff("run", "--kind", "weighted", "--weights", "1,1,2", "--out", "weighted")
    assert load_file("weighted/model.safetensors")["w"].unique().tolist() == [2.25]


def test_merges(room):
    (room / "base").mkdir()
    save_file({"w": torch.zeros(4, 4)}, room / "base" / "model.safetensors")
    bases = ["--base", "base", "--density"]
    result = eff("run", "--kind", "ties", *bases, 1, "--lambda", 2, "--weights", "1,1,2", "--out", "ties")
    assert "3 checkpoints (ties)" in result.stdout
    assert load_file("ties/model.safetensors")["w"].unique().tolist() == [4.5]
    path = json.loads((room / "ties" / "soup_path.json").read_text())
    assert (path["kind"], path["base"], path["density"], path["lambda"]) == ("ties", "base", 1.0, 2.0)
    assert path["weights"] == [1.0, 1.0, 2.0]
    assert "A merge (ties) of 3 ingredients" in report_of(room / "ties")
    for kind, seed in (("dare_linear", 1), ("dare_linear", 2), ("dare_ties", 1)):
        eff("run", "--kind", kind, *bases, 0.5, "--seed", seed, "--out", f"{kind}{seed}")
        assert load_file(f"{kind}{seed}/model.safetensors")["w"].mean().item() == pytest.approx(6)
    one, two = (load_file(f"dare_linear{seed}/model.safetensors")["w"] for seed in (1, 2))
    assert not torch.equal(one, two)
    eff("run/checkpoint-1", "run/checkpoint-3", "--kind", "slerp", "--t", 0.25, "--out", "arc")
    assert load_file("arc/model.safetensors")["w"].unique().tolist() == [1.5]
    assert (room / "arc" / "config.json").exists()


def test_the_path_of_an_average_names_its_members_and_who_was_left_out(room):
    save_file({"w": torch.full((4, 4), torch.nan)}, room / "run" / "checkpoint-1" / "model.safetensors")
    result = eff("run", "--kind", "uniform", "--out", "mean")
    assert "run/checkpoint-1 is left out: 'w' contains NaN" in result.stderr
    assert "2 checkpoints (uniform)" in result.stdout
    path = json.loads((room / "mean" / "soup_path.json").read_text())
    assert path["ingredients"] == ["run/checkpoint-2", "run/checkpoint-3"]
    assert list(path["left_out"]) == ["run/checkpoint-1"]
    path = json.loads(eff("run", "--kind", "weighted", "--weights", "5,0,2", "--out", "weighted", "--json").stdout)
    assert (path["ingredients"], path["weights"]) == (["run/checkpoint-3"], [2.0])


def test_a_nan_metric_leaves_an_ingredient_out_and_says_so(room):
    result = eff("run", "--eval", "soup_task:nan", *NET, "--out", "soup", "--json")
    rows = {row["name"]: row["reason"] for row in json.loads(result.stdout)["history"]}
    assert "its metric is nan" in rows["run/checkpoint-1"]
    with pytest.raises(CheckpointError, match="finite metric"):
        eff("run", "--eval", "soup_task:all_nan", *NET, "--out", "other")
    assert not (room / "other").exists()


def test_lightning_style_checkpoints(room):
    for i in range(2):
        torch.save({"state_dict": {"w": torch.full((2, 2), float(i))}, "epoch": i}, f"{i}.ckpt")
    eff("0.ckpt", "1.ckpt", *QUALITY[:3], "soup_task:small", "--out", "out/soup.ckpt")
    assert torch.load("out/soup.ckpt", weights_only=True)["epoch"] == 1
    assert json.loads((room / "out" / "soup_soup_path.json").read_text())["ingredients"] == ["1.ckpt"]
    with pytest.raises(CheckpointError, match=r"ending in .ckpt"):
        eff("0.ckpt", "1.ckpt", *QUALITY[:3], "soup_task:small", "--out", "folder")
    # formats mix, and the soup has the first one's
    torch.save({"state_dict": {"model.w": torch.zeros(4, 4)}, "epoch": 3}, "0.ckpt")
    eff("0.ckpt", "run/checkpoint-1", "--kind", "uniform", "--out", "mixed.ckpt")
    mixed = torch.load("mixed.ckpt", weights_only=True)
    assert mixed["epoch"] == 3
    assert mixed["state_dict"]["model.w"].unique().tolist() == [0.5]
    eff("run/checkpoint-3", "0.ckpt", *QUALITY, "--mode", "min", "--out", "mixed")
    assert load_file("mixed/model.safetensors")["w"].shape == (4, 4)


GREEDY = ["--eval", "soup_task:all_nan", *NET]  # would fail otherwise, if it were ever called
WEIGHTED = ["--kind", "weighted", "--weights"]
TIES = ["--kind", "ties", "--density"]


@pytest.mark.parametrize(("arguments", "kind", "match"), [
    (["--out", "soup", *GREEDY], CheckpointError, "at least two checkpoints, got 0"),
    (["run/checkpoint-1", "--out", "soup", *GREEDY], CheckpointError, "at least two checkpoints, got 1"),
    (["run/checkpoint-1", "gone", "--out", "soup", *GREEDY], CheckpointError, "PATHS must be an existing file"),
    (["run", "wide", "--out", "soup", *GREEDY], CheckpointError, r"\(4, 4\) in .* and \(5, 5\) in wide"),
    (["run", "--out", "full", *GREEDY], CheckpointError, "must not exist yet.*--force"),
    (["run", "--out", "link", *GREEDY], CheckpointError, "must not exist yet, got link"),
    (["run", "--out", "soup_task.py/soup", *GREEDY], CheckpointError, "cannot write to"),
    (["run", *GREEDY], ConfigError, "--out must be given"),
    (["run", "--out", "soup"], ConfigError, "--eval must be given"),
    (["run", "--out", "soup", "--eval", "soup_task", *NET], ConfigError, "must be module:function"),
    (["run", "--out", "soup", "--eval", "no_such_module:f", *NET], ConfigError, "can be imported"),
    (["run", "--out", "soup", "--eval", "soup_task:number", *NET], ConfigError, "'number'"),
    (["run", "--out", "soup", "--eval", "soup_task:nothing", *NET], ConfigError, "'nothing'"),
    (["run", "--out", "soup", "--mode", "best", *GREEDY], ConfigError, "--mode must be one of max, min"),
    (["run", "--out", "soup", *WEIGHTED, "1,1,1", *GREEDY], ConfigError,
     "weighted .*--eval and --model"),
    (["run", "--out", "soup", *WEIGHTED, "1,x,1"], ConfigError, "--weights must be a finite number, got 'x'"),
    (["run", "--out", "soup", *WEIGHTED, "1,1"], ConfigError, "one for each of 3"),
    (["run", "--out", "soup", *WEIGHTED[:2]], ConfigError, "--weights must be given with --kind weighted"),
    (["run", "--out", "soup", "--weights", "1,1,1", *GREEDY], ConfigError, "--kind weighted"),
    (["run", "--out", "soup", *TIES, "0.5"], ConfigError, "--base must be given with --kind ties"),
    (["run", "--out", "soup", *TIES[:2], "--base", "wide"], ConfigError, "--density must be given with --kind ties"),
    (["run", "--out", "soup", *TIES, "0.5", "--base", "wide"], CheckpointError, r"\(4, 4\) in .* and \(5, 5\) in wide"),
    (["run", "--out", "soup", *TIES, "0.5", "--base", "run/checkpoint-1"], CheckpointError, "must be listed once"),
    (["run", "--out", "soup", *TIES, "1.5", "--base", "base"], ConfigError, r"density must be in \(0, 1\], got 1.5"),
    (["run", "--out", "soup", *TIES, "0.5", "--base", "base", "--seed", "1"], ConfigError,
     "--seed .*--order random, or"),
    (["run", "--out", "soup", *TIES, "0.5", "--base", "base", "--rank", "1"], ConfigError,
     "ties .*--rank"),
    (["run", "--out", "soup", "--kind", "uniform", "--t", "0.1"], ConfigError, "--t .*--kind slerp"),
    (["run", "--out", "soup", "--kind", "slerp"], ConfigError, "slerp must have two ingredients, got 3"),
    (["run", "--out", "soup", "--kind", "mean"], ConfigError,
     "--kind must be one of greedy, uniform, .*, slerp, got 'mean'"),
    (["run", "--out", "soup", "--order", "best", *GREEDY], ConfigError, "--order must be one of metric, random, given"),
    (["run", "--out", "soup", "--seed", "3", *GREEDY], ConfigError, "--seed .*--order random"),
    (["run", "--out", "soup", "--min-delta", "-1", *GREEDY], ConfigError, "--min-delta must be in"),
    (["run", "--out", "soup", "--kind", "uniform", *GREEDY, "--batch-size", "8"], ConfigError,
     "uniform .*--eval and --model and --batch-size"),
    (["run", "--out", "soup", "--kind", "uniform", "--strict"], ConfigError,
     "uniform .*--strict"),
    (["run", "--out", "soup", "--max-ingredients", "0", *GREEDY], ConfigError, "--max-ingredients must"),
    (["run", "--out", "soup", "--journal", "soup_task.py/x", *GREEDY], CheckpointError, "cannot write to"),
    (["run", "--out", "soup", "--plot", "path.xyz", *GREEDY], ConfigError, "--plot must be a file ending in .png"),
    (["run", "--out", "soup", "--plot", "full", *GREEDY], ConfigError, "--plot must .* got full"),
    (["run", "run/../run/checkpoint-2", "--out", "soup", *GREEDY], CheckpointError, "must be listed once"),
    (["run", "soup_task.py", "--out", "soup", *GREEDY], CheckpointError, "got Unsupported operand"),
    (["run", "--out", "soup", "--rank-by", ":min", *GREEDY], ConfigError, "--rank-by must be a metric"),
    (["run", "--out", "soup", "--rank-by", "eval_f1", *GREEDY], CheckpointError, "got no metric of its step;"),
])  # fmt: skip
def test_bad_input_is_one_error_and_writes_nothing(room, arguments, kind, match):
    (room / "full").mkdir()
    (room / "full" / "file").write_text("kept")
    (room / "link").symlink_to("nowhere")
    (room / "wide").mkdir()
    save_file({"w": torch.ones(5, 5)}, room / "wide" / "model.safetensors")
    (room / "base").mkdir()
    save_file({"w": torch.zeros(4, 4)}, room / "base" / "model.safetensors")
    before = sorted(path for path in room.rglob("*") if "__pycache__" not in path.parts)
    with pytest.raises(kind, match=match):
        eff(*arguments)
    assert sorted(path for path in room.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.slow
def test_the_command_ends_with_2_and_one_line(room):
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from shared_core.cli import main; main()", "soup", "run", "--out", "soup"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: eff soup: --eval must be given")
    assert len(done.stderr.splitlines()) == 1


# --- pruned runs ------------------------------------------------------------------------------------------------------


def prune(folder, step, sparsity, mask):
    packed = torch.from_numpy(np.packbits(mask.numpy().reshape(-1)))
    save_state(
        folder,
        {
            "step": step,
            "recipe": {"prune": {"sparsity": 0.5}},
            "techniques": {"prune": {"masks": {"w": packed}, "last_update": step, "sparsity": sparsity}},
        },
    )
    weights = load_file(folder / "model.safetensors")
    save_file({"w": weights["w"] * mask}, folder / "model.safetensors")


def test_the_newest_mask_holds_and_unfinished_ones_are_left_out(room):
    run = room / "run"
    early, half = torch.ones(4, 4, dtype=torch.bool), torch.arange(16).view(4, 4) % 2 == 0
    early[0, 0] = False
    prune(run / "checkpoint-1", 1, 0.1, early)
    prune(run / "checkpoint-2", 2, 0.5, ~half)
    prune(run / "checkpoint-3", 3, 0.5, half)
    (room / "soup_task.py").write_text(
        f"{TASK}\ndef same(model):\n    assert (model.w == 0).sum() >= 8\n    return 0\n"
    )
    result = eff("run", "--eval", "soup_task:same", *NET, "--out", "soup")
    assert "left out: run/checkpoint-1" in result.stderr
    assert "newest mask (step 3)" in result.stderr
    soup = load_file("soup/model.safetensors")["w"]
    assert torch.equal(soup, half * 1.5)  # (0 + 3) / 2 where the newest mask keeps
    assert torch.equal(load_file(run / "checkpoint-3" / "model.safetensors")["w"], half * 3.0)
    result = eff("run", "--kind", "uniform", "--out", "all", "--unpruned")
    assert "left out" not in result.stderr
    soup = load_file("all/model.safetensors")["w"]
    assert not soup[~half].any()
    assert soup[0, 2] == pytest.approx(4 / 3)
    for step in (2, 3):
        prune(run / f"checkpoint-{step}", step, 0.2, half)
    with pytest.raises(EffError, match="pruning ended"):
        eff("run", "--kind", "uniform", "--out", "none")


def test_a_copy_without_state_is_used_if_it_obeys_the_mask(room):
    run, half = room / "run", torch.arange(16).view(4, 4) % 2 == 0
    prune(run / "checkpoint-3", 3, 0.5, half)
    save_file({"w": half * 7.0}, run / "checkpoint-1" / "model.safetensors")
    result = eff("run", "--kind", "uniform", "--out", "soup")
    assert "left out: run/checkpoint-2" in result.stderr
    assert torch.equal(load_file("soup/model.safetensors")["w"], half * 5.0)


def test_masks_in_a_lightning_checkpoint(room):
    half = torch.arange(16).view(4, 4) % 2 == 0
    for i, sparsity in enumerate((0.3, 0.5, 0.5)):
        state = {
            "step": i,
            "recipe": {"prune": {"sparsity": 0.5}},
            "techniques": {
                "prune": {
                    "masks": {"w": torch.from_numpy(np.packbits(half.numpy()))},
                    "last_update": i,
                    "sparsity": sparsity,
                }
            },
        }
        torch.save(
            {"state_dict": {"w": torch.ones(4, 4) * i}, "callbacks": {"Pruning{}": {"session": state}}}, f"{i}.ckpt"
        )
    eff("0.ckpt", "1.ckpt", "2.ckpt", "--kind", "uniform", "--out", "soup.ckpt")
    assert torch.equal(torch.load("soup.ckpt", weights_only=True)["state_dict"]["w"], half * 1.5)


def test_masks_of_a_real_session(room):

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 6)
    session, optimizer = begun_session(
        {"prune": {"sparsity": 0.5, "schedule": "linear", "begin": 1, "end": 4, "every": 1}}, model, 6
    )
    for step in range(1, 7):
        plain_step(session, optimizer, model(torch.randn(4, 8)).square().mean())
        folder = room / "pruned" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / "model.safetensors")
        save_state(folder, session.state_dict())
    result = eff("pruned", "--kind", "uniform", "--out", "soup", "--json")
    assert [name.rsplit("-", 1)[1] for name in json.loads(result.stdout)["ingredients"]] == ["4", "5", "6"]
    assert result.stderr.count("left out") == 3
    soup = load_file("soup/model.safetensors")["weight"]
    assert torch.equal(soup == 0, model.weight == 0)
    assert (soup == 0).sum() == 24


def test_ranges_of_qat_stay_with_the_weights_they_belong_to(room):
    members = [f"run/checkpoint-{step}" for step in (1, 2, 3)]
    for member in members:
        write_deployment(member, {"qat": {"ranges": {"w": {"min": 0.0, "max": 1.0}}}, "other": {"kept": member}})
    told = eff(*members, "--kind", "uniform", "--out", "soup")
    assert read_deployment("soup") == {"other": {"kept": members[0]}}
    assert "qat ranges" in told.stderr
    assert "eff quantize soup --out NEW" in told.stderr
    told = eff(*members, "--eval", "soup_task:two", *NET, "--out", "best")  # a soup of one: its weights, and its ranges
    assert (room / "best" / DEPLOYMENT_FILE).read_text() == (room / members[1] / DEPLOYMENT_FILE).read_text()
    assert "ranges" not in told.stderr
    for value in (1.0, 2.0):
        torch.save({"state_dict": {"w": torch.full((2,), value)}, DEPLOYMENT_KEY: {"qat": {}}}, f"{value}.ckpt")
    told = eff("1.0.ckpt", "2.0.ckpt", "--kind", "uniform", "--out", "soup.ckpt")
    assert DEPLOYMENT_KEY not in torch.load("soup.ckpt")
    assert "eff quantize module:function --weights soup.ckpt --out NEW" in told.stderr


def test_a_sharded_soup_of_lightning_tells_of_ranges_and_keeps_what_else_its_weights_need(room):
    for value in (1.0, 2.0):
        folder = room / f"sharded-{value}"
        save({"state_dict": {"w": torch.full((2,), value)}}, storage_writer=FileSystemWriter(folder), no_dist=True)
        torch.save({"epoch": 1, DEPLOYMENT_KEY: {"qat": {"ranges": {}}, "low_rank": {"rank": 2}}}, folder / "meta.pt")
    told = eff("sharded-1.0", "sharded-2.0", "--kind", "uniform", "--out", "soup.ckpt")
    kept = torch.load("soup.ckpt/meta.pt", weights_only=True)
    assert kept == {"epoch": 1, DEPLOYMENT_KEY: {"low_rank": {"rank": 2}}}
    assert "eff quantize module:function --weights soup.ckpt --out NEW" in told.stderr


def test_a_damaged_file_beside_the_weights_is_refused_before_the_search(room):
    (room / "run" / "checkpoint-2" / DEPLOYMENT_FILE).write_text('{"qat": ')
    with pytest.raises(CheckpointError, match=r"checkpoint-2.eff_deployment\.json"):
        eff("run/checkpoint-1", "run/checkpoint-2", "--eval", "soup_task:never", *NET, "--out", "soup")


def test_a_soup_takes_the_config_of_the_member_that_has_one(room):
    (room / "run" / "checkpoint-1" / "config.json").unlink()
    eff("run/checkpoint-1", "run/checkpoint-2", "--kind", "uniform", "--out", "soup")
    assert json.loads((room / "soup" / "config.json").read_text()) == {"width": 4}
    assert load_file("soup/model.safetensors")["w"].unique().tolist() == [1.5]


@pytest.mark.parametrize("older", ["both", "first", "second"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_folders_of_older_versions_of_transformers_are_evaluated_and_averaged(room, family, older):
    small = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(family, intermediate_size=16, num_key_value_heads=2, **small)
    models = []
    for number, name in enumerate(("first", "second")):
        torch.manual_seed(number)
        models.append(transformers.AutoModel.from_config(config))
        models[-1].save_pretrained(room / name)
        if older in ("both", name):
            file = room / name / "model.safetensors"
            state = {key.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
                     for key, value in load_file(file).items()} if family == "bert" else load_file(file)  # fmt: skip
            made = {"bert": ("embeddings.position_ids", torch.arange(512)[None]),
                    "llama": ("layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))}  # fmt: skip
            save_file(state | dict([made[family]]), file, metadata={"format": "pt"})
    (room / "constant.py").write_text("def evaluate(model):\n    return 1.0\n")
    done = eff("first", "second", "--eval", "constant:evaluate", "--order", "given", "--out", "averaged")
    assert done.exit_code == 0
    soup, told = transformers.AutoModel.from_pretrained(room / "averaged", output_loading_info=True)
    assert not told["missing_keys"]
    assert (
        load_file(room / "averaged" / "model.safetensors").keys()
        == load_file(room / "first" / "model.safetensors").keys()
    )
    for name, value in soup.named_parameters():
        one, two = (model.get_parameter(name).double() for model in models)
        torch.testing.assert_close(value.double(), (one + two) / 2, rtol=0, atol=1e-6)
