"""`distill_chunked` through the trainer: the window's gradient, metrics, refusals; teachers of another tokenizer."""

import json

import pytest
import torch
from hf_gradients import distance, first_gradients, reference
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Trainer

from hf_eff import attach
from shared_core.errors import CompatibilityError, ConfigError, TrainingError

SMALL = {"chunked": True, "budget_mib": 2 * 8 * 24 * 4 / 2**20}


@pytest.mark.parametrize(("size", "windows"), [(4, 1), (1, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_with_logits(make, tmp_path, size, windows, tied):
    def gradients(folder, **distill):
        model = make.language_model(tie_word_embeddings=tied)
        return first_gradients(make, tmp_path / folder, size, windows, model=model, distill=distill)

    assert distance(gradients("whole"), gradients("chunked", **SMALL)) < 1e-5


def test_compute_loss_func_that_takes_cross_entropy(make, tmp_path):
    def summed(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
        loss = F.cross_entropy(logits.reshape(-1, 24), labels.reshape(-1), ignore_index=-100, reduction="sum")
        return loss / num_items_in_batch

    found = first_gradients(make, tmp_path, 2, 4, extra={"compute_loss_func": summed}, distill=SMALL)
    assert distance(reference(make), found) < 1e-5


def chunked(make, folder, trainer_class=Trainer, extra=None, **settings):
    trainer = make.trainer(
        folder, trainer_class=trainer_class, model=make.language_model(), data=make.texts(8), extra=extra,
        max_steps=2, **settings,
    )  # fmt: skip
    attach(trainer, {"distill": {"teacher": make.language_model(seed=5, hidden_size=32), **SMALL}})
    return trainer


def test_evaluation_has_logits_and_the_receipt_tells(make, tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {}

    trainer = chunked(make, tmp_path, eval_strategy="steps", eval_steps=1, bf16=True)
    trainer.compute_metrics = metrics
    trainer.train()
    assert seen == [(8, 8, 24)] * 2
    assert type(trainer.model.lm_head) is torch.nn.Linear
    touched = json.loads((tmp_path / "eff_receipt.json").read_text())["techniques"]["distill"]
    assert (touched["chunk_rows"], touched["batches"]) == (16, 2)  # of 2 bytes a logit


def test_what_needs_logits_is_refused(make, tmp_path):
    with pytest.raises(CompatibilityError, match=r"label_smoothing_factor must be 0 with chunked, got 0\.1"):
        chunked(make, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(CompatibilityError, match="torch_compile must be False with chunked"):
        chunked(make, tmp_path, torch_compile=True)

    class LogsAccuracy(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            self.right = (outputs.logits.argmax(-1) == inputs["labels"]).sum()
            return loss

    with pytest.raises(TrainingError, match=r"argmax .*chunked.*evaluation"):
        chunked(make, tmp_path, LogsAccuracy).train()


def test_padded_vocabularies(make, tmp_path):
    teacher = make.language_model(seed=5, hidden_size=32, vocab_size=30)

    def run(**options):
        return first_gradients(make, tmp_path, 8, 1, teacher=teacher, distill=options)

    with pytest.raises(ConfigError, match=r"24, got 30.*set distill.vocab_size.*tokenizers"):
        run()
    with pytest.raises(ConfigError, match="vocab_size must be at most 24"):
        run(vocab_size=25)
    plain, chunked = run(vocab_size=20), run(vocab_size=20, **SMALL)
    assert distance(plain, chunked) < 1e-5
    assert distance(plain, run(vocab_size=24)) > 1e-3


def tokenizer(words):
    vocabulary = {word: number for number, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token=words[0])))


def test_a_teacher_of_another_tokenizer(make, tmp_path):
    words = [f"w{number}" for number in range(24)]
    folder = tmp_path / "teacher"
    make.language_model(seed=5, hidden_size=32).save_pretrained(folder)
    tokenizer(words[:1] + words[:0:-1]).save_pretrained(folder)

    def run(own):
        trainer = make.trainer(
            tmp_path, model=make.language_model(), data=make.texts(8), extra={"processing_class": own}
        )
        attach(trainer, {"distill": {"teacher": str(folder)}})

    with pytest.raises(ConfigError, match=r"22 of 24 .*mean other tokens, such as 1: 'w1' and 'w23'"):
        run(tokenizer(words))
    run(None)
    tokenizer(words[:20]).save_pretrained(folder)
    run(tokenizer(words))  # the student's has more tokens
