import shutil

import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from packaging.version import Version
from safetensors.torch import load_file

from hf_eff import attach
from hf_eff._checkpoints import _is_replaced
from shared_core.errors import CheckpointError
from shared_core.files.journal import begin_list

PRUNE = {"prune": {"sparsity": 0.5, "begin": 1, "end": 7, "every": 2}}


@pytest.fixture
def stopped(make, tmp_path):
    """A pruned run that saved at steps 2 and 4 of 8."""
    trainer = make.trainer(tmp_path / "run", save_strategy="steps", save_steps=2)
    attach(trainer, PRUNE)
    trainer.train()
    for step in (6, 8):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")

    def fresh(recipe=None):
        trainer = make.trainer(tmp_path / "run", save_strategy="steps", save_steps=2)
        return trainer, attach(trainer, PRUNE if recipe is None else recipe)

    return tmp_path / "run", fresh


def _made_only(folder):
    (folder / ".eff-tmp-0-x").mkdir(parents=True)  # killed before its list was begun


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("begun", [begin_list, _made_only])
def test_a_checkpoint_that_was_being_written_needs_nobody_on_restart(stopped, begun, named):
    run, fresh = stopped
    if begun is _made_only:
        shutil.rmtree(run / "checkpoint-4")
    begun(run / "checkpoint-4")
    trainer, session = fresh()
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-4") if named else True)
    assert any("checkpoint-2 instead" in note for note in session.notes)
    for folder in run.glob("checkpoint-*"):
        shutil.rmtree(folder)
    begun(run / "checkpoint-2")  # its very first
    trainer, session = fresh()
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2") if named else True)
    assert trainer.state.global_step == session.step == 8
    assert any("the run starts at step 0" in note for note in session.notes)


@pytest.mark.parametrize("passed", [True, False])
def test_a_flag_to_resume_that_the_script_does_not_pass_on_is_reported(stopped, passed):
    run, fresh = stopped
    trainer, session = fresh()
    trainer.args.resume_from_checkpoint = str(run / "checkpoint-4")
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint if passed else None)
    told = [note for note in session.receipt()["notes"] if "--resume_from_checkpoint" in note]
    assert len(told) == (not passed)


def test_a_checkpoint_without_state_is_refused(make, tmp_path):
    plain = make.trainer(tmp_path, save_strategy="steps", save_steps=4)
    plain.train()
    trainer = make.trainer(tmp_path)
    attach(trainer, {"prune": {"sparsity": 0.5}})
    with pytest.raises(CheckpointError, match="eff_state"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("path", ["checkpoint-4", None])
def test_a_checkpoint_of_the_model_alone_is_gone_on_from_and_told(make, tmp_path, whole, path):
    trainer = make.trainer(tmp_path, save_strategy="steps", save_steps=4, save_only_model=not whole)
    attach(trainer, {"prune": {"sparsity": 0.5}})
    trainer.train()
    trainer = make.trainer(tmp_path)
    session = attach(trainer, {"prune": {"sparsity": 0.5}})
    trainer.train(resume_from_checkpoint=str(tmp_path / path) if path else True)
    told = [note for note in session.receipt()["notes"] if "save_only_model" in note]
    assert len(told) == (not whole)


def test_no_checkpoint_to_resume_from(make, tmp_path):
    trainer = make.trainer(tmp_path)
    attach(trainer, {"prune": {"sparsity": 0.5}})
    with pytest.raises(CheckpointError, match=r"^No valid checkpoint found in output directory.*to resume from"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match=r"^Can't find a valid checkpoint at bogus: .*no such folder"):
        trainer.train(resume_from_checkpoint="bogus")


@pytest.mark.parametrize("key", ["matmul", "average"])
def test_weights_that_are_in_other_files_now_are_gone_on_from(make, tmp_path, key):
    def trained(folder, resume=None):
        trainer = make.trainer(tmp_path / folder, save_strategy="steps", save_steps=4)
        options = {"matmul": {"precision": "high"}, "average": {"kind": "ema", "decay": 0.5}}
        attach(trainer, {key: options[key]})
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return trainer.model.state_dict()

    straight, checkpoint = trained("straight"), tmp_path / "straight" / "checkpoint-4"
    weights = load_file(checkpoint / "model.safetensors")
    save_torch_state_dict(weights, checkpoint, max_shard_size="4KB")  # removes the file of all
    shards = sorted(checkpoint.glob("model*.safetensors"))
    assert len(shards) > 1
    for name, value in trained("sharded", checkpoint).items():
        assert torch.equal(value, straight[name])
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=f"Can't find a valid checkpoint at .*{shards[0].name}"):
        trained("lacking", checkpoint)


def test_which_files_others_may_replace(tmp_path):
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert not any(_is_replaced(tmp_path, name) for name in names)
    (tmp_path / "pytorch_model.bin").touch()
    assert all(_is_replaced(tmp_path, name) for name in names)
    assert not any(_is_replaced(tmp_path, name) for name in ("optimizer.pt", "models.safetensors", "rng_state.pth"))


def test_training_again_starts_afresh_and_resume_works_after_the_end(make, tmp_path):
    trainer = make.trainer(tmp_path, save_strategy="steps", save_steps=4)
    session = attach(trainer, {**PRUNE, "loss_scale": {"kind": "dynamic"}})
    trainer.train()
    assert session.is_finished
    assert session.receipt()["steps"]["applied"] == 8
    trainer.train()
    assert session.receipt()["steps"]["applied"] == 8
    assert session.receipt()["techniques"]["loss_scale"]["steps"] == 8
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert session.receipt()["steps"]["applied"] == 8
    assert trainer.state.global_step == 8


def test_a_model_that_saves_under_other_names_goes_on_from_its_checkpoint(tmp_path, capsys):
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=4, patch_size=2, num_channels=1, num_labels=3, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    data = [{"pixel_values": torch.full((1, 4, 4), index / 8), "labels": index % 3} for index in range(8)]

    def build(folder):
        torch.manual_seed(len(folder))
        arguments = TrainingArguments(
            str(tmp_path / folder), max_steps=4, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(ViTForImageClassification(config), arguments, train_dataset=data)
        attach(trainer, {"qat": {"scheme": "int8"}, "soup": {"kind": "uniform"}})
        return trainer

    straight, stopped = build("straight"), build("stopped ")
    straight.train()
    saved = load_file(tmp_path / "straight" / "checkpoint-2" / "model.safetensors")
    if Version(transformers.__version__) >= Version("5.8"):
        assert not set(straight.model.state_dict()) <= set(saved)
    shutil.copytree(tmp_path / "straight" / "checkpoint-2", tmp_path / "stopped " / "checkpoint-2")
    stopped.train(resume_from_checkpoint=True)
    is_renamed = not set(straight.model.state_dict()) <= set(saved)
    assert ("missing and unexpected keys" in capsys.readouterr().out) == is_renamed
    assert all(map(torch.equal, straight.model.state_dict().values(), stopped.model.state_dict().values()))
