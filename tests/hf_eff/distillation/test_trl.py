"""Distillation in TRL's SFTTrainer, which fuses its head: against the formula in float64, and against logits."""

import functools

import pytest
import torch
from datasets import Dataset
from hf_gradients import ALPHA, Gradients, T, distance, reference
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from trl_trainers import rows_of, sft

from hf_eff import attach
from shared_core.errors import CompatibilityError


def uneven(make):
    return [{name: value[: 8 - index % 4] for name, value in text.items()} for index, text in enumerate(make.texts(8))]


def gradients(trainer, teacher, alpha=ALPHA, **distill):
    """The gradients of a trainer's first step."""
    found = Gradients()
    trainer.add_callback(found)
    attach(trainer, {"distill": {"teacher": teacher, "temperature": T, "alpha": alpha, **distill}})
    trainer.train()
    return found.first


def step(make, folder, size=4, windows=2, **settings):
    return sft(
        make, folder, per_device_train_batch_size=size, gradient_accumulation_steps=windows, max_steps=1,
        max_grad_norm=0.0, optim="sgd", logging_steps=1, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "distill"),
    [
        ({}, {}),
        ({"size": 8, "windows": 1}, {}),
        ({"size": 1, "windows": 8}, {"chunked": True, "budget_mib": 2 * 8 * 24 * 4 / 2**20}),
        ({}, {"divergence": "soft_cross_entropy"}),  # from logits
        ({"gradient_checkpointing": True}, {}),
        ({"padding_free": True}, {}),
        ({"size": 1, "windows": 4, "packing": True, "max_length": 16}, {}),
    ],
)
def test_gradients_are_those_of_the_formula(make, tmp_path, settings, distill):
    texts, teacher = uneven(make), make.language_model(seed=5, hidden_size=32)
    trainer = step(make, tmp_path, data=rows_of(texts), model=make.language_model(), **settings)
    assert distance(reference(make, texts=texts), gradients(trainer, teacher, **distill)) < 1e-6


def logged(trainer, **recipe):
    if recipe:
        attach(trainer, recipe)
    trainer.train()
    return trainer.state.log_history, [weight.clone() for weight in trainer.model.parameters()]


@pytest.mark.parametrize("distill", [{"alpha": 1.0}, {"begin": 3}])
@pytest.mark.parametrize("settings", [{}, {"loss_type": "dft"}, {"packing": True, "max_length": 16}])
def test_without_weight_the_run_is_that_of_trl_bit_for_bit(make, tmp_path, distill, settings):
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 1,
                **settings}  # fmt: skip
    teacher = make.language_model(seed=5)
    plain, expected = logged(sft(make, tmp_path / "plain", **settings))
    ours, found = logged(sft(make, tmp_path / "ours", **settings), distill={"teacher": teacher, **distill})
    assert all(map(torch.equal, expected, found))
    for mine, its in zip(ours[:3], plain[:3], strict=True):
        assert its.items() <= mine.items()


SMALL = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16}  # fmt: skip


def model_of(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "caps":
        return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.3))
    if kind == "scales":
        return CohereForCausalLM(CohereConfig(**SMALL, logit_scale=3.0))
    experts = MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, output_router_logits=True)
    return MixtralForCausalLM(experts)


@pytest.mark.parametrize("kind", ["caps", "scales", "experts", "dft", "padded"])
def test_terms_add_up_whatever_the_model_makes_of_its_logits(make, tmp_path, kind):
    def model(seed=0):
        return make.language_model(seed) if kind in ("dft", "padded") else model_of(kind, seed)

    def terms(alpha):
        settings = {"loss_type": "dft"} if kind == "dft" else {}
        trainer = step(make, tmp_path, model=model(), data=rows_of(make.texts(8)), **settings)
        return gradients(trainer, teacher, alpha, **options)

    def soft():
        trainer = make.trainer(
            tmp_path, model=model(), data=make.texts(8), max_steps=1, max_grad_norm=0.0, optim="sgd",
            gradient_accumulation_steps=2,
        )  # fmt: skip
        return gradients(trainer, teacher, 0.0, **options)

    teacher = make.language_model(5, vocab_size=30) if kind == "padded" else model(5)
    options = {"vocab_size": 20} if kind == "padded" else {}
    task, both, alone = terms(1.0), terms(ALPHA), soft()
    expected = {name: ALPHA * task[name] + (1 - ALPHA) * alone[name] for name in alone}
    assert distance(expected, both) < 2e-6


