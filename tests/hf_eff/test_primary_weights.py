"""Models loaded in 16 bit in the Hugging Face Trainer, updated in float32."""

import json

import promise_drivers
import pytest
import torch
from promise_drivers import run_hf, saved_state
from promise_table import make_net
from torch import nn

from hf_eff import attach
from hf_eff.callbacks import PrimaryWeights
from shared_core.engine.state_file import load_state
from shared_core.errors import MatchError
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
    with pytest.raises(MatchError, match="must be loaded in 16 bit"):
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
