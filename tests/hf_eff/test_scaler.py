"""Loss scaling in place of the trainer's own scaler: gradients really scaled, clipped unscaled, skips told."""

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_eff import LossScaling, Pruning, attach
from shared_core.errors import CompatibilityError


class Watch(Trainer):
    """Notes what the backward pass leaves in the gradients, and what the optimizer gets."""

    overflows = False

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.overflows and self.state.global_step == 0:
            self.model.classifier.weight.grad[0, 0] = float("inf")
        self.__dict__.setdefault("raw", []).append(self.model.classifier.weight.grad.norm().item())
        self.__dict__.setdefault("dtypes", []).append(self.forward_dtype)
        return loss

    def create_optimizer(self, *args):
        self.model.classifier.register_forward_hook(self._note)
        return super().create_optimizer(*args)

    def _note(self, module, args, output):
        self.forward_dtype = output.dtype


class Overflowing(Watch):
    """Its first step overflows."""

    overflows = True


class Applied(TrainerCallback):
    def __init__(self):
        self.norms, self.rates = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norms.append(model.classifier.weight.grad.norm().item())

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])


def train(make, folder, recipe, trainer_class=Watch, **settings):
    applied = Applied()
    trainer = make.trainer(folder, trainer_class=trainer_class, callbacks=[applied], max_steps=3, **settings)
    session = attach(trainer, recipe) if recipe else None
    trainer.train()
    return trainer, applied, session


def test_fp16_on_cpu_is_really_scaled(make, tmp_path):
    trainer, applied, session = train(
        make, tmp_path, {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0}}, fp16=True, max_grad_norm=0.0
    )
    assert trainer.dtypes == [torch.float16] * 3
    assert trainer.raw[0] == pytest.approx(applied.norms[0] * 1024, rel=1e-3)
    assert any("autocast" in note for note in session.receipt()["notes"])
    assert trainer.accelerator.scaler is None
    assert trainer.accelerator.native_amp is False


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_scaling_by_a_power_of_two_changes_no_bit(make, tmp_path, optim, max_grad_norm):
    settings = {"optim": optim, "max_grad_norm": max_grad_norm}
    plain, plain_applied, _ = train(make, tmp_path / "plain", None, **settings)
    scaled, applied, _ = train(make, tmp_path / "scaled", {"loss_scale": {"kind": "dynamic"}}, **settings)
    assert scaled.raw[0] == pytest.approx(plain.raw[0] * 65536, rel=1e-6)
    assert applied.norms == plain_applied.norms  # clipped after unscaling
    for expected, found in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("fp16", [False, True])
def test_an_overflow_advances_nothing(make, tmp_path, optim, fp16):
    recipe = {
        "loss_scale": {"kind": "dynamic", "init_scale": 1024.0},
        "prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1},
    }
    trainer, applied, session = train(make, tmp_path, recipe, Overflowing, optim=optim, fp16=fp16, learning_rate=0.1)
    steps = session.receipt()["steps"]
    assert (steps["skipped"], steps["applied"]) == (1, 2)
    assert trainer.state.global_step == 3
    assert applied.rates[0] == 0.1  # the schedule waited


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_skips_of_torchs_own_scaler_are_seen(make, tmp_path, optim):
    applied = Applied()
    trainer = make.trainer(tmp_path, trainer_class=Overflowing, callbacks=[applied], max_steps=3, optim=optim)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = attach(trainer, {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}})
    trainer.train()
    steps = session.receipt()["steps"]
    assert (steps["skipped"], steps["applied"]) == (1, 2)
    hidden = [note for note in session.receipt()["notes"] if "hides skipped steps" in note]
    assert bool(hidden) == (optim == "adamw_torch_fused")


def test_bf16_is_refused(make, tmp_path):
    with pytest.raises(CompatibilityError, match="bf16"):
        make.trainer(tmp_path, bf16=True, callbacks=[LossScaling(kind="dynamic")])


def test_a_second_training_does_not_keep_the_first_ones_scaler(make, tmp_path):
    trainer = make.trainer(tmp_path, callbacks=[LossScaling(kind="dynamic"), Pruning(sparsity=0.5)])
    trainer.train()
    first = trainer.optimizer.scaler
    trainer.train()
    assert trainer.optimizer.scaler is not first
    session = trainer.callback_handler.callbacks[0].session
    assert session.receipt()["techniques"]["loss_scale"]["steps"] == 8


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_fp8_with_narrow_gradients_is_scaled_under_bf16_too(make, tmp_path, bf16, max_grad_norm):
    recipe = {
        "fp8": {"recipe": "tensorwise"},
        "loss_scale": {"kind": "dynamic", "init_scale": 1024.0, "format": "fp8_e5m2"},
    }
    trainer, applied, session = train(make, tmp_path, recipe, bf16=bf16, max_grad_norm=max_grad_norm)
    assert trainer.dtypes == [torch.bfloat16 if bf16 else torch.float32] * 3
    told = session.receipt()["techniques"]["loss_scale"]
    assert (told["steps"], told["skipped_steps"], told["format"]) == (3, 0, "fp8_e5m2")
    if max_grad_norm:
        assert max(applied.norms) <= 0.05 * (1 + 1e-5)
    else:
        assert trainer.raw[0] == pytest.approx(applied.norms[0] * 1024, rel=1e-6)
    assert trainer.accelerator.scaler is None


def test_an_overflow_under_bf16_advances_nothing(make, tmp_path):
    recipe = {"fp8": {"recipe": "delayed"}, "loss_scale": {"kind": "dynamic", "format": "fp8_e5m2"}}
    _, applied, session = train(make, tmp_path, recipe, Overflowing, bf16=True, learning_rate=0.1)
    assert (session.receipt()["steps"]["skipped"], session.receipt()["steps"]["applied"]) == (1, 2)
    assert applied.rates[0] == 0.1


def test_fp8_that_needs_a_scaler_is_refused_without_one(make, tmp_path):
    with pytest.raises(CompatibilityError, match="needs loss_scale"):
        attach(make.trainer(tmp_path), {"fp8": {"recipe": "hfp8"}})


def test_histograms_of_one_micro_batch_and_the_dtype_of_the_loss(make, tmp_path):
    recipe = {"loss_scale": {"kind": "static", "init_scale": 8.0, "histogram_every": 2}}
    trainer, _, session = train(make, tmp_path, recipe, gradient_accumulation_steps=2, fp16=True)
    told = session.receipt()["techniques"]["loss_scale"]
    assert (told["loss_dtype"], told["softmax_dtype"]) == ("float32", "float32")
    assert told["histograms"]["measured_step"] == 2
    classifier = told["histograms"]["activations"]["layers"]["classifier"]
    assert classifier["elements"] == 4 * 4  # rows of one micro-batch, classes
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert told["histograms"]["weights"]["elements"] == told["histograms"]["updates"]["elements"] == count
