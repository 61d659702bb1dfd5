"""Outputs that are not logits: spans of question answering, scores and embeddings of sentence-transformers."""

import pytest
import torch
import torch.nn.functional as F
from distillation_steps import attached
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering, BertModel

from shared_core.distillation import Distillation, DistillConfig, kd_loss
from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError, TrainingError

T = 2.0
SIZES = {"vocab_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def reader(seed, width=8):
    torch.manual_seed(seed)
    return BertForQuestionAnswering(BertConfig(hidden_size=width, **SIZES, **QUIET))


def questions(padding=0):
    """Three questions of 3, 7 and 5 tokens, and so many columns of padding."""
    real = torch.tensor([[1] * n + [0] * (7 - n + padding) for n in (3, 7, 5)])
    tokens = F.pad(torch.randint(1, 12, (3, 7), generator=torch.Generator().manual_seed(0)), (0, padding))
    return {"input_ids": tokens * real, "attention_mask": real}


def started(student, teacher, **options):
    return attached(student, teacher, total_steps=3, **{"alpha": 0.0, "temperature": T, **options})


def soft(student, teacher, *batches, **options):
    """The soft term after a forward of each batch, and the student's gradients."""
    technique, context = started(student, teacher, **options)
    student.train().zero_grad()
    for batch in batches:
        student(**batch) if "input_ids" in batch else student(dict(batch))
    loss = technique.loss(torch.zeros(()), context)
    loss.backward()
    return loss, [p.grad for p in student.parameters() if p.grad is not None], technique


def rows(model, batch):
    """Start and end logits, one example after another, without its padding."""
    output = model(**batch)
    for logits in (output.start_logits, output.end_logits):
        yield from (row[mask == 1] for row, mask in zip(logits, batch["attention_mask"], strict=True))


class TestSpans:
    def reference(self, student, teacher, term):
        with torch.no_grad():
            theirs = list(rows(teacher.eval(), questions()))
        return torch.stack([term(mine, its) for mine, its in zip(rows(student, questions()), theirs, strict=True)])

    def test_the_mean_of_start_and_end_over_the_positions_that_are_not_padding(self):
        student, teacher = reader(0), reader(1, 16)
        got, gradients, technique = soft(student, teacher, questions())
        expected = self.reference(student, teacher, lambda s, t: kd_loss(s[None], t[None], temperature=T)).mean()
        torch.testing.assert_close(got, expected)
        wanted = torch.autograd.grad(expected, [p for p in student.parameters() if p.grad is not None])
        torch.testing.assert_close(gradients, list(wanted))
        assert technique.report()["outputs"] == "spans"
        assert technique.state_dict()["positions"] == 3

    @pytest.mark.parametrize("divergence", ["forward_kl", "jsd", "hard_label", "logit_mse", "bernoulli_kl"])
    @pytest.mark.parametrize("several", [False, True])
    def test_longer_padding_changes_nothing(self, divergence, several):
        student, teachers = reader(0), [reader(1, 16), reader(2)][: 1 + several]
        short = soft(student, teachers, questions(), divergence=divergence)
        longer = soft(student, teachers, questions(padding=5), divergence=divergence)
        torch.testing.assert_close(short[:2], longer[:2])
        assert short[0] > 0

    def test_numbers_are_compared_position_by_position(self):
        student, teacher = reader(0), reader(1)
        got, _, _ = soft(student, teacher, questions(), divergence="logit_mse")
        with torch.no_grad():
            pairs = zip(rows(student, questions()), rows(teacher.eval(), questions()), strict=True)
            squares = torch.cat([(mine - its).square() for mine, its in pairs])
        torch.testing.assert_close(got.detach(), squares.mean())

    def test_unsure_answers_count_for_nothing(self):
        student, teacher = reader(0), reader(1)
        everything, nothing = (soft(student, teacher, questions(), confidence=c)[0] for c in (1e-6, 0.999))
        torch.testing.assert_close(everything, soft(student, teacher, questions())[0])
        assert nothing == 0

    @pytest.mark.parametrize("cut", ["both", "student's own"])
    def test_positions_that_the_models_rule_out_themselves(self, cut):
        class RulesOut(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, **batch):
                output = self.model(**batch)
                out = torch.zeros_like(output.start_logits, dtype=torch.bool)
                out[:, 1] = True
                return {name: output[name].masked_fill(out, -torch.inf) for name in ("start_logits", "end_logits")}

        loss, gradients, _ = soft(RulesOut(reader(0)), RulesOut(reader(1)), questions())
        assert loss.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients)

    def test_what_has_no_classes_has_no_vocabulary(self):
        with pytest.raises(ConfigError, match="vocab_size must be none for spans, which have no classes, got 3"):
            started(reader(0), reader(1), vocab_size=3)

    def test_students_that_teach_each_other(self):
        students = [reader(0), reader(1)]
        technique = Distillation(DistillConfig(teacher="mutual", peers=[students[1]], alpha=0.0, temperature=T))
        services = type("Services", (), {"task_loss": lambda self, model, forward: forward().start_logits.sum() * 0})()
        context = Context(students[0], services=services, total_steps=2)
        technique.before_attach(context)
        technique.attach(context)
        context.optimizers = (torch.optim.SGD(students[0].parameters(), lr=0.1),)
        technique.begin(context, None)
        students[0].train()(**questions())
        got = technique.loss(torch.zeros(()), context)
        torch.testing.assert_close(got.detach(), soft(reader(0), reader(1), questions())[0].detach())


