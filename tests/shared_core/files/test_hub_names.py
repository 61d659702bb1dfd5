"""What can only be a path is refused at once where nothing is there; a name of the Hub is asked for once."""

import time

import pytest

from shared_core.errors import CheckpointError
from shared_core.files.hub_names import check_named, is_path


def test_a_path_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").mkdir()
    for name in ("./teacher", "/nowhere/teacher", "~/nowhere", "x/y/z", "runs/teacher", "last.ckpt", "my teacher"):
        assert is_path(name)
        with pytest.raises(CheckpointError, match="teacher must be an existing folder"):
            check_named(name, "distill", "teacher")
    for name in ("gpt2", "google/vit-base-patch16-224", "org/name_of.model", "runs/a", "./runs"):
        check_named(name, "distill", "teacher")


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    import torch

    from hf_eff._adapters import distillation

    asked = []

    class Unreachable:
        def model_info(self, name, timeout):
            asked.append(name)
            raise ConnectionError("no network")

    monkeypatch.setattr(distillation, "HfApi", Unreachable)
    monkeypatch.setattr(distillation.AutoConfig, "from_pretrained", lambda *_, **__: time.sleep(600))
    with pytest.raises(CheckpointError, match="teacher must be an existing folder or a Hub name, got 'nobody/x'"):
        distillation.load_teacher("nobody/x", torch.nn.Linear(2, 2))
    assert asked == ["nobody/x"]
