"""Running averages in the Hugging Face Trainer: what validation, checkpoints, the best and the last model hold."""

import pytest
import torch
from promise_drivers import hf_trainer
from promise_table import make_net
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from shared_core.engine.state_file import load_state

EMA = {"average": {"kind": "ema", "decay": 0.8}}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


def average_of(folder):
    return load_state(folder)["techniques"]["average"]["kept"][0]


class Watch(TrainerCallback):
    """Notes the weights after every step and in every validation, and saves in the middle of one."""

    def __init__(self):
        self.stepped, self.validated, self.trainer = {}, {}, None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.stepped[state.global_step] = weights_of(model)

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.validated[state.global_step] = weights_of(self.trainer.model)

    def on_evaluate(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.trainer._save_checkpoint(self.trainer.model, None)
            self.trainer.save_model(f"{args.output_dir}/mine")


def test_validation_and_saved_models_are_the_average_and_checkpoints_the_weights(tmp_path):
    watch = Watch()
    trainer = watch.trainer = hf_trainer(EMA, tmp_path, save_every=2, callbacks=[watch], **EVALUATING)
    trainer.train()
    for step in (2, 4, 6, 8):
        folder = tmp_path / f"checkpoint-{step}"
        saved, average = load_file(folder / "model.safetensors"), average_of(folder)
        assert same(saved, watch.stepped[step])
        assert same(average, watch.validated[step])
        assert not same(average, saved)
    mine = load_file(tmp_path / "mine" / "model.safetensors")
    assert same(mine, watch.validated[4])  # from within a validation, like the checkpoint of step 4
    assert same(average, trainer.model.state_dict())
    trainer.save_model(str(tmp_path / "final"))
    assert same(load_file(tmp_path / "final" / "model.safetensors"), trainer.model.state_dict())
    assert trainer.state.log_history[0]["average/updates"] == 1.0


def test_the_best_model_is_the_average_of_its_step(tmp_path):
    class Worsening(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_loss"] = float(state.global_step == 2 or state.global_step > 4)

    watch = Watch()
    best = {"load_best_model_at_end": True, "save_every": 2, "callbacks": [Worsening(), watch], **EVALUATING}
    trainer = watch.trainer = hf_trainer(EMA, tmp_path, **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    assert same(average_of(tmp_path / "checkpoint-4"), trainer.model.state_dict())


def test_norms_are_estimated_from_a_stream_for_every_validation(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(rows)

    watch = Watch()
    recipe = {"average": {**EMA["average"], "bn_batches": 2}}
    runs = []
    for evaluating in (EVALUATING, {}):
        trainer = watch.trainer = hf_trainer(recipe, tmp_path, callbacks=[watch], plugin=True, **evaluating)
        rows = trainer.train_dataset
        trainer.train_dataset = Stream()
        trainer.train()
        runs.append(watch.stepped[8])
        net = make_net()
        net.load_state_dict(trainer.model.state_dict())
        for stat in (net.norm.running_mean, net.norm.running_var):
            stat.zero_()
        net.norm.momentum, net.norm.num_batches_tracked = None, torch.tensor(0)
        with torch.no_grad():
            for start in (0, 8):
                net(torch.stack([row["x"] for row in rows[start : start + 8]]))
        assert same(net.norm.state_dict(), trainer.model.norm.state_dict())
    assert same(*runs)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_validation_leaves_the_weights_in_training(error, tmp_path):
    watch = Watch()

    class Fails(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise error

    trainer = watch.trainer = hf_trainer(EMA, tmp_path, callbacks=[watch, Fails()], **EVALUATING)
    with pytest.raises(error):
        trainer.train()
    assert same(watch.stepped[4], trainer.model.state_dict())
