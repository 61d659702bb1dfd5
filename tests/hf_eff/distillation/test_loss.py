"""KD through the trainer: its gradient is that of the whole window, however it is cut into micro-batches."""

import pytest
import torch
from hf_gradients import Gradients, T, distance, first_gradients, reference
from torch.nn import functional as F

from hf_eff import Distillation, attach


class NoKeywords(torch.nn.Module):
    """A model whose forward takes no further keywords: the trainer then counts nothing and averages micro-batches."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config = model, model.config

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        out = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        logits = out.logits.float()
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 24), labels[:, 1:].reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(("size", "windows"), [(8, 1), (4, 2), (1, 8)])
def test_gradients_do_not_depend_on_accumulation(make, tmp_path, size, windows):
    assert distance(reference(make), first_gradients(make, tmp_path, size, windows)) < 1e-5


@pytest.mark.parametrize(("size", "windows"), [(8, 1), (2, 4), (1, 8)])
def test_label_smoothing_keeps_working(make, tmp_path, size, windows):
    found = first_gradients(make, tmp_path, size, windows, label_smoothing_factor=0.2)
    assert distance(reference(make, smoothing=0.2), found) < 1e-5


@pytest.mark.parametrize(("size", "windows"), [(8, 1), (2, 4), (1, 8)])
def test_the_soft_term_is_averaged_over_the_window_where_the_trainer_counts_nothing(make, tmp_path, size, windows):
    def gradients(told, shifts=False):
        seen = Gradients()
        trainer = make.trainer(
            tmp_path / str(told), model=NoKeywords(make.language_model()), data=make.texts(8), callbacks=[seen],
            per_device_train_batch_size=size, gradient_accumulation_steps=windows, max_steps=1, max_grad_norm=0.0,
            optim="sgd", remove_unused_columns=False,
        )  # fmt: skip
        trainer._loss_shifts_labels = shifts
        attach(trainer, {"distill": {
            "teacher": make.language_model(seed=5, hidden_size=32), "temperature": T, "alpha": 0.0, "causal": told,
        }})  # fmt: skip
        trainer.train()
        return {name.removeprefix("inner."): value for name, value in seen.first.items()}

    expected = reference(make, alpha=0.0)
    # the model inside the wrapper tells that it is causal
    assert distance(expected, gradients(None)) < 1e-5
    assert distance(expected, gradients(True, shifts=True)) < 1e-5
    assert distance(expected, gradients(False)) > 1e-3


def test_evaluation_is_the_tasks_own(make, tmp_path):
    plain = make.trainer(tmp_path / "plain")
    trainer = make.trainer(tmp_path / "kd", callbacks=[Distillation(teacher=make.classifier(seed=9, hidden_size=32))])
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_teacher_errors_come_at_start(make, tmp_path):
    from shared_core.errors import CheckpointError, ConfigError

    def attempt(teacher):
        attach(make.trainer(tmp_path / "run"), {"distill": {"teacher": str(teacher)}})

    with pytest.raises(CheckpointError, match=r"existing folder.*nowhere"):
        attempt(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        attempt(tmp_path / "empty")
    make.classifier(num_labels=7).save_pretrained(tmp_path / "seven")
    with pytest.raises(ConfigError, match="student, 4, got 7"):
        attempt(tmp_path / "seven")
    weights = tmp_path / "seven" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="seven"):
        attempt(tmp_path / "seven")
    make.classifier().bert.save_pretrained(tmp_path / "headless")
    config = tmp_path / "headless" / "config.json"
    config.write_text(config.read_text().replace("BertModel", "BertForSequenceClassification"))
    with pytest.raises(CheckpointError, match=r"no classifier\.bias"):
        attempt(tmp_path / "headless")


def test_loading_a_teacher_draws_no_random_numbers(make, tmp_path):
    folder = make.teacher(tmp_path / "teacher")
    trainer = make.trainer(tmp_path / "run")
    before = torch.get_rng_state()
    attach(trainer, {"distill": {"teacher": folder}})
    assert torch.equal(before, torch.get_rng_state())


def test_a_folder_without_a_config_is_an_earlier_state_of_the_student(make, tmp_path):
    from safetensors.torch import save_file

    from shared_core.errors import CheckpointError

    earlier, results = make.classifier(seed=9), []
    (tmp_path / "earlier").mkdir()
    save_file(earlier.state_dict(), tmp_path / "earlier" / "model.safetensors")
    for teacher in (str(tmp_path / "earlier"), earlier):
        trainer = make.trainer(tmp_path / "run", max_steps=2)
        attach(trainer, {"distill": {"teacher": teacher, "alpha": 0.0}})
        trainer.train()
        results.append(trainer.model.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    save_file({"classifier.bias": torch.zeros(4)}, tmp_path / "earlier" / "model.safetensors")
    with pytest.raises(CheckpointError, match="of a BertForSequenceClassification of the student's shape, got missing"):
        attach(make.trainer(tmp_path / "run"), {"distill": {"teacher": str(tmp_path / "earlier")}})


def test_prompts_before_the_tokens_are_refused_and_prefixes_are_not(make, tmp_path):
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    from shared_core.errors import CompatibilityError

    def trainer(prompts):
        model = get_peft_model(make.language_model(), prompts(task_type="CAUSAL_LM", num_virtual_tokens=3))
        return make.trainer(tmp_path, model=model, data=make.texts(), max_steps=1)

    recipe = {"distill": {"teacher": make.language_model(seed=9)}}
    with pytest.raises(CompatibilityError, match=r"PROMPT_TUNING adds 3 tokens.*prefix tuning"):
        attach(trainer(PromptTuningConfig), recipe)
    prefixed = trainer(PrefixTuningConfig)
    attach(prefixed, recipe)
    prefixed.train()
