"""A model that was released in few bits trains in its format and comes back in it, whoever trains it."""

import pytest
import pytorch_lightning as pl
import torch
from released_models import load_released, tensors_of, tokens, write_released
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl_trainers import rows_of, tokenizer

from hf_eff import attach
from lightning_eff import EffCallback
from shared_core.tools.export import export_released

KINDS = (
    "gpt_oss", "deepseek_v3_fp8", "qwen3_moe_fp8", "kimi_int4", "nemotron_nvfp4", "llama_fp8", "llama_int8",
    "llama_int4_asym", "llama_mxfp4", "llama_mxfp8", "llama_gptq", "llama_gptq8", "llama_gptq_asym", "llama_awq",
)  # fmt: skip
QAT = {"qat": {"scheme": "released"}}
QAD = QAT | {"distill": {"teacher": "self", "alpha": 0.5}}
ROWS = [{"input_ids": row % 24, "labels": row % 24} for seed in range(4) for row in tokens(seed)["input_ids"]]


class Module(pl.LightningModule):
    def __init__(self, model, rate):
        super().__init__()
        self.model, self.rate = model, rate

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, _):
        return self(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.0)


def train(way, model, recipe, rate, steps, folder):
    if way == "lightning":
        trainer = pl.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            callbacks=[EffCallback(recipe)], default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Module(model, rate), DataLoader(ROWS, batch_size=4))
        return
    kind, more = (SFTConfig, {"max_length": None}) if way == "sft" else (TrainingArguments, {})
    arguments = kind(
        str(folder), max_steps=steps, learning_rate=rate, per_device_train_batch_size=4, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False, gradient_checkpointing=False, **more,
    )  # fmt: skip
    if way == "sft":
        trainer = SFTTrainer(model, arguments, train_dataset=rows_of(ROWS), processing_class=tokenizer())
    else:
        trainer = Trainer(model, arguments, train_dataset=ROWS)
    attach(trainer, recipe)
    trainer.train()


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("gpt_oss", "sft"),
        *(pytest.param(kind, "trainer", marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, "lightning", marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, "sft", marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_the_released_file_comes_back_and_what_trained_loads_with_the_logits_of_training(kind, way, tmp_path):
    source = write_released(kind, tmp_path / "released")
    model = load_released(source, torch.bfloat16)
    train(way, model, QAT, 0.0, 1, tmp_path / "run")
    export_released(model, tmp_path / "same", base=source)
    files = {file.name for file in source.iterdir()}
    assert files == {file.name for file in (tmp_path / "same").iterdir()}
    for name in files - {"config.json"}:
        assert (tmp_path / "same" / name).read_bytes() == (source / name).read_bytes()

    model = load_released(source, torch.bfloat16)
    before = tensors_of(source)
    train(way, model, QAD, 1e-2, 4, tmp_path / "run")
    report = export_released(model, tmp_path / "trained", base=source)
    assert report.changed_codes > 0
    found = tensors_of(tmp_path / "trained")
    assert {key: (value.dtype, value.shape) for key, value in found.items()} == {
        key: (value.dtype, value.shape) for key, value in before.items()
    }
    inputs = tokens(9)
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        again = load_released(tmp_path / "trained", torch.bfloat16).eval()(**inputs).logits
    assert torch.equal(again, expected)
