"""Distillation on what models really take and return: Transformers' tiny Llama and BERT, odd inputs and outputs."""

import contextlib
from types import SimpleNamespace

import language_runs
import peft
import pytest
import torch
import torch.nn.functional as F
from distillation_steps import attached
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from shared_core.distillation.forward_capture import Forward, ask_teacher, counted_positions, is_causal
from shared_core.engine.observers.micro_batches import mean_over_micro_batch
from shared_core.errors import ConfigError, TrainingError

VOCAB = 17
BERT = {"vocab_size": VOCAB, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}


def mlp(width=8, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, classes))


def llama(hidden=8, seed=0, **options):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            **{"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 16, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, **options}
        )
    )


def bert(kind=BertForSequenceClassification, hidden=8, seed=0, **options):
    torch.manual_seed(seed)
    return kind(BertConfig(hidden_size=hidden, **BERT, **options))


class TestOutputsAndInputs:
    def run(self, wrap_student, wrap_teacher, **options):
        class Wrapped(nn.Module):
            def __init__(self, net, wrap):
                super().__init__()
                self.net, self.wrap = net, wrap

            def forward(self, x, labels=None, **kwargs):
                assert "num_items_in_batch" not in kwargs or self.wrap is wrap_student
                return self.wrap(self.net(x), labels)

        student, teacher = Wrapped(nn.Linear(4, 3), wrap_student), Wrapped(nn.Linear(4, 3), wrap_teacher)
        technique, context = attached(student, teacher, **options)
        student(torch.randn(2, 4), labels=torch.tensor([0, -100]), num_items_in_batch=1)
        technique.loss(torch.ones((), requires_grad=True), context)
        return technique.report()["positions"]

    def test_ways_to_return_logits(self):
        class Output:
            def __init__(self, scores):
                self.scores = scores

        def tupled(logits, labels):
            return (logits,) if labels is None else (F.cross_entropy(logits, labels), logits)

        assert self.run(tupled, tupled) == 2
        assert self.run(lambda logits, _: {"scores": logits}, lambda logits, _: logits, logits="scores") == 2
        assert self.run(lambda logits, _: Output(logits), lambda logits, _: [logits], logits="scores") == 2

    @pytest.mark.parametrize("output", [None, {"loss": torch.ones(())}, torch.nn.Identity()])
    def test_an_output_without_logits_is_refused(self, output):
        with pytest.raises(TrainingError, match="the student's output must hold logits under 'logits'"):
            self.run(lambda *_: output, lambda logits, _: logits)
        with pytest.raises(TrainingError, match="the teacher's output must hold logits"):
            self.run(lambda logits, _: logits, lambda *_: output)

    def test_a_batch_given_as_one_dict(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(4, 3)

            def forward(self, batch):
                seen.append(set(batch))
                return {"logits": self.net(batch["x"])}

        seen = []
        student = Net()
        technique, context = attached(student, Net())
        student({"x": torch.randn(3, 4), "labels": torch.tensor([0, -100, -100])})
        technique.loss(torch.ones((), requires_grad=True), context)
        assert seen == [{"x", "labels"}, {"x"}]
        assert technique.report()["unlabeled_examples"] == 2

    def test_positional_labels_do_not_reach_the_teacher(self):
        student, teacher = bert(), bert(hidden=16)
        technique, context = attached(student, teacher)
        seen = []
        teacher.register_forward_hook(lambda _, args, kwargs, out: seen.append(out.loss), with_kwargs=True)
        ids = torch.randint(VOCAB, (3, 5))
        out = student(ids, torch.ones_like(ids), labels=torch.tensor([0, 1, -100]))
        technique.loss(out.loss, context)
        assert seen == [None]
        assert technique.report()["unlabeled_examples"] == 1

    def test_labels_that_the_trainer_took_out(self):
        technique, context = attached(mlp(), mlp(16))
        technique.labels = torch.tensor([0, -100, 1])
        technique.loss(context.model(torch.randn(3, 4)).sum(), context)
        assert technique.labels is None
        assert technique.report()["unlabeled_examples"] == 1

    def test_a_teacher_that_takes_fewer_inputs(self):
        teacher = DistilBertForSequenceClassification(
            DistilBertConfig(vocab_size=VOCAB, dim=16, n_heads=2, n_layers=1, hidden_dim=16)
        )
        student = bert()
        technique, context = attached(student, teacher)
        ids = torch.randint(VOCAB, (2, 5))
        out = student(input_ids=ids, token_type_ids=torch.zeros_like(ids), labels=torch.tensor([0, 1]))
        assert torch.isfinite(technique.loss(out.loss, context))


class TestRefusals:
    def test_class_counts_at_attach(self):
        with pytest.raises(ConfigError, match="teacher must have as many classes as the student, 2, got 5"):
            attached(bert(), bert(num_labels=5))
        with pytest.raises(ConfigError, match="teacher must have as many classes as the student, 17, got 23"):
            attached(llama(), llama(vocab_size=23))

    def test_class_counts_at_the_first_batch(self):
        technique, context = attached(mlp(), mlp(16, classes=4))
        with pytest.raises(ConfigError, match="teacher must have as many classes as the student, 3, got 4"):
            technique.loss(context.model(torch.randn(2, 4)).sum(), context)

    def test_regression_needs_logit_mse(self):
        with pytest.raises(ConfigError, match="the student must classify into single labels, got problem_type 'regr"):
            attached(bert(problem_type="regression"), bert())
        with pytest.raises(ConfigError, match="problem_type 'multi_label_classification'"):
            attached(bert(), bert(problem_type="multi_label_classification"))
        technique, context = attached(mlp(classes=1), mlp(16, classes=1))
        with pytest.raises(ConfigError, match="logit_mse for regression"):
            technique.loss(context.model(torch.randn(2, 4)).sum(), context)

    @pytest.mark.parametrize(
        ("labels", "way_out"),
        [
            (torch.zeros(2, 3), "bernoulli_kl for multi-label targets"),
            (torch.zeros(2), "logit_mse for regression"),
            (torch.zeros(3, dtype=torch.long), "CTC"),
            ("x", "boxes"),
        ],
    )
    def test_labels_that_are_no_class_indices(self, labels, way_out):
        with pytest.raises(ConfigError, match=rf"labels must be class indices of shape \(2,\).*{way_out}"):
            counted_positions(torch.zeros(2, 3), labels, None, causal=False)


def test_a_teacher_of_another_dtype():
    student, teacher = llama(), llama(16, seed=1).bfloat16()
    technique, context = attached(student, teacher)
    ids = torch.randint(VOCAB, (2, 5))
    loss = technique.loss(student(input_ids=ids, labels=ids).loss, context)
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)


