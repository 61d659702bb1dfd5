"""`distill.chunked`: the same losses and gradients as with logits, on real models, without a tensor of their size."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from distillation_steps import attached
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from shared_core.distillation.deferred_logits import DeferredLogits
from shared_core.errors import ConfigError, TrainingError

VOCAB = 61
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KEYS = {"num_key_value_heads": 2, "head_dim": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAKE = {
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**{**SIZES, **KEYS, "vocab_size": VOCAB, **o})),
    "gpt2": lambda **o: GPT2LMHeadModel(
        GPT2Config(
            **{"vocab_size": VOCAB, "n_embd": o.pop("hidden_size", 8), "n_layer": 1, "n_head": 2, **SPECIAL, **o}
        )
    ),
    "gemma2": lambda **o: Gemma2ForCausalLM(
        Gemma2Config(**{**SIZES, **KEYS, "vocab_size": VOCAB, "final_logit_softcapping": 0.5, **o})
    ),
    "granite": lambda **o: GraniteForCausalLM(
        GraniteConfig(**{**SIZES, **KEYS, "vocab_size": VOCAB, "logits_scaling": 3.0, **SPECIAL, **o})
    ),
    "t5": lambda **o: T5ForConditionalGeneration(
        T5Config(**{"vocab_size": VOCAB, "d_model": o.pop("hidden_size", 8), "d_kv": 4, "d_ff": 16, "num_layers": 1,
                    "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0, **o})
    ),
    "bart": lambda **o: BartForConditionalGeneration(
        BartConfig(**{"vocab_size": VOCAB, "d_model": o.pop("hidden_size", 8), "encoder_layers": 1, "decoder_layers": 1,
                      "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
                      "decoder_ffn_dim": 16, "dropout": 0.0, **SPECIAL, "decoder_start_token_id": 2, **o})
    ),
    "bert": lambda **o: BertForMaskedLM(BertConfig(**{**SIZES, "vocab_size": VOCAB, **o})),
}  # fmt: skip
SMALL = {"budget_mib": 2 * 8 * VOCAB * 4 / 2**20}  # chunks of 8 rows


def make(kind, seed=0, **options):
    torch.manual_seed(seed)
    model = MAKE[kind](**options).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name or "head" in name or "shared" in name:
                tensor.add_(torch.randn_like(tensor), alpha=0.3)  # heads that differ, biases that are not zero
    return model


def batch(rows=4, length=7, seed=5):
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length))
    labels = ids.clone()
    labels[0, 3:] = labels[2, :5] = -100  # ragged
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step(model, teacher, inputs, forward=None, **options):
    """Loss and gradients of one distilled step."""
    technique, context = attached(model, teacher, **options)
    try:
        task = forward(model, inputs) if forward else model(**inputs).loss
        loss = technique.loss(task, context)
        loss.backward()
    finally:
        context.undo.close()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return loss.detach(), grads, task.detach()


def assert_same(got, expected, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(got[0], expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(got[2], expected[2], rtol=rtol, atol=atol)
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(
            got[1][name], grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name} {text}"
        )


def divided_in_place(logits):
    logits = 2.0 * logits.clone()
    logits /= 3
    logits.mul_(2).div_(5.0)
    logits += torch.ones(VOCAB)
    return logits


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def assert_alike(student, teacher, inputs, forward=None, **options):
    """One step with logits and one without give the same."""
    expected = step(student, teacher, inputs, forward, **options)
    assert_same(step(student, teacher, inputs, forward, chunked=True, **SMALL, **options), expected)


class TestSameAsWithLogits:
    @pytest.mark.parametrize("kind", MAKE)
    @pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": torch.tensor(50)}], ids=["mean", "items"])
    def test_every_model_gives_the_loss_of_whole_logits(self, kind, extra):
        if extra and kind in ("t5", "bart", "bert"):
            extra = {}
        assert_alike(make(kind), make(kind, 1, hidden_size=16), batch() | extra, alpha=0.3, temperature=3.0)

    @pytest.mark.parametrize(
        "options",
        [
            *({"alpha": a, "divergence": d, "beta": 0.3, "scale_by_temperature": False}
              for a in (0.0, 1.0) for d in ("reverse_kl", "jsd")),
            {"teacher": "ema"},
            {"hidden": ["model.norm=model.norm"]},
        ],
    )  # fmt: skip
    def test_every_option_gives_the_loss_of_whole_logits(self, options):
        options = dict(options)
        assert_alike(make("llama"), options.pop("teacher", None) or make("llama", 1), batch(), **options)

    def test_cut_batches_add_up(self):
        student, teacher, whole = make("gpt2"), make("gpt2", 1), batch()
        items = (whole["labels"][:, 1:] != -100).sum()

        def run(size):
            technique, context = attached(student, teacher, chunked=True, alpha=0.3, **SMALL)
            context.normalize = lambda total, count: total / items
            for first in range(0, 4, size):
                part = {name: value[first : first + size] for name, value in whole.items()}
                technique.loss(student(**part, num_items_in_batch=items).loss, context).backward()
            context.undo.close()
            grads = [parameter.grad.clone() for parameter in student.parameters()]
            student.zero_grad()
            return grads

        for one, four in zip(run(4), run(1), strict=True):
            torch.testing.assert_close(one, four, rtol=1e-5, atol=1e-6)

    def test_no_row_counts(self):
        student, teacher = make("llama"), make("llama", 1)
        inputs = batch()
        inputs["labels"][:] = -100
        _, grads, _ = step(student, teacher, inputs | {"num_items_in_batch": 3}, chunked=True)
        assert all(not grad.any() for grad in grads.values())

    @pytest.mark.parametrize("logits_to_keep", [3, torch.tensor([1, 4, 6])], ids=["last", "chosen"])
    def test_logits_of_some_positions_give_the_same_loss(self, logits_to_keep):
        inputs = batch() | {"logits_to_keep": logits_to_keep}
        inputs["labels"] = inputs["labels"][:, -3:]
        assert_alike(make("llama"), make("llama", 1), inputs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_gives_the_same_loss(self, dtype):
        student, teacher = make("llama"), make("llama", 1)

        with torch.autocast("cpu", dtype):
            expected = step(student, teacher, batch())
            got = step(student, teacher, batch(), chunked=True, **SMALL)
        assert_same(got, expected, rtol=0.1, atol=2e-3)
        torch.testing.assert_close(got[2], expected[2], rtol=1e-3, atol=1e-3)

    def test_checkpointed_layers_give_the_same_step(self):
        student, teacher = make("llama"), make("llama", 1)
        expected = step(student, teacher, batch())
        student.gradient_checkpointing_enable()
        assert_same(step(student, teacher, batch(), chunked=True, **SMALL), expected)

    @pytest.mark.parametrize(
        "of_logits",
        [
            lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
            lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y, reduction="none").mean(1).sum(),
            lambda z, y: F.cross_entropy(z[y != -100], y[y != -100], label_smoothing=0.2),
            lambda z, y: F.cross_entropy(
                z[..., :-1, :].reshape(-1, VOCAB),
                y[:, 1:].reshape(-1),
                torch.linspace(0.5, 2, VOCAB),
                label_smoothing=0.1,
            ),
            lambda z, y: nn.CrossEntropyLoss(torch.linspace(0, 2, VOCAB), ignore_index=9)(
                (2.0 * z.float() / torch.tensor(3.0)).flatten(0, 1), y.abs().flatten() % VOCAB
            ),
            lambda z, y: F.cross_entropy(
                (4 * torch.tanh(0.5 * z[:2, 1:] + torch.linspace(0, 1, VOCAB))).view(-1, VOCAB),
                y[:2, 1:].flatten(),
                reduction="sum",
            ),
            lambda z, y: F.cross_entropy(input=divided_in_place(z).view(-1, VOCAB), target=y.view(-1)),
        ],
        ids=["transposed", "rows", "selected", "smoothed", "weighted", "capped", "in_place"],
    )  # fmt: skip
    def test_losses_of_ones_own(self, of_logits):
        def forward(model, inputs):
            return of_logits(model(**inputs).logits, inputs["labels"])

        assert_alike(make("bert"), make("bert", 1), batch(), forward, alpha=0.7)


class TestWithoutLogits:
    def largest(self, kind, **options):
        student, teacher, inputs = make(kind, vocab_size=1000), make(kind, 1, vocab_size=1000), batch(8, 40)
        technique, context = attached(student, teacher, **options)
        with LargestTensor() as largest:
            technique.loss(student(**inputs).loss, context).backward()
        context.undo.close()
        return largest.numel, technique.report()

    @pytest.mark.parametrize("kind", MAKE)
    def test_no_tensor_of_their_size(self, kind):
        whole, _ = self.largest(kind)
        assert whole >= 8 * 40 * 1000
        chunked, report = self.largest(kind, chunked=True, budget_mib=0.0625)
        assert chunked < 8 * 40 * 1000 / 10
        assert (report["chunk_rows"], report["logits_mib"]) == (8, 0.1)
        assert "never of all" in report["logits"]

    def test_only_in_training_steps(self):
        student, teacher = make("gemma2"), make("gemma2", 1)
        technique, context = attached(student, teacher, chunked=True, begin=1)
        inputs = batch()
        real = student(**inputs).logits  # before begin
        assert type(real) is torch.Tensor
        context.step = 1
        technique.after_step(context, True)
        logits = student(**inputs).logits
        assert type(logits) is DeferredLogits
        assert logits.shape == real.shape
        with torch.no_grad():
            assert torch.equal(student(**inputs).logits, real)
        assert torch.equal(student.eval()(**inputs).logits, real)
        assert student.generate(inputs["input_ids"][:1], max_new_tokens=2).shape[1] == 9
        for copied in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
            assert type(copied.lm_head) is nn.Linear
            assert torch.equal(copied.train()(**inputs).logits, real)
        keys = student.state_dict().keys()
        context.undo.close()
        assert {type(student.lm_head), type(teacher.lm_head)} == {nn.Linear}
        assert student.state_dict().keys() == keys == make("gemma2").state_dict().keys()
        assert not {"when", "budget"} & vars(student.lm_head).keys()


class TestRefusals:
    @pytest.mark.parametrize(
        "use",
        [
            lambda z: z.argmax(-1), lambda z: z.softmax(-1), lambda z: z[..., 0], lambda z: z[:, :, 3:],
            lambda z: z + 1,
            lambda z: z.mT, lambda z: z.tolist(), lambda z: z * torch.ones(VOCAB), lambda z: torch.stack([z]),
            lambda z: F.log_softmax(z, -1), lambda z: z.view(-1), lambda z: z.sum(), lambda z: z[..., None],
        ],
    )  # fmt: skip
    def test_numbers_are_asked_for(self, use):
        student = make("llama")
        _, context = attached(student, make("llama", 1), chunked=True)
        logits = student(**batch()).logits
        with pytest.raises(TrainingError, match="compute metrics in evaluation"):
            use(logits)
        context.undo.close()

    def test_targets_that_are_no_classes(self):
        student = make("llama")
        attached(student, make("llama", 1), chunked=True)
        logits = student(**batch()).logits.view(-1, VOCAB)
        with pytest.raises(ConfigError, match=r"class indices.* rows? .*\(28,\)"):
            F.cross_entropy(logits, torch.zeros(27, dtype=torch.long))
        with pytest.raises(ConfigError, match="class indices"):
            F.cross_entropy(logits, torch.zeros(28, VOCAB))

    def test_heads_that_are_not_plain(self):
        class Scaled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        student, teacher = make("llama"), make("llama", 1)
        student.lm_head = Scaled(8, VOCAB, bias=False)
        with pytest.raises(ConfigError, match=r"student's output head to be a plain nn.Linear, got Scaled"):
            attached(student, teacher, chunked=True)
        teacher.lm_head.register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError, match=r"teacher's output head .* hooks"):
            attached(make("llama"), teacher, chunked=True)
        with pytest.raises(ConfigError, match=r"one output head .* got 0 from Linear"):
            attached(nn.Linear(2, 3), make("llama"), chunked=True)
        compiled = make("llama")
        compiled.model.compile()
        with pytest.raises(ConfigError, match=r"torch.compile"):
            attached(compiled, make("llama"), chunked=True)
        assert type(compiled.lm_head) is nn.Linear

    def test_logits_that_were_computed(self):
        class Bypass(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = make("llama")

            def forward(self, **inputs):
                return {"logits": F.linear(self.net.model(inputs["input_ids"])[0], self.net.lm_head.weight)}

        student = Bypass()
        technique, context = attached(student, make("llama", 1), chunked=True)
        student(**batch())
        with pytest.raises(TrainingError, match="with chunked the"):
            technique.loss(torch.ones((), requires_grad=True), context)
