"""The best checkpoint of a Hugging Face training is one that holds what was asked for, and so is its metric."""

import json

import pytest
import torch
from promise_drivers import hf_trainer
from promise_table import PRUNE, REACHED_AT
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_every": 1}


class Worsens(TrainerCallback):
    """Each validation is worse than the one before: without a rule the first is the best."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_loss"] = float(state.global_step)


class StopsAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class CountsEvaluations(TrainerCallback):
    def __init__(self, trainer):
        self.count, evaluate = 0, trainer.evaluate

        def counted(*args, **kwargs):
            self.count += 1
            return evaluate(*args, **kwargs)

        trainer.evaluate = counted


def train(recipe, folder, *callbacks, **options):
    trainer = hf_trainer(recipe, folder, callbacks=callbacks, **options)
    counts = CountsEvaluations(trainer)
    trainer.train()
    return trainer, json.loads((folder / "eff_receipt.json").read_text()), counts.count


def evaluated(trainer):
    trainer.remove_callback(Worsens)
    return trainer.evaluate()["eval_loss"]


def sparsity(weights):
    return float((weights["hidden.weight"] == 0).double().mean())


def logged(trainer, step):
    return next(
        entry["eval_loss"] for entry in trainer.state.log_history if entry["step"] == step and "eval_loss" in entry
    )


@REACHED_AT
def test_the_best_is_the_first_that_holds_what_was_asked_for(recipe, first, tmp_path):
    trainer, receipt, evaluations = train(recipe, tmp_path, Worsens(), **BEST)
    assert trainer.state.best_global_step == first
    assert trainer.state.best_metric == first
    assert receipt["unreached"] == {}
    assert sum("not a candidate for the best" in note for note in receipt["notes"]) == 1
    assert receipt["steps"]["applied"] == 8
    assert evaluations == 10  # of a batch at the start, of each step, and of what was loaded after the last
    final = receipt["final_evaluation"]["eval_loss"]
    assert final == evaluated(trainer)
    if "qat" not in recipe:  # validation quantized activations too, which the plain model does not
        assert final == pytest.approx(logged(trainer, first), rel=1e-6)
    if "prune" in recipe:
        saved = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
        assert sparsity(saved) == sparsity(trainer.model.state_dict()) == pytest.approx(0.6, abs=0.06)


def test_early_stopping_waits_until_pruning_is_complete(tmp_path):
    trainer, receipt, _ = train(PRUNE, tmp_path, Worsens(), EarlyStoppingCallback(1), **BEST)
    assert trainer.state.global_step == 7
    assert trainer.state.best_global_step == 6
    assert receipt["unreached"] == {}
    assert any(note == "steps: 7 were applied, 8 were planned" for note in receipt["notes"])


@pytest.mark.parametrize("recipe", [PRUNE, {"qat": {"scheme": "int8", "begin": 6}}], ids=["prune", "qat"])
def test_a_run_stopped_before_keeps_its_last_state_under_its_own_metric(recipe, tmp_path):
    trainer, receipt, evaluations = train(recipe, tmp_path, Worsens(), StopsAt(4), **BEST)
    assert trainer.state.best_model_checkpoint is None
    last = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    final = trainer.model.state_dict()
    assert all(torch.equal(value, last[name]) for name, value in final.items())
    (key,) = recipe
    assert receipt["unreached"].keys() == {key}
    assert any(f"{key} did not reach" in note for note in receipt["notes"])
    assert any("the model is that of the last step" in note for note in receipt["notes"])
    assert evaluations == 5  # of a batch at the start; nothing changed since the last validation
    assert receipt["final_evaluation"]["eval_loss"] == logged(trainer, 4) == evaluated(trainer)


def test_a_soup_is_evaluated_after_training_and_nothing_else_is(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_every": 4}
    trainer, receipt, evaluations = train({"soup": {"kind": "uniform"}}, tmp_path / "soup", **options)
    assert evaluations == 3
    assert receipt["final_evaluation"]["eval_loss"] == evaluated(trainer)
    _, receipt, evaluations = train(PRUNE, tmp_path / "prune", **options)
    assert evaluations == 2
    _, receipt, evaluations = train({"soup": {"kind": "uniform"}}, tmp_path / "none", save_every=4)
    assert evaluations == 0
    assert receipt["final_evaluation"] == {}


def test_only_checkpoints_that_hold_it_are_saved_with_the_strategy_best(tmp_path):
    options = {**BEST, "save_strategy": "best"}
    trainer, _, _ = train(PRUNE, tmp_path, Worsens(), **options)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    assert sparsity(trainer.model.state_dict()) == pytest.approx(0.6, abs=0.06)


def test_a_resumed_run_finds_the_same_best(tmp_path):
    whole, _, _ = train(PRUNE, tmp_path / "whole", Worsens(), **BEST)
    trainer = hf_trainer(PRUNE, tmp_path / "whole", callbacks=[Worsens()], **BEST)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert trainer.state.best_global_step == 6
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name


def test_the_best_of_another_recipe_is_not_that_of_a_resumed_run(tmp_path):
    less = {"prune": {**PRUNE["prune"], "sparsity": 0.3, "end": 2}}
    train(less, tmp_path, Worsens(), **{**BEST, "max_steps": 4})
    trainer = hf_trainer(PRUNE, tmp_path, callbacks=[Worsens()], **BEST)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.best_global_step == 6
    assert sparsity(trainer.model.state_dict()) == pytest.approx(0.6, abs=0.06)
