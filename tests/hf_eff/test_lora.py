"""Adapters in the Hugging Face Trainer, alone and over a base that qat quantises: exact resume, plain checkpoints."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_eff import attach
from hf_eff.callbacks import Lora, QuantizationAwareTraining
from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.engine.saving.state_file import load_state
from shared_core.engine.session import Session
from shared_core.errors import CompatibilityError
from shared_core.lora import LoraConfig
from shared_core.lora.quantized_base import on_grid
from shared_core.quantization import apply_ranges

SAVED = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}


def build(make, folder, callbacks=None, **settings):
    options = {"rank": 2, "dropout": 0.2}
    return make.trainer(folder, callbacks=callbacks or [Lora(**{"base": "nf4", "save": "merged", **options})], **SAVED, **settings)


def test_every_save_is_the_plain_model_and_the_last_one_is_the_trained_one(make, tmp_path):
    trainer = build(make, tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    plain = make.classifier()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-2", "checkpoint-8", "final"):
        plain.load_state_dict(load_file(tmp_path / folder / "model.safetensors"), strict=True)
    assert type(trainer.model.bert.encoder.layer[0].attention.self.query) is nn.Linear
    again = type(plain).from_pretrained(tmp_path / "final")
    trained = trainer.model.state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, trained[name])
        frozen = ("embeddings" in name or "LayerNorm" in name or name.endswith("bias")) and "classifier" not in name
        assert torch.equal(value, before[name]) == frozen, name
    moved = trained["bert.pooler.dense.weight"] - on_grid(before["bert.pooler.dense.weight"], LoraConfig(rank=2, base="nf4"))
    assert int((torch.linalg.svdvals(moved) > 1e-5).sum()) == 2  # what was learned has the adapters' rank


def test_saving_in_the_middle_bakes(make, tmp_path):
    trainer = make.trainer(tmp_path, max_steps=2)
    session = attach(trainer, {"lora": {"rank": 2, "base": "int8", "save": "merged", "requantize": True}})
    trainer.create_optimizer()
    trainer.save_model(str(tmp_path / "now"))
    saved = load_file(tmp_path / "now" / "model.safetensors")
    assert saved.keys() == make.classifier().state_dict().keys()
    assert session.is_attached
    trainer.train()
    assert type(trainer.model.classifier) is nn.Linear


def test_a_language_model_with_gradient_checkpointing(make, tmp_path):
    callback = Lora(rank=4, base="nf4", save="merged")
    trainer = make.trainer(
        tmp_path, model=make.language_model(), data=make.texts(), callbacks=[callback], gradient_checkpointing=True
    )
    frozen = trainer.model.model.embed_tokens.weight.detach().clone()
    head = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    told = callback.session.receipt()["techniques"]["lora"]
    assert told["layers"] == 2 * 7
    assert told["trained_whole"] == []
    assert "output layer" in told["left_out"]["lm_head"]
    assert torch.equal(trainer.model.model.embed_tokens.weight, frozen)
    assert torch.equal(trainer.model.lm_head.weight, head)
    assert all(entry["adapter_size"] > 0 for entry in told["per_layer"])


def test_layers_that_a_class_wants_in_float32_keep_it(make, tmp_path):
    config = T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    callback = Lora(rank=2)
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in make.texts()]
    make.trainer(
        tmp_path, model=T5ForConditionalGeneration(config), data=data, callbacks=[callback], max_steps=1
    ).train()
    left_out = callback.session.receipt()["techniques"]["lora"]["left_out"]
    assert "wants it in float32" in left_out["encoder.block.0.layer.1.DenseReluDense.wo"]


def test_layers_whose_weights_are_read_past_their_forward_are_left_out(make, tmp_path):
    config = MambaConfig(vocab_size=24, hidden_size=16, state_size=4, num_hidden_layers=1)
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in make.texts()]
    callback = Lora(rank=2, base="none")
    make.trainer(tmp_path, model=MambaForCausalLM(config), data=data, callbacks=[callback], max_steps=2).train()
    told = callback.session.receipt()["techniques"]["lora"]
    assert [(layer["name"], layer["adapter_size"] > 0) for layer in told["per_layer"]] == [
        ("backbone.layers.0.mixer.in_proj", True)
    ]
    for name in ("x_proj", "dt_proj", "out_proj"):
        assert "MambaMixer computes with its weight itself" in told["left_out"][f"backbone.layers.0.mixer.{name}"]


def test_dense_layers_beside_experts_are_adapted_under_their_own_names(make, tmp_path):
    config = DeepseekV3Config(
        vocab_size=24, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, n_group=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    names = list(model.state_dict())
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in make.texts()]
    callback = Lora(rank=2, base="none")
    make.trainer(tmp_path, model=model, data=data, callbacks=[callback], max_steps=2).train()
    adapted = {
        layer["name"]: layer["adapter_size"] for layer in callback.session.receipt()["techniques"]["lora"]["per_layer"]
    }
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.down_proj"):
        assert adapted[name] > 0
    assert list(model.state_dict()) == names
    assert model.config is config


def test_what_peft_alone_refuses_is_told_with_the_flag(make):
    model = nn.Sequential()
    model.out_proj, model.head = nn.Linear(4, 4), nn.Linear(4, 4)
    model.config = MambaConfig()
    with pytest.raises(CompatibilityError, match=r"out_proj.*--lora_skip"):
        Session({"lora": {"rank": 2, "base": "none"}}).attach(model)
    assert type(model.out_proj) is nn.Linear


def test_an_optimizer_made_before_the_adapters_is_refused(make, tmp_path):
    model = make.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make.trainer(tmp_path, model=model, callbacks=[Lora(rank=2)])
    trainer.optimizer = optimizer
    with pytest.raises(CompatibilityError, match="optimizer must hold the adapters"):
        trainer.train()
    assert type(model.classifier) is nn.Linear
    assert type(model.bert.pooler.dense) is nn.Linear


peft = pytest.importorskip("peft")

QAT = {"scheme": "int8", "begin": 1}


def wrapped(make):
    model = make.classifier()
    with torch.random.fork_rng():
        torch.manual_seed(4)
        options = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"], "r": 2, "lora_dropout": 0.1}
        return peft.get_peft_model(model, peft.LoraConfig(**options))


def states_are_equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(states_are_equal(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(states_are_equal, first, second))
    return first == second


@pytest.mark.slow
@pytest.mark.parametrize("qat", [QAT, {**QAT, "range": "lsq"}])
def test_a_peft_model_resumes_exactly(make, tmp_path, qat):
    def build(folder):
        return make.trainer(folder, model=wrapped(make), callbacks=[QuantizationAwareTraining(**qat)], **SAVED)

    straight = build(tmp_path / "straight")
    straight.train()
    shutil.copytree(tmp_path / "straight" / "checkpoint-4", tmp_path / "stopped" / "checkpoint-4")
    stopped = build(tmp_path / "stopped")
    stopped.train(resume_from_checkpoint=True)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, stopped.model.state_dict()[name]), name
    last = [load_state(tmp_path / run / "checkpoint-8")["techniques"]["qat"] for run in ("straight", "stopped")]
    assert states_are_equal(*last)


def test_what_a_peft_model_saves_loads_in_peft_over_the_rounded_base(make, tmp_path):
    callback = QuantizationAwareTraining(**QAT)
    trainer = make.trainer(tmp_path, model=wrapped(make), callbacks=[callback])
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    assert {"adapter_model.safetensors", "eff_deployment.json"} <= {p.name for p in (tmp_path / "adapters").iterdir()}
    assert {value.dtype for value in load_file(tmp_path / "adapters" / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    batch = {key: torch.stack([row[key] for row in make.examples(6)]) for key in ("input_ids", "attention_mask")}
    trained = apply_ranges(copy.deepcopy(trainer.model).eval(), callback.session.deployment()["qat"]["ranges"])
    with torch.no_grad():
        wanted = trained(**batch).logits
    base = make.classifier()
    base.load_state_dict(trainer.model.unload().state_dict(), strict=True)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    ranged = apply_ranges(again.eval(), read_deployment(tmp_path / "adapters")["qat"]["ranges"])
    with torch.no_grad():
        torch.testing.assert_close(ranged(**batch).logits, wanted, atol=0, rtol=0)
    told = callback.session.receipt()["techniques"]["qat"]
    assert sum("LoRA adapter" in reason for reason in told["left_out"].values()) == 2 * 2 * 2
    assert told["without_range"] == []


def test_callbacks_of_both_end_in_a_plain_model_on_qats_grid(make, tmp_path):
    callbacks = [QuantizationAwareTraining(**QAT), Lora(rank=2, save="merged")]
    trainer = make.trainer(tmp_path, callbacks=callbacks, **SAVED)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    plain = make.classifier()
    for folder in ("checkpoint-2", "final"):
        plain.load_state_dict(load_file(tmp_path / folder / "model.safetensors"), strict=True)
    query = plain.bert.encoder.layer[0].attention.self.query
    assert type(query) is nn.Linear
    codes = query.weight / (query.weight.abs().amax(1, keepdim=True) / 127)
    torch.testing.assert_close(codes, codes.round(), atol=1e-3, rtol=0)
    told = callbacks[0].session.receipt()["techniques"]
    assert told["lora"]["layers"] == 2 * 6 + 1
    assert all(entry["requantized_error"] < 0.02 for entry in told["lora"]["per_layer"])
    names = {entry["name"] for entry in told["qat"]["per_layer"]}
    assert {"bert.encoder.layer.0.attention.self.query", "classifier"} <= names
    assert set(read_deployment(tmp_path / "final")["qat"]["ranges"]) <= names
