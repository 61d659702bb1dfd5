"""What users do wrong and what breaks underneath them: one clear error at start, nothing half-written, no code run."""

import os

import promise_drivers
import pytest
import torch
from promise_drivers import difference, hf_trainer, lightning_module, run_hf, run_lightning
from promise_table import NUM_STEPS, recipe_of
from torch import nn

from shared_core.errors import CheckpointError, ConfigError, EffError
from shared_core.loss_scaling import LossScaleError, LossScaler

FRONT_ENDS = {"hf": run_hf, "lightning": run_lightning}


class Gadget:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_missing_teacher_fails_before_training(front_end, tmp_path):
    with pytest.raises(EffError, match="nowhere"):
        FRONT_ENDS[front_end]({"distill": {"teacher": str(tmp_path / "nowhere")}}, tmp_path / "out")
    assert not list((tmp_path / "out").glob("**/*.safetensors"))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_teacher_with_other_classes_is_refused_with_both_sizes(front_end, tmp_path):
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 7)

        def forward(self, x, labels=None):
            return {"logits": self.head(x.flatten(1))}

    with pytest.raises(EffError, match=r"10.*7|7.*10"):
        FRONT_ENDS[front_end]({"distill": {"teacher": Teacher()}}, tmp_path / "out")


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_pickle_in_place_of_a_checkpoint_runs_no_code(front_end, tmp_path):
    saved = FRONT_ENDS[front_end](recipe_of("prune"), tmp_path / "whole", save_every=4).checkpoints[4]
    ran = tmp_path / "ran"
    target = saved / "eff_state.safetensors" if front_end == "hf" else saved
    torch.save({"state_dict": {}, "gadget": Gadget(ran)}, target)
    with pytest.raises((EffError, Exception)) as caught:
        FRONT_ENDS[front_end](recipe_of("prune"), tmp_path / "again", resume=saved)
    assert isinstance(caught.value, CheckpointError) or "weights_only" in str(caught.value).lower()
    assert not ran.exists()


@pytest.mark.parametrize("damage", ["empty", "pickled"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_newest_whole_one(damage, tmp_path, capsys):
    whole = run_hf(recipe_of("prune", "qat"), tmp_path, save_every=2)
    newest = whole.checkpoints[NUM_STEPS]
    if damage == "empty":
        for file in newest.iterdir():
            file.unlink()
    else:
        torch.save({"x": Gadget(tmp_path / "ran")}, newest / "model.safetensors")
    again = run_hf(recipe_of("prune", "qat"), tmp_path, save_every=2, resume=True)
    assert difference(whole.weights, again.weights) is None
    assert f"checkpoint-{NUM_STEPS}" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_soup_without_a_validation_example_is_refused(front_end, tmp_path, monkeypatch):
    monkeypatch.setattr(promise_drivers, "eval_examples", list)
    with pytest.raises(EffError, match=r"validation|eval"):
        FRONT_ENDS[front_end](recipe_of("soup"), tmp_path)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_unwritable_output_folder_fails_before_training(front_end, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises((EffError, OSError), match="file"):
        FRONT_ENDS[front_end](recipe_of("prune"), tmp_path / "file" / "out", save_every=2)


def test_two_hundred_bad_steps_neither_zero_the_scale_nor_the_weights():
    def storm(scaler):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(201):
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            if step < 200:
                model.weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), bool(torch.isfinite(model.weight).all())

    assert storm(torch.amp.GradScaler("cpu")) == (0.0, False)
    scale, finite = storm(LossScaler("cpu", max_skips=1000))
    assert scale == 2.0**-14
    assert finite
    with pytest.raises(LossScaleError, match="50"):
        storm(LossScaler("cpu"))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_recipe_of_the_wrong_type_is_refused(front_end, tmp_path):
    import hf_eff
    import lightning_eff

    for wrong in (3, ["prune"], {"prune": 3}, {"prun": {"sparsity": 0.5}}):
        with pytest.raises(ConfigError):
            if front_end == "hf":
                hf_eff.attach(hf_trainer({}, tmp_path, plugin=False), wrong)
            else:
                lightning_eff.EffCallback(wrong)


def test_the_module_of_a_lightning_run_is_untouched_by_a_refusal(tmp_path):
    module = lightning_module()
    before = {name: type(child) for name, child in module.named_modules()}
    import pytorch_lightning as pl

    from lightning_eff import EffCallback

    callback = EffCallback({"prune": {"sparsity": 0.5, "end": 99}})
    trainer = pl.Trainer(
        max_steps=2, logger=False, enable_checkpointing=False, callbacks=[callback],
        default_root_dir=tmp_path, enable_progress_bar=False, accelerator="cpu", enable_model_summary=False,
    )  # fmt: skip
    from promise_table import train_examples
    from torch.utils.data import DataLoader

    with pytest.raises(ConfigError, match="end must lie within"):
        trainer.fit(module, DataLoader(train_examples(), batch_size=8))
    assert {name: type(child) for name, child in module.named_modules()} == before
    assert "training_step" not in vars(module)
