"""Question answering and models of sentence-transformers, distilled by the Trainer."""

import json
import sys
import types
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering, Trainer

from hf_eff import attach
from hf_eff._adapters.distillation import load_teacher
from shared_core.errors import CheckpointError, ConfigError

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def reader(seed, width=16):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForQuestionAnswering(BertConfig(hidden_size=width, max_position_embeddings=16, **sizes, **QUIET))


def questions(count=16):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 24, (count, 8), generator=generator)
    real = torch.arange(8)[None] < torch.randint(3, 9, (count, 1), generator=generator)
    return [
        {
            "input_ids": row * mask,
            "attention_mask": mask.long(),
            "start_positions": torch.tensor(number % 2),
            "end_positions": torch.tensor(2),
        }
        for number, (row, mask) in enumerate(zip(tokens, real, strict=True))
    ]


class TestQuestionAnswering:
    def test_trains_evaluates_and_saves(self, make, tmp_path):
        teacher = reader(1, 32)
        teacher.qa_outputs.weight.data *= 50  # a new one is sure of nothing
        teacher.save_pretrained(tmp_path / "teacher")
        trainer = make.trainer(
            tmp_path / "run", model=reader(0), data=questions(), max_steps=30, eval_strategy="steps", eval_steps=10,
            save_strategy="steps", save_steps=10,
        )  # fmt: skip
        attach(trainer, {"distill": {"teacher": str(tmp_path / "teacher"), "alpha": 0.0}})
        trainer.train()
        logged = [entry["distill/soft_loss"] for entry in trainer.state.log_history if "distill/soft_loss" in entry]
        assert logged[-1] < 0.7 * logged[0]
        assert trainer.evaluate()["eval_loss"] > 0
        trainer.save_model(str(tmp_path / "saved"))
        saved = BertForQuestionAnswering.from_pretrained(tmp_path / "saved")
        for name, value in saved.state_dict().items():
            assert torch.equal(value, trainer.model.state_dict()[name]), name

    @pytest.mark.parametrize("size", [2, 4])
    def test_micro_batches_are_one_batch(self, make, tmp_path, size):
        def step(size):
            trainer = make.trainer(
                tmp_path, model=reader(0), data=questions(8), max_steps=1, optim="sgd", max_grad_norm=0.0,
                per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, learning_rate=1.0,
            )  # fmt: skip
            trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(trainer.train_dataset)
            attach(trainer, {"distill": {"teacher": reader(1, 32), "alpha": 0.5}})
            trainer.train()
            return trainer.model.state_dict()

        whole, cut = step(8), step(size)
        for name, value in whole.items():
            torch.testing.assert_close(value, cut[name], rtol=1e-5, atol=1e-6)

    def test_a_teacher_that_classifies_is_refused_before_training(self, make, tmp_path):
        trainer = make.trainer(tmp_path, model=reader(0), data=questions())
        with pytest.raises(ConfigError, match=r"teacher must return .*spans.* got logits"):
            attach(trainer, {"distill": {"teacher": make.classifier()}})
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.fixture
def composed(monkeypatch):
    """A module as sentence-transformers (6.2) has: its class builds it from a folder; a dict in, the same dict out."""
    module = types.ModuleType("sentence_transformers.model")

    class SentenceTransformer(nn.Module):
        model_type = "SentenceTransformer"
        asked: ClassVar[list] = []

        def __init__(self, folder=None, *, width=4, seed=0, device=None, trust_remote_code=False):
            super().__init__()
            type(self).asked.append((folder, trust_remote_code))
            torch.manual_seed(seed)
            self.table, self.head = nn.Embedding(24, 8), nn.Linear(8, width)
            if folder is not None:
                self.load_state_dict(torch.load(f"{folder}/weights.pt", weights_only=True))

        def save(self, folder, model_type="SentenceTransformer"):
            folder.mkdir()
            (folder / "modules.json").write_text("[]")
            (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": model_type}))
            torch.save(self.state_dict(), folder / "weights.pt")
            return str(folder)

        def forward(self, input):
            input["token_embeddings"] = self.table(input["input_ids"])
            input["sentence_embedding"] = self.head(input["token_embeddings"].mean(1))
            return input

        def get_embedding_dimension(self):
            return self.head.out_features

    class CrossEncoder(SentenceTransformer):
        model_type = "CrossEncoder"

    for kind in (SentenceTransformer, CrossEncoder):
        kind.__module__ = "sentence_transformers.model"
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "sentence_transformers.model", module)
    return module


class Pairs(Trainer):
    """Two texts and how alike they are, as SentenceTransformerTrainer has them: the model is called once a text."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        texts = ({"input_ids": inputs[f"text_{side}"]} for side in "ab")
        ours, theirs = (model(text)["sentence_embedding"] for text in texts)
        return (torch.cosine_similarity(ours, theirs) - inputs["score"]).square().mean()


class TestSentenceTransformers:
    def test_every_text_is_distilled_from_a_folder(self, composed, make, tmp_path):
        folder = composed.SentenceTransformer(seed=1).save(tmp_path / "teacher")
        tokens = torch.randint(24, (16, 2, 5), generator=torch.Generator().manual_seed(0))
        data = [{"text_a": a, "text_b": b, "score": torch.tensor(0.5)} for a, b in tokens]
        trainer = make.trainer(
            tmp_path / "run", trainer_class=Pairs, model=composed.SentenceTransformer(), data=data, max_steps=40,
            per_device_train_batch_size=8, remove_unused_columns=False,
        )  # fmt: skip
        attach(trainer, {"distill": {"teacher": folder, "alpha": 0.1, "trust_remote_code": True}})
        trainer.train()
        assert composed.SentenceTransformer.asked[-1] == (folder, True)
        told = json.loads((tmp_path / "run" / "eff_receipt.json").read_text())["techniques"]["distill"]
        assert (told["outputs"], told["divergence"], told["positions"]) == ("embeddings", "cosine", 40 * 8 * 2)
        logged = [entry["distill/soft_loss"] for entry in trainer.state.log_history if "distill/soft_loss" in entry]
        assert logged[-1] < 0.7 * logged[0]

    def test_a_teacher_of_another_kind_is_refused(self, composed, tmp_path):
        folder = composed.SentenceTransformer(seed=1).save(tmp_path / "teacher")
        with pytest.raises(CheckpointError, match=r"must be a CrossEncoder as the student is.*a SentenceTransformer"):
            load_teacher(folder, composed.CrossEncoder())

    def test_a_head_that_would_be_drawn_is_refused(self, composed, tmp_path):
        config = BertConfig(hidden_size=8, num_attention_heads=1, architectures=["BertModel"])
        config.save_pretrained(tmp_path / "teacher")
        with pytest.raises(CheckpointError, match=r"must be a CrossEncoder, got .*BertModel.*random weights"):
            load_teacher(str(tmp_path / "teacher"), composed.CrossEncoder())