def test_which_models_are_causal():
    assert is_causal(llama())
    assert is_causal(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2)))
    assert is_causal(bert(BertLMHeadModel, is_decoder=True))
    assert not is_causal(bert(BertForMaskedLM))
    assert not is_causal(bert(BertForTokenClassification))
    assert not is_causal(mlp())
    t5 = T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    assert not is_causal(T5ForConditionalGeneration(t5))


def test_positions_count_by_labels_or_mask():
    logits = torch.zeros(2, 4, 3)
    labels = torch.tensor([[-100, 1, 2, -100], [0, 1, -100, 2]])
    plain = counted_positions(logits, labels, None, causal=False)
    shifted = counted_positions(logits, labels, None, causal=True)
    assert plain.tolist() == [[False, True, True, False], [True, True, False, True]]
    assert shifted.tolist() == [[True, True, False, False], [True, False, True, False]]
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    assert counted_positions(logits, None, mask, causal=False).tolist() == mask.bool().tolist()
    assert counted_positions(logits, None, mask, causal=True).sum(1).tolist() == [2, 3]
    assert counted_positions(logits, None, None, causal=True).sum(1).tolist() == [3, 3]
    assert counted_positions(logits, None, None, causal=False) is None
    assert counted_positions(torch.zeros(2, 3), None, mask, causal=False) is None


