"""`eff try` on scripts of the Hugging Face Trainer and of accelerate, as their users start them."""

import functools
from pathlib import Path

import pytest
from commands import told_by

TRAINER = """
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

torch.set_num_threads(1)
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
config = BertConfig(vocab_size=24, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
tokens = torch.randint(1, 24, (64, 8))
examples = [{"input_ids": row, "labels": int(row[0] % 2)} for row in tokens]
trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=examples, eval_dataset=examples)
trainer.train()
trainer.save_model("saved")
"""
LOOP = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
x = torch.randn(64, 8)
accelerator = Accelerator(cpu=True)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=80)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(10):
    model.train()
    for inputs, labels in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state("states")
"""


tried = functools.partial(told_by, "try", "--steps", "12")


@pytest.mark.slow
def test_a_trainers_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINER)
    Path("mine").mkdir()
    found = tried(
        "train.py", "--output_dir", "mine", "--use_cpu", "true", "--save_strategy", "epoch", "--eval_strategy", "epoch",
        "--per_device_train_batch_size", "8", "--prune_sparsity", "0.8", "--distill_teacher", "nowhere",
    )  # fmt: skip
    assert sorted(path.name for path in Path().iterdir()) == ["eff_try", "mine", "train.py"]
    assert not list(Path("mine").iterdir())
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["prune"]["figures"].keys() == {"time", "memory", "metric", "bytes", "packed"}
    assert rows["prune"]["figures"]["packed"]["verdict"] == "better"
    assert rows["prune"]["happened"]["prune"].startswith("Pruned 80.0 %")
    assert found["metric"] == "eval_loss"
    assert rows["distill"]["error"].startswith("distill")
    assert rows["distill"]["advice"].startswith("failed: distill")
    assert found["num_plain"] == 5
    names = {path.name for path in Path("eff_try").iterdir()}
    assert names == {"eff_try.html", "eff_try.md", "eff_try.json", "logs"}


@pytest.mark.slow
def test_a_loop_of_accelerate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP)
    found = tried("loop.py", "--prune_sparsity", "0.8")
    assert sorted(path.name for path in Path().iterdir()) == ["eff_try", "loop.py"]
    assert found["metric"] == "train_loss"
    assert found["rows"][0]["happened"]["prune"].startswith("Pruned 80.0 %")
    assert found["rows"][0]["figures"]["packed"]["verdict"] == "better"
