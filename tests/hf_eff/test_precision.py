"""Precision in the Hugging Face Trainer: models in 16 bit updated in float32, and loss scaling."""

import json

import promise_drivers
import pytest
import torch
from promise_drivers import run_hf, saved_state
from promise_table import make_net
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_eff import LossScaling, Pruning, attach
from hf_eff.callbacks import PrimaryWeights
from shared_core.engine.saving.state_file import load_state
from shared_core.errors import CompatibilityError, MatchError
from shared_core.primary_weights import optimizer_swap, technique

SETTINGS = {
    "save_strategy": "steps",
    "save_steps": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
SCALED = {"loss_scale": {"kind": "dynamic", "init_scale": 2.0**24, "growth_interval": 2}}


def build(make, folder, dtype, recipe, **settings):
    model = make.classifier().to(dtype)
    trainer = make.trainer(folder, model=model, data=make.examples(10), **{**SETTINGS, **settings})
    return trainer, attach(trainer, recipe)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
@pytest.mark.parametrize(
    ("dtype", "kind", "more", "settings"),
    [
        (torch.bfloat16, "fp32_copy", {}, {}),
        (torch.bfloat16, "stochastic_rounding", {"prune": {"sparsity": 0.5, "begin": 1, "end": 7, "every": 2}}, {}),
        (torch.bfloat16, "kahan", {}, {}),
        (torch.bfloat16, "fp32_copy", {}, {"bf16": True}),
        (torch.float16, "fp32_copy", SCALED, {"fp16": True}),
    ],
    ids=["copy", "drawn+prune", "kahan", "autocast", "fp16+scale"],
)
def test_resume_is_exact(tmp_path, optim, dtype, kind, more, settings, monkeypatch):
    monkeypatch.setattr(promise_drivers, "make_net", lambda *args, **options: make_net(*args, **options).to(dtype))
    recipe = {"primary_weights": {"kind": kind, "telemetry_every": 2}, **more}
    options = {"optim": optim, "accumulate": 2, **settings}
    whole = promise_drivers.assert_resumes(run_hf, lambda: recipe, tmp_path, (2, 5), **options)
    assert {value.dtype for value in whole.weights.values() if value.is_floating_point()} == {dtype}
    state = saved_state(whole.checkpoints[8])
    moments = [value for one in state["optimizer.pt"]["state"].values() for value in one.values()]
    assert {value.dtype for value in moments if torch.is_tensor(value)} == {torch.float32}
    assert bool(state["eff"]["techniques"]["primary_weights"]["copies"]) == (kind != "stochastic_rounding")
    assert {value.dtype for value in state["model"].values() if value.is_floating_point()} == {dtype}
    assert whole.receipt["steps"]["applied"] + whole.receipt["steps"]["skipped"] == 8
    assert (whole.receipt["steps"]["skipped"] > 0) == (more is SCALED)


@pytest.mark.slow
def test_a_small_learning_rate_needs_the_copy(make, tmp_path):
    """AdamW moves a weight by 1e-5 a step: half an ulp of bf16 is 6e-5 where weights are 0.02."""
    moved = {}
    for name, recipe in {
        "without": {},
        "copy": {"primary_weights": {"kind": "fp32_copy", "telemetry_every": 1}},
        "drawn": {"primary_weights": {"kind": "stochastic_rounding"}},
    }.items():
        settings = {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "optim": "adamw_torch", "max_steps": 20}
        trainer, session = build(make, tmp_path / name, torch.bfloat16, recipe, **settings, save_steps=100)
        start = make.classifier().to(torch.bfloat16).classifier.weight
        trainer.train()
        moved[name] = (trainer.model.classifier.weight != start).float().mean().item()
        if name == "copy":
            assert session.receipt()["techniques"]["primary_weights"]["small_updates"] > 0.5
    assert moved["without"] < 0.3
    assert min(moved["copy"], moved["drawn"]) > 0.5


def test_the_norm_and_the_clipped_gradients_are_those_that_step(make, tmp_path):
    runs = []
    for clip in (1e-3, 1e9):
        trainer = make.trainer(
            tmp_path / str(clip), model=make.classifier().to(torch.bfloat16), data=make.examples(10),
            callbacks=[PrimaryWeights(kind="fp32_copy")], optim="sgd", max_grad_norm=clip, max_steps=1,
            learning_rate=1.0, lr_scheduler_type="constant", save_strategy="steps", save_steps=1,
        )  # fmt: skip
        before = [p.detach().float() for p in trainer.model.parameters()]
        trainer.train()
        copies = load_state(tmp_path / str(clip) / "checkpoint-1")["techniques"]["primary_weights"]["copies"]
        moved = [copies[name] - old for (name, _), old in zip(trainer.model.named_parameters(), before, strict=True)]
        runs.append(torch.cat([move.flatten() for move in moved]).norm().item())
    assert runs[0] == pytest.approx(1e-3, rel=1e-2)
    assert runs[1] > 0.1


def test_a_float32_model_is_refused_before_training(make, tmp_path):
    trainer = make.trainer(tmp_path, model=nn.Sequential(make.classifier())[0])
    with pytest.raises(MatchError, match="float16 or bfloat16"):
        attach(trainer, {"primary_weights": {"kind": "fp32_copy"}})


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])
def test_stochastic_rounding_widens_one_parameter_at_a_time(make, tmp_path, optim, monkeypatch):
    monkeypatch.setattr(optimizer_swap, "_ON_CPU", 1)
    recipe = {"primary_weights": {"kind": "stochastic_rounding"}}
    trainer, _ = build(make, tmp_path / "sliced", torch.bfloat16, recipe, optim=optim)
    trainer.train()
    told = load_receipt(tmp_path / "sliced")
    largest = 4 * max(parameter.numel() for parameter in trainer.model.parameters())
    assert told["widened_bytes_at_once"] == (largest if optim == "adafactor" else 4 * 64)  # or rows of it
    monkeypatch.setattr(technique, "updates_each_by_itself", lambda optimizer: False)
    whole, _ = build(make, tmp_path / "whole", torch.bfloat16, recipe, optim=optim)
    whole.train()
    assert load_receipt(tmp_path / "whole")["widened_bytes_at_once"] == 4 * told["elements"]
    for one, other in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def load_receipt(folder):
    return json.loads((folder / "eff_receipt.json").read_text())["techniques"]["primary_weights"]


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
