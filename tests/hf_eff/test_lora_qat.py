"""Adapters over a base that qat quantises, in the Hugging Face Trainer: peft's own model, and the lora technique."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_eff.callbacks import Lora, QuantizationAwareTraining
from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.engine.state_file import load_state
from shared_core.quantization import apply_ranges

peft = pytest.importorskip("peft")
SAVED = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
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
    callbacks = [QuantizationAwareTraining(**QAT), Lora(rank=2, base="none")]
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
