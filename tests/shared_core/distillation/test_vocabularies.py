"""Teachers of another vocabulary: refused before training, but where only padding differs over one tokenizer."""

import json

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from shared_core.distillation import Distillation, DistillConfig, kd_loss
from shared_core.distillation.teacher_cache.keys import tokenizer_vocabulary
from shared_core.engine.services import BareServices
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
WORDS = [f"w{number}" for number in range(20)]
OTHERS = WORDS[:1] + WORDS[:0:-1]


def language_model(rows, seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, num_key_value_heads=2, **SIZES))


def classifier(rows, seed=0):
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(vocab_size=rows, **SIZES))


class Tokenizer:
    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}


class Services(BareServices):
    def __init__(self, words):
        self.words, self.said = words, []

    def tokenizer(self):
        return None if self.words is None else Tokenizer(self.words)


def with_tokenizer(model, folder, words, form="tokenizer.json"):
    """The model, as if it came from a folder with this tokenizer."""
    folder.mkdir()
    table = Tokenizer(words).get_vocab()
    content = {
        "tokenizer.json": json.dumps({"model": {"vocab": table}}),
        "vocab.json": json.dumps(table),
        "vocab.txt": "\n".join(words) + "\n",
    }
    (folder / form).write_text(content[form])
    model.config._name_or_path = model.name_or_path = str(folder)
    return model


def attached(student, teacher, words=None, **options):
    technique = Distillation(DistillConfig(**{"teacher": teacher, "alpha": 0.0, **options}))
    context, notes = Context(student, services=Services(words), total_steps=3), []
    context.note = notes.append
    technique.attach(context)
    technique.begin(context, None)
    return technique, context, notes


@pytest.mark.parametrize("make", [language_model, classifier])
@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json", "vocab.txt"])
@pytest.mark.parametrize("known_by", ["trainer", "folder"])
def test_numbers_that_mean_other_tokens_are_refused_though_the_sizes_agree(make, form, known_by, tmp_path):
    teacher, student = with_tokenizer(make(24, 1), tmp_path / "teacher", OTHERS, form), make(24)
    if known_by == "folder":
        student = with_tokenizer(student, tmp_path / "student", WORDS, form)
    with pytest.raises(ConfigError, match=r"18 of 20 numbers mean other tokens, such as 1: 'w1' and 'w19'; take a"):
        attached(student, teacher, WORDS if known_by == "trainer" else None)


class Holds(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch)


def test_a_module_that_holds_the_model_is_compared_too(tmp_path):
    teacher = Holds(with_tokenizer(classifier(24, 1), tmp_path / "teacher", OTHERS))
    with pytest.raises(ConfigError, match="18 of 20 numbers mean other tokens"):
        attached(Holds(classifier(24)), teacher, WORDS)
    padded = Holds(with_tokenizer(language_model(32, 1), tmp_path / "padded", WORDS))
    assert attached(Holds(language_model(24)), padded, WORDS)[0].report()["vocab_size"] == 24


@pytest.mark.parametrize(("ours", "theirs"), [(24, 32), (32, 24)])
def test_common_columns_of_heads_that_are_padded_differently(ours, theirs, tmp_path):
    student, teacher = language_model(ours), with_tokenizer(language_model(theirs, 1), tmp_path / "teacher", WORDS)
    technique, context, notes = attached(student, teacher, WORDS)
    batch = {"input_ids": torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))}
    loss = technique.loss(student.train()(**batch).logits.sum() * 0, context)
    with torch.no_grad():
        mine, its = (model.eval()(**batch).logits[:, :-1, :24] for model in (student, teacher))
    torch.testing.assert_close(loss.detach(), kd_loss(mine, its))
    assert technique.report()["vocab_size"] == 24
    assert any("first 24 classes are compared" in note for note in notes)


@pytest.mark.parametrize("make", [language_model, classifier])
def test_a_teacher_that_lacks_tokens_of_the_tokenizer_is_refused(make, tmp_path):
    teacher = with_tokenizer(make(16, 1), tmp_path / "teacher", WORDS[:16])
    with pytest.raises(ConfigError, match=r"must know the student's 20 tokens, got .* with 16; add them to"):
        attached(make(24), teacher, WORDS)


@pytest.mark.parametrize(("ours", "theirs"), [(24, 16), (16, 24)])
def test_other_sizes_without_tokenizers_are_refused(ours, theirs):
    with pytest.raises(ConfigError, match=rf"vocabulary of {ours} tokens, got .* with {theirs}, and no tokenizers"):
        attached(classifier(ours), classifier(theirs))
    with pytest.raises(ConfigError, match=rf"the student's {ours} classes, got {theirs}.* set distill.vocab_size"):
        attached(language_model(ours), language_model(theirs))
    attached(language_model(ours), language_model(theirs), vocab_size=16)  # the user knows


def test_padding_of_a_classifier_s_embedding_is_no_reason_to_refuse(tmp_path):
    attached(classifier(20), with_tokenizer(classifier(32, 1), tmp_path / "a", WORDS), WORDS)
    attached(classifier(32), with_tokenizer(classifier(20, 1), tmp_path / "b", WORDS), WORDS)


def test_a_hundredth_may_be_renamed(tmp_path):
    words = [f"w{number}" for number in range(200)]
    renamed = [*words[:198], "reserved1", "reserved2"]
    attached(classifier(200), with_tokenizer(classifier(200, 1), tmp_path / "a", renamed), words)


def test_a_folder_without_a_whole_vocabulary_tells_nothing(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": "b"}')
    assert tokenizer_vocabulary(tmp_path) is None
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "added_tokens.json").write_text('{"c": 2}')
    assert tokenizer_vocabulary(tmp_path) == {"a": 0, "b": 1, "c": 2}
