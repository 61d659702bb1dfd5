"""Adapters in the Hugging Face Trainer, alone and over a base that qat quantizes: exact resume, plain checkpoints."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_eff import attach
from hf_eff.callbacks import Lora, Pruning, QuantizationAwareTraining
from shared_core import Session
from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.cli.loading import load_folder
from shared_core.engine.saving.state_file import load_state
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, ReceiptError
from shared_core.lora import LoraConfig
from shared_core.lora.quantized_base import on_grid
from shared_core.quantization import apply_ranges

SAVED = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}


def build(make, folder, callbacks=None, **settings):
    options = {"rank": 2, "dropout": 0.2}
    return make.trainer(
        folder, callbacks=callbacks or [Lora(**{"base": "nf4", "save": "merged", **options})], **SAVED, **settings
    )


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
    moved = trained["bert.pooler.dense.weight"] - on_grid(
        before["bert.pooler.dense.weight"], LoraConfig(rank=2, base="nf4")
    )
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
    callback = Lora(rank=2, base="nf4")
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in make.texts()]
    make.trainer(
        tmp_path, model=T5ForConditionalGeneration(config), data=data, callbacks=[callback], max_steps=1
    ).train()
    left_out = callback.session.receipt()["techniques"]["lora"]["left_out"]
    assert "needs it in float32" in left_out["encoder.block.0.layer.1.DenseReluDense.wo"]


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
    callback = Lora(rank=2, save="merged")
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
    with pytest.raises(CompatibilityError, match=r"optimizer .* adapters"):
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
    trained = apply_ranges(copy.deepcopy(trainer.model).eval(), callback.session.files.deployment()["qat"]["ranges"])
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


def based(make, tmp_path):
    """Save a base model with two labels, once, and return a classifier of four on it."""
    folder = tmp_path / "base"
    if not folder.exists():
        make.classifier(num_labels=2).save_pretrained(folder)
    return lambda: type(make.classifier()).from_pretrained(folder, num_labels=4, ignore_mismatched_sizes=True)


def logits(make, model):
    batch = {key: torch.stack([row[key] for row in make.examples(6)]) for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("options", [{}, {"include": ["*.query", "*.value"]}, {"train": ["none"], "include": ["last"]}])
def test_adapters_load_in_stock_peft_and_transformers(make, tmp_path, options):
    load = based(make, tmp_path)
    trainer = make.trainer(tmp_path / "run", model=load(), callbacks=[Lora(rank=4, alpha=6.0, **options)], **SAVED)
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "run"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob("**/model.safetensors"))
    wanted, untrained = logits(make, trainer.model), load()
    untrained.load_state_dict(start)  # the drawn head, where it is not trained whole
    stock = peft.PeftModel.from_pretrained(untrained, folder)
    torch.testing.assert_close(logits(make, stock), wanted, atol=1e-6, rtol=1e-5)
    if not options.get("train"):
        again = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=4, ignore_mismatched_sizes=True)
        torch.testing.assert_close(logits(make, again), wanted, atol=1e-6, rtol=1e-5)
        merged = load_folder(folder, "eff export")
        torch.testing.assert_close(logits(make, merged), wanted, atol=1e-6, rtol=1e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_adapters_on_codes_merge_on_the_same_codes(make, tmp_path):
    load = based(make, tmp_path)
    trainer = make.trainer(tmp_path / "run", model=load(), callbacks=[Lora(rank=2, base="nf4")], max_steps=3)
    trainer.train()
    trainer.save_model()
    merged = load_folder(tmp_path / "run", "eff export")
    torch.testing.assert_close(logits(make, merged), logits(make, trainer.model), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("base", ["none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_run_resumes_exactly_from_adapters_alone(make, tmp_path, base):
    load = based(make, tmp_path)

    def build(name):
        return make.trainer(tmp_path / name, model=load(), callbacks=[Lora(rank=2, dropout=0.2, base=base)], **SAVED)

    whole = build("whole")
    whole.train()
    saved = tmp_path / "whole" / "checkpoint-4"
    assert sum(file.stat().st_size for file in saved.glob("*.safetensors")) < 120_000
    torch.testing.assert_close(
        *[logits(make, peft.PeftModel.from_pretrained(load(), saved)) for _ in range(2)], atol=0, rtol=0
    )
    shutil.copytree(saved, tmp_path / "again" / saved.name)
    again = build("again")
    again.train(resume_from_checkpoint=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    shutil.copytree(saved, tmp_path / "other" / saved.name)
    other = build("other")
    other.model.bert.embeddings.word_embeddings.weight.data[1, 2] += 1e-3
    with pytest.raises(CheckpointError, match="word_embeddings"):
        other.train(resume_from_checkpoint=True)
    shutil.copytree(saved, tmp_path / "plain" / saved.name)
    plain = make.trainer(tmp_path / "plain", model=load(), callbacks=[Pruning(sparsity=0.5)], **SAVED)
    with pytest.raises(CheckpointError, match="adapters"):
        plain.train(resume_from_checkpoint=True)


def test_the_best_adapters_are_loaded_at_the_end(make, tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "eval_strategy": "steps"}
    trainer = make.trainer(
        tmp_path, callbacks=[Lora(rank=2)], **SAVED, **options, eval_steps=SAVED["save_steps"], learning_rate=0.3
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    best = Path(trainer.state.best_model_checkpoint)
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (best, tmp_path / "final"))
    assert states_are_equal(first, second)


def test_files_that_are_not_what_was_trained_are_found(make, tmp_path):
    callback = Lora(rank=2)
    trainer = make.trainer(tmp_path, callbacks=[callback], max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    config = tmp_path / "final" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 32', '"lora_alpha": 16'))
    with pytest.raises(ReceiptError, match="its factor is 8"):
        callback.session.files.verify_part(tmp_path / "final")
    trainer.model.classifier.weight.data.add_(1.0)
    with pytest.raises(ReceiptError, match="it differs from the end of training"):
        trainer.save_model(str(tmp_path / "later"))


def test_buffers_that_training_moves_are_in_the_files(make, tmp_path):
    def build():
        torch.manual_seed(3)
        return Normed()

    trainer = make.trainer(tmp_path, model=build(), data=Normed.data(), callbacks=[Lora(rank=2)], max_steps=3)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    stock = peft.PeftModel.from_pretrained(build(), tmp_path / "final").eval()
    x = torch.stack([row["x"] for row in Normed.data()])
    with torch.no_grad():
        torch.testing.assert_close(stock(x=x)["logits"], trainer.model.eval()(x=x)["logits"], atol=1e-6, rtol=1e-5)


class Normed(nn.Module):
    """A model of one's own, with running statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    @staticmethod
    def data():
        generator = torch.Generator().manual_seed(1)
        return [{"x": torch.randn(6, generator=generator) + 2, "labels": torch.tensor(i % 3)} for i in range(16)]

    def forward(self, x, labels=None):
        logits = self.head(torch.relu(self.norm(self.first(x))))
        found = {"logits": logits}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ({"lora": {"rank": 2}, "qat": {"scheme": "int8"}}, "--lora_save merged"),
        ({"lora": {"rank": 2}, "soup": {"kind": "uniform"}}, "--lora_save merged"),
        ({"lora": {"rank": 2, "base": "nf4", "requantize": True}}, "requantize .*merged"),
    ],
)
def test_what_files_of_adapters_cannot_hold_is_refused(make, tmp_path, recipe, match):
    with pytest.raises((CompatibilityError, ConfigError), match=match):
        attach(make.trainer(tmp_path, save_strategy="epoch"), recipe)


def test_an_adapter_folder_without_a_base_is_refused_with_what_to_do(make, tmp_path):
    trainer = make.trainer(tmp_path, callbacks=[Lora(rank=2)], max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    with pytest.raises(CheckpointError, match=r"base_model_name_or_path.*merge_and_unload"):
        load_folder(tmp_path / "final", "eff export")