def window_normalizer(count):
    return lambda total, _: total / count


class TestAccumulation:
    @pytest.mark.parametrize("kind", ["llama", "tokens", "classes"])
    def test_any_split_of_a_window_has_the_same_gradient(self, kind):
        torch.manual_seed(3)
        ids = torch.randint(VOCAB, (8, 9))
        attention = torch.ones_like(ids)
        if kind == "classes":
            labels = torch.tensor([0, 1, 0, 1, 0, 0, 1, 1])
            student, teacher = bert(), bert(hidden=16, seed=1)
        else:
            labels = torch.randint(2, ids.shape) if kind == "tokens" else ids.clone()
            for row, length in enumerate((9, 2, 5, 3, 8, 1, 4, 7)):  # ragged: equal lengths would hide the fault
                labels[row, length:], attention[row, length:] = -100, 0
                labels[row, : length // 3] = -100
            pair = (llama(), llama(16, seed=1)) if kind == "llama" else (
                bert(BertForTokenClassification), bert(BertForTokenClassification, 16, 1))  # fmt: skip
            student, teacher = pair
        for module in student.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        shift = slice(1, None) if kind == "llama" else slice(None)
        window = (labels[..., shift] != -100).sum() if labels.ndim == 2 else (labels != -100).sum()
        gradients = []
        for size in (8, 4, 2, 1):
            technique, context = attached(student, teacher, alpha=0.4)
            context.normalize = window_normalizer(window)
            student.zero_grad()
            student.train()
            for part in torch.arange(8).split(size):
                out = student(input_ids=ids[part], attention_mask=attention[part], labels=labels[part])
                logits, target = out.logits, labels[part]
                if kind == "llama":
                    logits, target = logits[:, :-1], target[:, 1:]
                task = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction="sum")
                technique.loss(task / window, context).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]))
            assert technique.report()["positions"] == window
            context.undo.close()
        assert gradients[0].abs().max() > 1e-4
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("labeled", [True, False])
    def test_padding_never_changes_the_loss(self, labeled):
        student, teacher = llama(), llama(16, seed=1)
        ids = torch.randint(VOCAB, (3, 6))
        losses = []
        for pad in (0, 4):
            technique, context = attached(student, teacher, alpha=0.0)
            padded, attention = F.pad(ids, (0, pad), value=0), F.pad(torch.ones_like(ids), (0, pad))
            labels = {"labels": F.pad(ids, (0, pad), value=-100)} if labeled else {}
            student(input_ids=padded, attention_mask=attention, **labels)
            losses.append(technique.loss(torch.zeros((), requires_grad=True), context))
            assert technique.report()["positions"] == 15
            context.undo.close()
        torch.testing.assert_close(losses[0], losses[1])

    def test_a_micro_batch_without_labels_to_count(self):
        student, teacher = llama(), llama(16, seed=1)
        technique, context = attached(student, teacher, alpha=0.0)
        assert context.normalize is mean_over_micro_batch
        ids = torch.randint(VOCAB, (2, 5))
        student(input_ids=ids, labels=torch.full_like(ids, -100))
        loss = technique.loss(torch.zeros((), requires_grad=True), context)
        loss.backward()
        assert loss.item() == 0.0
        assert all(p.grad is None or not p.grad.any() for p in student.parameters())
        assert technique.figures()["distill/soft_loss"] == 0.0


