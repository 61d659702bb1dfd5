"""Models that were released in few bits train in their own formats, with their own scales."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from released_models import load_released, tokens, write_released
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl_trainers import tokenizer

from hf_eff import attach
from shared_core import Recipe, Session
from shared_core.errors import CompatibilityError
from shared_core.tools.export import export_released

ROWS = [{"input_ids": row, "labels": row} for seed in range(4) for row in tokens(seed)["input_ids"]]
EXACT = {
    "gpt_oss": (torch.float32, torch.bfloat16),  # products of powers of two
    **dict.fromkeys(
        ("qwen3_moe_fp8", "deepseek_v3_fp8", "kimi_int4", "nemotron_nvfp4", "llama_fp8", "llama_int8"),
        (torch.bfloat16,),
    ),
    **dict.fromkeys(("llama_gptq", "llama_awq"), (torch.float32, torch.bfloat16)),
}


def trainer_of(model, folder, rate, steps=2, resume=None, **qat):
    options = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=rate, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="steps", save_steps=1, logging_steps=1, seed=0,
    )  # fmt: skip
    trainer = Trainer(model=model, args=options, train_dataset=ROWS)
    session = attach(trainer, Recipe.from_dict({"qat": {"scheme": "released", **qat}}))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer, session.receipt().values["techniques"]["qat"]


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind, dtypes in EXACT.items() for dtype in dtypes])
def test_steps_at_rate_0_leave_every_weight_as_it_was_loaded(kind, dtype, tmp_path):
    source = write_released(kind, tmp_path / "released")
    model = load_released(source, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer, receipt = trainer_of(model, tmp_path / "run", 0.0)
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    for found in (model.state_dict(), again.state_dict()):
        assert found.keys() == before.keys()
        changed = [name for name, value in found.items() if not torch.equal(value, before[name])]
        assert not changed
    assert receipt["kept_scales"]["from"] == str(source)
    assert receipt["kept_scales"]["layers"] == receipt["layers"] > 0
    assert receipt["kept_scales"]["clipped"] == 0


def test_layers_to_skip_stay_in_float(tmp_path):
    source = write_released("nemotron_nvfp4", tmp_path / "released")
    session = Session({"qat": {"scheme": "released", "skip": ["*layers.1.*"], "begin": 1}})
    session.attach(load_released(source))
    technique = session.techniques["qat"]
    assert {name.split(".")[2] for name in technique.layers} == {"0"}
    assert {str(scheme) for scheme in technique.schemes.values()} == {"nvfp4 weights and nvfp4 inputs"}
    assert any("layers.1" in note and "train in float" in note for note in session.notes)


@pytest.mark.parametrize(
    ("kind", "alpha", "is_told"),
    [("gpt_oss", None, True), ("gpt_oss", 0.5, False), ("nemotron_nvfp4", None, False)],  # NVFP4 also rounds inputs
)
def test_a_student_that_starts_equal_to_its_teacher_is_told(kind, alpha, is_told, tmp_path):
    recipe = {"qat": {"scheme": "released"}, "distill": {"teacher": "self", "alpha": alpha}}
    session = Session(recipe)
    session.attach(load_released(write_released(kind, tmp_path / "released"), torch.bfloat16))
    assert any("equal to teacher" in note for note in session.notes) == is_told


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "nemotron_nvfp4", "llama_awq"])
def test_a_resumed_run_is_bit_for_bit_the_same(kind, tmp_path):
    source = write_released(kind, tmp_path / "released")
    whole, _ = trainer_of(load_released(source), tmp_path / "whole", 1e-3, steps=3)
    again, _ = trainer_of(
        load_released(source), tmp_path / "again", 1e-3, steps=3, resume=tmp_path / "whole" / "checkpoint-1"
    )
    expected = whole.model.state_dict()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_released_layers_of_a_model_inside_another_are_found(tmp_path):
    class Around(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

    around = Around(load_released(write_released("llama_int8", tmp_path / "released")))
    session = Session({"qat": {"scheme": "released"}})
    session.attach(around)
    layers = session.techniques["qat"].layers
    assert all(name.startswith("model.model.layers.") for name in layers)
    assert {name.rpartition(".")[2] for name in layers} >= {"q_proj", "down_proj"}
    assert {own.input for own in session.techniques["qat"].schemes.values()} == {"token"}


def test_weights_in_another_dtype_than_the_model_are_refused(tmp_path):
    model = load_released(write_released("qwen3_moe_fp8", tmp_path / "released"), torch.float32)
    if model.lm_head.weight.dtype == model.model.layers[0].self_attn.q_proj.weight.dtype:
        model.model.layers[0].self_attn.q_proj.bfloat16()
    with pytest.raises(CompatibilityError, match="dtype"):
        Session({"qat": {"scheme": "released"}}).attach(model)


@pytest.mark.parametrize("kind", ["gpt_oss", "kimi_int4", "nemotron_nvfp4", "qwen3_moe_fp8", "llama_gptq_asym"])
def test_init_takes_a_released_folder(kind, tmp_path):
    source = write_released(kind, tmp_path / "released")
    model = load_released(source, torch.bfloat16)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for value in model.parameters():
        torch.nn.init.zeros_(value)
    session = Session({"qat": {"init": str(source)}})
    session.attach(model)
    for name, value in session.techniques["qat"].bake(model.state_dict()).items():
        assert torch.equal(value, expected[name]), name


def words(seed):
    return " ".join(str(token) for token in (tokens(seed)["input_ids"][0, :5] % 24).tolist())


def preference_trainer(name, model, folder, **settings):
    """Return TRL's trainer of this name: pairs for DPO, prompts and a reward of the tokens for GRPO."""
    kind, config = {"DPO": (DPOTrainer, DPOConfig), "GRPO": (GRPOTrainer, GRPOConfig)}[name]
    columns = ("prompt", "chosen", "rejected") if name == "DPO" else ("prompt",)
    rows = Dataset.from_dict({column: [words(8 * at + row) for row in range(8)] for at, column in enumerate(columns)})
    own, more = {}, {}
    if name == "GRPO":
        own = {"reward_funcs": lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids]}
        more = {"num_generations": 2, "max_completion_length": 4}
    arguments = config(
        str(folder), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", bf16=False, gradient_checkpointing=False, **more, **settings,
    )  # fmt: skip
    return kind(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer(), **own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_rewards_train_the_released_format_and_rollouts_come_from_rounded_weights(name, tmp_path):
    source = write_released("gpt_oss", tmp_path / "released")
    model, plain = (load_released(source, torch.bfloat16) for _ in range(2))
    rollouts = []
    trainer = preference_trainer(name, model, tmp_path / "run")
    session = attach(trainer, {"qat": {"scheme": "released"}})

    def compare(module, args, given, output):
        if torch.is_grad_enabled() or given["input_ids"].shape[1] == 1 or name == "DPO":
            return
        taken = {key: given[key] for key in ("input_ids", "attention_mask", "position_ids") if key in given}
        gaps = []
        for weights in (session.techniques["qat"].bake(module.state_dict()), module.state_dict()):
            plain.load_state_dict(weights)
            gaps.append((plain.eval()(**taken).logits[:, -1] - output.logits[:, -1]).abs().max().item())
        rollouts.append(gaps)

    model.register_forward_hook(compare, with_kwargs=True)
    trainer.train()
    if name == "GRPO":
        assert len(rollouts) >= 2
        # the latent weights have left the grid by the last rollout
        assert max(rounded for rounded, _ in rollouts) < 1e-3 < rollouts[-1][1]
    report = export_released(model, tmp_path / "out", base=source)
    assert (report.changed_scales, report.rounding_error) == (0, {})
    assert report.changed_codes > 0
    with torch.no_grad():
        expected = model.eval()(**tokens(9)).logits
        assert torch.equal(load_released(tmp_path / "out", torch.bfloat16).eval()(**tokens(9)).logits, expected)


@pytest.mark.parametrize("recipe", [{"qat": {"scheme": "released"}}, {"lora": {"rank": 2, "save": "merged"}}])
def test_rollouts_by_an_engine_that_would_get_other_weights_are_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", lambda **_: SimpleNamespace(sync_weights=pytest.fail))
    model = load_released(write_released("gpt_oss", tmp_path / "released"), torch.bfloat16)
    trainer = preference_trainer("GRPO", model, tmp_path / "run", use_vllm=True, vllm_mode="colocate")
    with pytest.raises(CompatibilityError, match="rollouts by vLLM"):
        attach(trainer, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe_fp8"])
def test_stacked_experts_come_back_whatever_multiplies_them(kind, way, tmp_path):
    source = write_released(kind, tmp_path / "released")
    model = load_released(source, torch.bfloat16)
    model.set_experts_implementation(way)
    trainer_of(model, tmp_path / "run", 1e-2)
    report = export_released(model, tmp_path / "out", base=source)
    assert (report.changed_scales, report.rounding_error) == (0, {})
    again = load_released(tmp_path / "out", torch.bfloat16)
    again.set_experts_implementation(way)
    with torch.no_grad():
        assert torch.equal(again.eval()(**tokens(9)).logits, model.eval()(**tokens(9)).logits)
