"""Teachers of another vocabulary: refused before training, but where only padding differs over one tokenizer.

Heads padded to different sizes (`distill.vocab_size`) are compared as if their padding had been cut off.
"""

import copy
import json
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from shared_core.distillation import Distillation, DistillConfig, kd_loss
from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.distillation.teacher_cache.keys import tokenizer_vocabulary
from shared_core.engine.services import Services
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, ConfigError

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


class LoopServices(Services):
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
    context, notes = Context(student, services=LoopServices(words), total_steps=3), []
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
    with pytest.raises(ConfigError, match=r"18 of 20 .*mean other tokens, such as 1: 'w1' and 'w19'"):
        attached(student, teacher, WORDS if known_by == "trainer" else None)


class Holds(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch)


def test_a_module_that_holds_the_model_is_compared_too(tmp_path):
    teacher = Holds(with_tokenizer(classifier(24, 1), tmp_path / "teacher", OTHERS))
    with pytest.raises(ConfigError, match=r"18 of 20 .*mean other tokens"):
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
    assert any("first 24 classes" in note for note in notes)


@pytest.mark.parametrize("make", [language_model, classifier])
def test_a_teacher_that_lacks_tokens_of_the_tokenizer_is_refused(make, tmp_path):
    teacher = with_tokenizer(make(16, 1), tmp_path / "teacher", WORDS[:16])
    with pytest.raises(ConfigError, match=r"must know the student's 20 tokens, got .* with 16; add them"):
        attached(make(24), teacher, WORDS)


@pytest.mark.parametrize(("ours", "theirs"), [(24, 16), (16, 24)])
def test_other_sizes_without_tokenizers_are_refused(ours, theirs):
    with pytest.raises(ConfigError, match=rf"the student's {ours} tokens, got .* with {theirs}, and no tokenizers"):
        attached(classifier(ours), classifier(theirs))
    with pytest.raises(ConfigError, match=rf"as the student, {ours}, got {theirs}.* set distill.vocab_size"):
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


CLASSES = 7


def net(width, classes, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, classes))


def cut(model):
    """The model without padding, in float64."""
    model = copy.deepcopy(model).double()
    model[2].weight = nn.Parameter(model[2].weight[:CLASSES])
    model[2].bias = nn.Parameter(model[2].bias[:CLASSES])
    return model


def soft(model, teacher, x, **options):
    technique = Distillation(DistillConfig(teacher=teacher, alpha=0.0, temperature=2.0, **options))
    context = Context(model, total_steps=3)
    technique.attach(context)
    technique.begin(context, None)
    technique.labels = torch.zeros(len(x), dtype=torch.long)
    model.zero_grad()
    loss = technique.loss(model(x).sum(), context)
    loss.backward()
    context.undo.close()
    return loss, [parameter.grad for parameter in model.parameters()]


def assert_cut(got, expected):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6, check_dtype=False)
    for ours, reference in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(ours[: len(reference)], reference, rtol=1e-5, atol=1e-6, check_dtype=False)
        assert not ours[len(reference) :].any()


@pytest.mark.parametrize("divergence", get_args(get_type_hints(DistillConfig)["divergence"]))
@pytest.mark.parametrize("several", [False, True])
def test_as_if_padding_were_cut_off(divergence, several):
    x, student = torch.randn(6, 5), net(6, 9, 0)
    teachers = [net(8, 12, 1), net(8, CLASSES, 2)][: 1 + several]
    expected = soft(cut(student), [cut(teacher) for teacher in teachers], x.double(), divergence=divergence)
    got = soft(student, teachers, x, divergence=divergence, vocab_size=CLASSES)
    assert_cut(got, expected)


def test_a_cached_teacher(tmp_path):
    x, student, teacher = torch.randn(6, 5), net(6, 9, 0), net(8, 12, 1)
    write_teacher_cache(teacher, [x], tmp_path / "cache", temperature=2.0, dtype="float32", vocabulary=CLASSES)
    name = f"cache:{tmp_path / 'cache'}"
    assert_cut(soft(student, name, x, vocab_size=CLASSES), soft(cut(student), cut(teacher), x.double()))
    with pytest.raises(CheckpointError, match=r"must have the 7 classes .* got 8"):
        soft(student, name, x, vocab_size=8)


@pytest.mark.parametrize(
    ("sizes", "vocab_size", "message"),
    [
        ((9, 12), None, r"as the student, 9, got 12; .* set distill.vocab_size .* tokenizers"),
        ((9, 12), 10, r"vocab_size must be at most 9, the smaller of the student's 9 and the teacher's 12"),
        ((9, 6), 7, r"vocab_size must be at most 6"),
    ],
)
def test_sizes_that_do_not_fit(sizes, vocab_size, message):
    with pytest.raises(ConfigError, match=message):
        soft(net(6, sizes[0], 0), net(8, sizes[1], 1), torch.randn(6, 5), vocab_size=vocab_size)