def test_a_teacher_gets_the_decoder_inputs_that_whisper_makes_of_its_labels():
    sizes = {
        "vocab_size": VOCAB, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "num_mel_bins": 4,
        "max_source_positions": 8, "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval()
    inputs = {"input_features": torch.randn(2, 4, 16), "labels": torch.tensor([[3, 4, 2], [3, 2, -100]])}
    output = model(**inputs)
    taught = ask_teacher(model, model, Forward((), inputs, output))
    torch.testing.assert_close(taught.logits, output.logits)


class Around(nn.Module):
    """A user's wrapper, which may show the configuration of the model inside."""

    def __init__(self, model, shows_config=False):
        super().__init__()
        self.inner = model
        if shows_config:
            self.config = model.config

    def forward(self, **batch):
        return self.inner(**batch)


def with_adapters(model):
    model.requires_grad_(True)
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)  # of no task: a plain PeftModel
    return peft.get_peft_model(model, lora)


def beside_a_judge(model):
    around = Around(model)
    around.judge = bert(BertModel).requires_grad_(False)
    return around


WRAPPED = {
    "module": Around,
    "module in a module": lambda model: Around(Around(model)),
    "with the configuration": lambda model: Around(model, shows_config=True),
    "beside a frozen model": beside_a_judge,
}


def t5(seed):
    torch.manual_seed(seed)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=24, decoder_start_token_id=0, **sizes))


def llamas(wrap=lambda model: model):
    # The Trainer (transformers 5.23) counts a wrapper's labels as they are, for its own loss: so without that.
    return wrap(language_runs.llama(0)), {"teacher": wrap(language_runs.llama(1, 3)), "alpha": 0.0}


def adapters(wrap=lambda model: model, **options):
    torch.manual_seed(0)
    taught = {"teacher": language_runs.llama(1, 3), "alpha": 0.2, **options}
    return wrap(with_adapters(language_runs.llama(0))), taught


def delegating(student):
    return language_runs.llama(0), {"teacher": language_runs.llama(1, 3), "alpha": 0.2, "student": student}


def encoder_decoders(wrap=lambda model: model):
    return wrap(t5(0)), {"teacher": wrap(t5(1)), "alpha": 0.2}


# how each front end trains a model by itself, and in what it must take for the same
ALIKE = {
    **{f"{front_end}, {kind}": (front_end, llamas, lambda wrap=wrap: llamas(wrap))
       for kind, wrap in WRAPPED.items() for front_end in ("bare", "hf")},
    "adapters of no task": ("bare", lambda: adapters(causal=True), lambda: adapters(Around)),
    "a module that delegates": ("lightning", lambda: delegating("net"), lambda: delegating(None)),
    "an encoder-decoder in a wrapper": ("bare", encoder_decoders, lambda: encoder_decoders(Around)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIKE)
def test_a_wrapped_model_is_distilled_as_the_model_inside(kind, tmp_path):
    front_end, *both = ALIKE[kind]
    window, found = language_runs.cut(language_runs.documents(), 3, language_runs.padded), []
    for made in both:
        student, options = made()
        gradients = language_runs.gradients(front_end, student, {"distill": options}, window, tmp_path)[0]
        found.append({name.replace("inner.", ""): value for name, value in gradients.items()})
    assert language_runs.relative(*found) < 1e-6


def test_a_wrapper_of_models_that_disagree_asks(tmp_path):
    student = Around(language_runs.llama(0))
    student.encoder = bert(BertModel)
    recipe = {"distill": {"teacher": language_runs.llama(1), "alpha": 0.2}}
    with pytest.raises(ConfigError, match="causal must be given for Around, got none: it holds LlamaForCausalLM"):
        language_runs.gradients("bare", student, recipe, (), tmp_path)


class OwnDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(24, 8), nn.Linear(8, 24))

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.net(input_ids)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def test_a_decoder_of_the_users_own_is_asked_for_at_the_first_batch(tmp_path):
    window = language_runs.cut(language_runs.documents(), 3, language_runs.padded)
    for causal in (None, True, False):
        recipe = {"distill": {"teacher": OwnDecoder(), "alpha": 0.2, "causal": causal}}
        refused = pytest.raises(ConfigError, match="causal must be given for OwnDecoder, got none")
        with refused if causal is None else contextlib.nullcontext():
            language_runs.gradients("bare", OwnDecoder(), recipe, window, tmp_path)
