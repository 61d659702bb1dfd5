"""Question answering in Lightning: a module whose step and whose network return dicts."""

import pytest
import torch
from lightning_world import BOTH, make_trainer
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForQuestionAnswering, BertModel

from lightning_eff import Distillation
from shared_core.distillation import kd_loss
from shared_core.errors import ConfigError

SIZES = {"vocab_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def reader(seed, width=8, kind=BertForQuestionAnswering):
    torch.manual_seed(seed)
    return kind(BertConfig(hidden_size=width, **SIZES, **QUIET))


def questions():
    tokens = torch.randint(1, 12, (8, 6), generator=torch.Generator().manual_seed(0))
    rows = zip(tokens, torch.arange(8) % 4, strict=True)
    return [{"input_ids": row, "start_positions": at, "end_positions": at + 1} for row, at in rows]


def fitted(namespace, folder, teacher, tokenizer=None):
    import importlib

    class Module(importlib.import_module(namespace).LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.tokenizer = reader(0), tokenizer

        def training_step(self, batch, index):
            output = self.net(**batch)
            self.first = getattr(self, "first", None) or output
            return {"loss": output.loss, "start_logits": output.start_logits}

        def on_train_batch_end(self, outputs, batch, index):
            self.loss = outputs["loss"].item()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, callback = Module(), Distillation(teacher=teacher, student="net", alpha=0.0)
    trainer = make_trainer(folder, namespace, callbacks=[callback], max_epochs=1)
    trainer.fit(module, DataLoader(questions(), batch_size=8))
    return module, callback


@pytest.mark.parametrize("namespace", BOTH)
def test_a_step_that_returns_a_dict(namespace, tmp_path):
    teacher = reader(1, 16)
    teacher.save_pretrained(tmp_path / "teacher")
    module, callback = fitted(namespace, tmp_path / "run", str(tmp_path / "teacher"))
    with torch.no_grad():
        theirs = teacher.eval()(torch.stack([row["input_ids"] for row in questions()]))
    each = [kd_loss(module.first[name].detach(), theirs[name]) for name in ("start_logits", "end_logits")]
    assert module.loss == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)
    assert callback.receipt["techniques"]["distill"]["outputs"] == "spans"


def test_a_teacher_without_a_head_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="teacher must return logits"):
        fitted(BOTH[0], tmp_path, reader(1, kind=BertModel))


def test_a_teacher_of_another_tokenizer_is_refused_before_training(tmp_path):
    class Tokenizer:
        def get_vocab(self):
            return {f"w{number}": number for number in range(12)}

    reader(1).save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "vocab.txt").write_text("\n".join(f"w{number}" for number in reversed(range(12))))
    with pytest.raises(ConfigError, match=r"12 of 12 .*mean other tokens"):
        fitted(BOTH[0], tmp_path / "run", str(tmp_path / "teacher"), Tokenizer())