class Composed(nn.Module):
    """What sentence-transformers does: writes what its modules return into the batch, which it returns."""

    def __init__(self, seed, key, width=3):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.head, self.key = nn.Embedding(12, 4), nn.Linear(4, width), key

    def forward(self, input):
        assert self.key not in input, "the teacher is given what the student was given"
        input.update({"token_embeddings": (tokens := self.table(input["ids"]))})
        input.update({self.key: self.head(tokens.mean(1)), "modality": "text"})
        return input

    def get_embedding_dimension(self):
        return self.head.out_features if self.key == "sentence_embedding" else None


def texts(seed, count=4):
    return {"ids": torch.randint(12, (count, 5), generator=torch.Generator().manual_seed(seed))}


def plain(model, batch):
    with torch.no_grad():
        return model.eval()(dict(batch))[model.key]


class TestScores:
    def test_one_score_is_compared_as_a_number(self):
        student, teacher = Composed(0, "scores", 1), Composed(1, "scores", 1)
        got, _, technique = soft(student, teacher, texts(0))
        torch.testing.assert_close(got.detach(), F.mse_loss(plain(student, texts(0)), plain(teacher, texts(0))))
        assert technique.report()["divergence"] == "logit_mse"

    def test_several_are_classes(self):
        student, teacher = Composed(0, "scores"), Composed(1, "scores")
        got, _, technique = soft(student, teacher, texts(0))
        expected = kd_loss(plain(student, texts(0)), plain(teacher, texts(0)), temperature=T)
        torch.testing.assert_close(got.detach(), expected)
        assert technique.report()["divergence"] == "forward_kl"

    def test_another_number_of_them_is_refused(self):
        with pytest.raises(ConfigError, match=r"teacher must have as many classes as the student, 1, got 3"):
            soft(Composed(0, "scores", 1), Composed(1, "scores", 3), texts(0))