class Products(TorchDispatchMode):
    """Counts matrix products with the student's head, or its gradient."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            sizes = {size for value in args if isinstance(value, torch.Tensor) for size in value.shape}
            self.count += {24, 16} <= sizes
        return func(*args, **(kwargs or {}))


def test_one_pass_through_the_head_gives_both_gradients(make, tmp_path):
    trainer = step(make, tmp_path, 8, 1, data=rows_of(make.texts(8)))
    with Products() as products:
        gradients(trainer, make.language_model(seed=5, hidden_size=32))
    assert products.count == 4  # the first is TRL's, for the value and its own figures


def test_prompts_and_what_no_assistant_said_do_not_count(make, tmp_path):
    data = Dataset.from_dict({"prompt": ["1 2 3 ", "4 5 "], "completion": ["6 7", "8 9 10"]})
    trainer = step(make, tmp_path, 2, 1, data=data)
    texts = [{name: torch.tensor(row[name]) for name in ("input_ids", "labels")} for row in trainer.train_dataset]
    assert [text["labels"].tolist().count(-100) for text in texts] == [3, 2]
    found = gradients(trainer, make.language_model(seed=5, hidden_size=32))
    assert distance(reference(make, texts=texts), found) < 1e-6


@pytest.mark.parametrize("teacher", ["self", "ema", "model"])
@pytest.mark.parametrize("adapters", [False, True])
def test_runs_as_the_stock_trainer_does_from_logits(make, tmp_path, teacher, adapters):
    """Also where the model is copied, wrapped, and under autocast."""
    texts = make.texts(8)
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True,
                "optim": "sgd", "learning_rate": 0.5}  # fmt: skip
    told = {"teacher": make.language_model(seed=5) if teacher == "model" else teacher}
    told |= {"ema_decay": 0.5} if teacher == "ema" else {}

    def trained(build, data):
        model = make.language_model()
        if adapters:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
        trainer = build(tmp_path, model=model, data=data, **settings)
        attach(trainer, {"distill": {"temperature": T, "alpha": ALPHA, **told}})
        trainer.train()
        return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}

    stock, fused = trained(make.trainer, texts), trained(functools.partial(sft, make), rows_of(texts))
    assert distance(stock, fused) < 5e-3  # the stock trainer's logits are bf16's


def test_resumes_exactly(make, tmp_path):
    def run(folder, resume=None, **settings):
        trainer = sft(
            make, folder, max_steps=4, save_strategy="steps", save_steps=2, per_device_train_batch_size=1,
            packing=True, max_length=16, gradient_accumulation_steps=2, **settings,
        )  # fmt: skip
        attach(trainer, {"distill": {"teacher": teacher}})
        trainer.train(resume_from_checkpoint=resume)
        return [weight.clone() for weight in trainer.model.parameters()]

    teacher = make.language_model(seed=5)
    whole = run(tmp_path)
    assert all(map(torch.equal, whole, run(tmp_path, str(tmp_path / "checkpoint-2"))))


def test_what_cannot_be_is_refused_at_start(make, tmp_path):
    def build(options, **settings):
        attach(sft(make, tmp_path, **settings), {"distill": {"teacher": make.language_model(seed=5), **options}})

    for options in ({"teacher": "mutual"}, {"student": "model"}):
        with pytest.raises(CompatibilityError, match=r"mutual.*SFTTrainer.* got m"):
            build(options)
    with pytest.raises(CompatibilityError, match=r"torch_compile must be False .* TRL's SFTTrainer, got True"):
        build({}, torch_compile=True)
