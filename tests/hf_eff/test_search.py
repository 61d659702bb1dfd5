"""Hyperparameter search and flags that change after the trainer is there. optuna is not needed: its loop is short."""

from types import SimpleNamespace

import pytest
from accelerate.utils.memory import release_memory
from transformers.trainer_utils import HPSearchBackend

from hf_eff import EffTrainer, EffTrainingArguments, Pruning, QuantizationAwareTraining, attach
from shared_core.errors import ConfigError


def build(make, folder, **settings):
    return EffTrainer(
        model_init=lambda: make.classifier(),
        args=make.arguments(folder, arguments_class=EffTrainingArguments, max_steps=2, **settings),
        train_dataset=make.examples(),
    )


@pytest.fixture(autouse=True)
def _trials_of_our_own(monkeypatch):
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)


def search(trainer, trials):
    """Train as `hyperparameter_search` does, and return what each trial left of the receipt."""
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    trainer.hp_space = lambda trial: trial.params
    for number, params in enumerate(trials):
        trainer.train(trial=SimpleNamespace(number=number, params=params))
        yield trainer.session.receipt()
        trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
        trainer.accelerator.clear()


def test_each_trial_runs_with_its_own_flags(make, tmp_path):
    trainer = build(make, tmp_path, prune_sparsity=0.8, qat_scheme="int8")
    found = list(search(trainer, [{"prune_sparsity": 0.5}, {"prune_sparsity": 0.25, "learning_rate": 1e-3}]))
    assert [receipt["techniques"]["prune"]["sparsity"] for receipt in found] == pytest.approx([0.5, 0.25], abs=2e-3)
    assert [receipt["steps"]["applied"] for receipt in found] == [2, 2]
    assert all("qat" in receipt["techniques"] for receipt in found)
    assert all((tmp_path / f"run-{number}" / "eff_receipt.json").is_file() for number in range(2))


def test_each_trials_accelerator_unscales_once(make, tmp_path):
    trainer = build(make, tmp_path, fp16=True, loss_scale_kind="dynamic")
    found = list(search(trainer, [{}, {}]))
    assert [receipt["techniques"]["loss_scale"]["steps"] for receipt in found] == [2, 2]


def test_a_flag_that_changes_after_construction_counts(make, tmp_path):
    settings = {"trainer_class": EffTrainer, "arguments_class": EffTrainingArguments}
    trainer = make.trainer(
        tmp_path, prune_sparsity=0.8, callbacks=[QuantizationAwareTraining(scheme="int8")], **settings
    )
    trainer.args.prune_sparsity = 0.5
    trainer.train()
    assert list(trainer.session.recipe) == ["prune", "qat"]
    assert trainer.session.receipt()["techniques"]["prune"]["sparsity"] == pytest.approx(0.5, abs=2e-3)
    plain = make.trainer(tmp_path, **settings)
    plain.args.prune_sparsity = 0.5
    with pytest.raises(ConfigError, match=r"prune must be taken by the trainer.*changed after"):
        plain.train()


def test_a_session_is_the_trainers_after_others_joined(make, tmp_path):
    callback = QuantizationAwareTraining(scheme="int8")
    trainer = make.trainer(tmp_path, trainer_class=EffTrainer, callbacks=[callback])
    trainer.add_callback(Pruning(sparsity=0.5))
    assert attach(trainer, {"average": {"kind": "ema"}}) is trainer.session is callback.session
