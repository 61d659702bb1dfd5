"""`--force` replaces what a command wrote, and nothing else."""

import json

import pytest
import torch
from commands import eff
from safetensors.torch import load_file, save_file

from shared_core.errors import CheckpointError, ConfigError


def build():
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rsplit("/", 1)[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prune(*more):
    return eff("prune", "test_force:build", "--out", "out", *more)


def test_a_folder_is_replaced_whole(here):
    assert prune("--sparsity", "0.5").exit_code == 0
    (here / "out" / "old.txt").write_text("of the first")
    with pytest.raises(CheckpointError, match="--force"):
        prune("--sparsity", "0.75")
    assert prune("--sparsity", "0.75", "--force").exit_code == 0
    assert json.loads((here / "out" / "eff_pruning.json").read_text())["sparsity"] == pytest.approx(0.75, abs=0.01)
    assert not (here / "out" / "old.txt").exists()
    assert [path.name for path in here.iterdir()] == ["out"]


def test_what_fails_leaves_the_old_folder(here):
    prune("--sparsity", "0.5")
    with pytest.raises(ConfigError):
        prune("--sparsity", "2", "--force")
    assert json.loads((here / "out" / "eff_pruning.json").read_text())["sparsity"] == pytest.approx(0.5, abs=0.01)


def test_a_folder_of_somebody_else_stays(here):
    (here / "out").mkdir()
    (here / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="--force replaces only"):
        prune("--sparsity", "0.5", "--force")
    assert (here / "out" / "thesis.tex").exists()


def test_what_is_read_is_not_replaced(here, monkeypatch):
    (here / "model").mkdir()
    save_file(build().state_dict(), here / "model" / "model.safetensors")
    line = ("prune", "test_force:build", "--weights", "model", "--sparsity", "0.5", "--force")
    with pytest.raises(ConfigError, match="what the command reads"):
        eff(*line, "--out", "model")
    monkeypatch.chdir(here / "model")
    with pytest.raises(ConfigError, match="working folder"):
        eff("prune", "test_force:build", "--sparsity", "0.5", "--force", "--out", ".")
    assert load_file(here / "model" / "model.safetensors")


def test_a_file_is_replaced(here):
    save_file({"w": torch.zeros(4)}, here / "a.safetensors")
    save_file({"w": torch.ones(4)}, here / "b.safetensors")
    line = ("soup", "a.safetensors", "b.safetensors", "--kind", "uniform", "--out", "soup.safetensors")
    assert eff(*line).exit_code == 0
    with pytest.raises(CheckpointError, match="must not exist yet"):
        eff(*line)
    assert eff(*line, "--force").exit_code == 0
    assert load_file(here / "soup.safetensors")["w"].tolist() == [0.5] * 4
    with pytest.raises(ConfigError, match="what the command reads"):
        eff(*line[:-1], "a.safetensors", "--force")


def test_a_compressed_file_is_replaced(here):
    save_file(build().state_dict(), here / "a.safetensors")
    assert eff("compress", "a.safetensors", "--out", "a.eff").exit_code == 0
    with pytest.raises(CheckpointError, match="--force"):
        eff("compress", "a.safetensors", "--out", "a.eff")
    assert eff("compress", "a.safetensors", "--out", "a.eff", "--force").exit_code == 0
