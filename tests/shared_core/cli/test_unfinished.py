"""A checkpoint from before its techniques finished is named by the commands that make another model of it."""

import json

import pytest
import torch
from commands import eff
from plain_loop import begun_session, plain_step
from safetensors.torch import save_model
from torch import nn

from shared_core import Recipe
from shared_core.engine.saving.state_file import save_state

STEPS = 8
PRUNED = {"prune": {"sparsity": 0.5, "end": 0.5, "every": 1}}
QUANTIZED = {"qat": {"scheme": "int8_weight", "begin": 2}}
AVERAGED = {"average": {"kind": "ema"}}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(4, 8)


def trained(recipe, steps):
    """Return a model that was trained for some of the steps of its run, and the session's state."""
    model, batch = build()
    session, optimizer = begun_session(Recipe.from_dict(recipe), model, STEPS, lr=0.01)
    for _ in range(steps):
        model(batch).square().mean().backward()
        plain_step(session, optimizer)
    state = session.state_dict()
    session.detach()
    return model, state


@pytest.fixture(params=["folder", "file in it", "lightning"])
def saved(request, tmp_path):
    """Return a function that writes a checkpoint and returns what a user gives a command."""

    def write(recipe, steps):
        model, state = trained(recipe, steps)
        if request.param == "lightning":
            file = tmp_path / "last.ckpt"
            torch.save({"state_dict": model.state_dict(), "callbacks": {"EffCallback": {"eff_state": state}}}, file)
            return file
        folder = tmp_path / "checkpoint-4"
        folder.mkdir()
        save_model(model, str(folder / "model.safetensors"))
        save_state(folder, state)
        return folder / "model.safetensors" if request.param == "file in it" else folder

    return write


def notes(*words):
    done = eff(*words)
    assert done.exit_code == 0, done.output
    return [line for line in done.stderr.splitlines() if line.startswith("note: ")]


@pytest.mark.parametrize("recipe", [PRUNED, QUANTIZED, AVERAGED, PRUNED | AVERAGED])
def test_techniques_that_have_not_finished_are_named(saved, recipe, tmp_path):
    path = saved(recipe, 2)
    # Lightning's files hold rounded weights and the average already
    still = [key for key in recipe if path.suffix != ".ckpt" or key == "prune"]
    found = notes("compress", path, "--out", tmp_path / "x.eff")
    assert len(found) == bool(still)
    assert all(str(path) in note and "step 2" in note and key in note for note in found for key in still)


def test_a_run_whose_techniques_have_finished_is_not_noted(saved, tmp_path):
    assert not notes("compress", saved(PRUNED, 5), "--out", tmp_path / "x.eff")


@pytest.mark.parametrize("words", [
    ["quantize", "--scheme", "int8_weight"], ["prune", "--sparsity", "0.5"], ["shrink"],
    ["low-rank", "--rank", "2", "--min-size", "1"],
], ids=lambda words: words[0])  # fmt: skip
def test_every_command_that_makes_a_model_notes_it_beside_its_json(words, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rsplit("/", 1)[0])
    model, state = trained(PRUNED, 2)
    save_model(model, str(tmp_path / "model.safetensors"))
    save_state(tmp_path, state)
    weights = ["--weights", tmp_path, "--out", tmp_path / "out"]
    done = eff(words[0], "test_unfinished:build", *words[1:], *weights, "--json")
    assert done.exit_code == 0, done.output
    assert "before prune finished" in done.stderr
    json.loads(done.stdout)
