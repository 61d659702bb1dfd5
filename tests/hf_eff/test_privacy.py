"""DP-SGD in the Trainer: labels by token, accumulation, refusals, what is logged."""

import copy
import math

import pytest
import torch
from promise_drivers import hf_trainer, run_hf
from promise_table import recipe_of, train_examples
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_eff import DifferentialPrivacy
from shared_core.engine.saving.state_file import load_state
from shared_core.errors import CompatibilityError, ConfigError

LENGTHS = (2, 6, 3, 5, 4, 6, 2, 3, 6, 4, 5, 3)


def sentences():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 20, (len(LENGTHS), 6), generator=generator)
    found = []
    for row, length in zip(rows, LENGTHS, strict=True):
        labels = row.clone()
        labels[length:] = -100
        found.append({"input_ids": row, "labels": labels})
    return found


def language_model():
    torch.manual_seed(0)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, **quiet))


def test_each_sentence_counts_by_the_mean_over_its_own_tokens(tmp_path):
    model = language_model()
    twin = copy.deepcopy(model).double()
    private = DifferentialPrivacy(noise_multiplier=0.0, max_grad_norm=0.8, seed=0, delta=1e-2)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=0.5,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=sentences(), callbacks=[private])
    trainer.train()
    batches = private.session.techniques["dp"]._batches
    assert batches.expected == 6
    assert math.isclose(batches.sample_rate, 0.5)
    total = [torch.zeros_like(parameter) for parameter in twin.parameters()]
    norms = []
    for index in batches.chosen(0):
        row = {name: value[None] for name, value in sentences()[index].items()}
        gradients = torch.autograd.grad(twin(**row).loss, list(twin.parameters()))
        norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += gradient * min(1.0, 0.8 / norms[-1])
    assert len(norms) > 2
    assert max(norms) > 0.8
    for parameter, expected, sum_ in zip(model.parameters(), twin.parameters(), total, strict=True):
        torch.testing.assert_close(parameter.double(), expected - 0.5 * sum_ / 6, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_gradients_that_autocast_rounds_are_known(make, tmp_path):
    private = DifferentialPrivacy(noise_multiplier=1.0, max_grad_norm=1.0)
    trainer = make.trainer(tmp_path, model=make.language_model(), data=make.texts(), callbacks=[private], bf16=True)
    trainer.train()
    assert private.session.receipt()["steps"]["applied"] == 8


def test_epsilon_is_logged_and_a_receipt_names_accountant_delta_and_sampling(tmp_path):
    trainer = hf_trainer(recipe_of("dp"), tmp_path, max_steps=3)
    trainer.train()
    logged = [entry["dp/epsilon"] for entry in trainer.state.log_history if "dp/epsilon" in entry]
    assert len(logged) == 3
    assert logged == sorted(set(logged))
    text = (tmp_path / "eff_receipt.json").read_text()
    assert all(f'"{word}"' in text for word in ("rdp", "poisson", "delta", "sample_rate"))


@pytest.mark.slow
def test_the_best_model_of_a_run_has_spent_what_the_run_spent(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "eval_strategy": "steps"}
    options = {"save_every": 2, "eval_steps": 2, "greater_is_better": True, **best}  # the worst, so an early one
    run = run_hf(recipe_of("dp"), tmp_path, **options)
    assert run.receipt["techniques"]["dp"]["steps"] == 8
    assert load_state(run.checkpoints[2])["techniques"]["dp"]["draws"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing must be off"),
        ({"torch_compile": True}, "torch_compile must be off"),
        ({"fp16": True}, "cannot be combined with fp16"),
        ({"batch_norm": True, "recipe": {"dp": {"noise_multiplier": 1.0}}}, r"norm \(BatchNorm2d\)"),
    ],
)
def test_what_breaks_the_guarantee_is_refused_before_training(options, says, tmp_path):
    recipe = options.pop("recipe", recipe_of("dp"))
    with pytest.raises(CompatibilityError, match=says):
        trainer = hf_trainer({}, tmp_path, **options)
        from hf_eff import attach

        attach(trainer, recipe)


class Stream(IterableDataset):
    def __iter__(self):
        yield from train_examples()


def test_a_stream_and_a_batch_beyond_the_data_are_refused(tmp_path):
    trainer = hf_trainer(recipe_of("dp"), tmp_path, batch=64)
    with pytest.raises(ConfigError, match="only 32"):
        trainer.train()
    trainer = hf_trainer(recipe_of("dp"), tmp_path)
    trainer.train_dataset = Stream()
    with pytest.raises(CompatibilityError, match="must be a data set with a length and an index, got Stream"):
        trainer.train()