class TestEmbeddings:
    key = "sentence_embedding"

    def test_every_text_that_the_loss_compares_counts(self):
        student, teacher = Composed(0, self.key), Composed(1, self.key)
        batches = texts(0), texts(1), texts(2, count=2)
        got, _, technique = soft(student, teacher, *batches)
        ours, theirs = (torch.cat([plain(model, batch) for batch in batches]) for model in (student, teacher))
        torch.testing.assert_close(got.detach(), (1 - F.cosine_similarity(ours, theirs)).mean())
        assert technique.report()["divergence"] == "cosine"
        assert technique.state_dict()["positions"] == 10
        squared, _, _ = soft(student, teacher, *batches, divergence="logit_mse")
        torch.testing.assert_close(squared.detach(), F.mse_loss(ours, theirs))

    @pytest.mark.parametrize("begin", [0, 1])
    def test_a_loss_of_cut_embeddings_is_named(self, begin):
        class Cut(Composed):
            width = 3

            def forward(self, input):
                output = super().forward(input)
                return {**output, self.key: output[self.key][:, : self.width]}

        student = Cut(0, self.key)
        technique, context = started(student, Composed(1, self.key), begin=begin)
        for student.width in (3, 2):
            student.train()(texts(0))
        with pytest.raises(TrainingError, match=r"width, got 3, 2.*MatryoshkaLoss"):
            technique.loss(torch.zeros((), requires_grad=True), context)

    def test_no_text_is_counted_in_two_losses(self):
        technique, context = started(student := Composed(0, self.key), Composed(1, self.key))
        for step in range(2):
            student.train()
            student(texts(step))
            technique.loss(torch.zeros(()), context)
        assert technique.state_dict()["positions"] == 8

    @pytest.mark.parametrize(
        ("teacher", "options", "message"),
        [
            (Composed(1, key, 5), {}, r"embeddings of the student's width 3, got 5; .* Dense"),
            (Composed(1, key), {"divergence": "jsd"}, "divergence must be .* for embeddings"),
        ],
    )
    def test_refused_before_a_batch(self, teacher, options, message):
        with pytest.raises(ConfigError, match=message):
            started(Composed(0, self.key), teacher, **options)

    def test_refused_where_only_the_batch_tells(self):
        student, teacher = Composed(0, self.key), Composed(1, self.key, 5)
        teacher.get_embedding_dimension = None
        with pytest.raises(ConfigError, match="width 3, got 5"):
            soft(student, teacher, texts(0))
        with pytest.raises(ConfigError, match="confidence must be 0 for embeddings"):
            soft(student, Composed(1, self.key), texts(0), confidence=0.5)


class TestRefused:
    @pytest.mark.parametrize("whose", ["student", "teacher"])
    def test_a_model_without_a_head_before_a_batch(self, whose):
        bare = BertModel(BertConfig(hidden_size=8, **SIZES))
        pair = (bare, reader(0)) if whose == "student" else (reader(0), bare)
        with pytest.raises(ConfigError, match=rf"{whose} must return logits .* got BertModel.*a model with a head"):
            started(*pair)

    def test_a_cached_teacher_of_spans(self, tmp_path):
        write_teacher_cache(nn.Linear(4, 3), [torch.zeros(2, 4)], tmp_path, temperature=T)
        with pytest.raises(ConfigError, match="teacher must not be cached for spans"):
            started(reader(0), f"cache:{tmp_path}")

    def test_a_teacher_of_another_task(self):
        from transformers import BertForSequenceClassification

        classifier = BertForSequenceClassification(BertConfig(hidden_size=8, **SIZES))
        with pytest.raises(ConfigError, match=r"teacher must return .*spans.* got logits"):
            started(reader(0), classifier)

    def test_another_output_in_the_place_of_the_one_that_the_user_names(self):
        with pytest.raises(TrainingError, match=r"student's output must hold logits under 'start', got .*start_logits"):
            soft(reader(0), reader(1), questions(), logits="start")

    def test_an_output_with_nothing_known_in_it(self):
        with pytest.raises(
            TrainingError, match=r"logits under 'logits', or start_logits and end_logits, or scores, or"
        ):
            soft(Composed(0, "pooled"), Composed(1, "pooled"), texts(0))

    def test_a_teacher_that_does_not_know_a_token(self):
        small = Composed(1, "scores")
        small.table = nn.Embedding(3, 4)
        with pytest.raises(TrainingError, match=r"teacher must .* the student's inputs.*index out of"):
            soft(Composed(0, "scores"), small, texts(0))
