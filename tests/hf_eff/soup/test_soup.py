"""A soup at the end of a run of the Hugging Face Trainer."""

import pytest
import torch
from promise_drivers import hf_trainer
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_eff import ModelSoup, attach
from shared_core.errors import ConfigError, TrainingError

SAVING = {"save_strategy": "steps", "save_steps": 2}


class Stream(IterableDataset):
    def __init__(self, rows, once):
        self.rows, self.left = rows, iter(rows * 3) if once else None

    def __iter__(self):
        return self.left or iter(self.rows)


@pytest.mark.parametrize("once", [False, True])
def test_norms_are_estimated_from_a_stream_that_starts_anew(tmp_path, once):
    trainer = hf_trainer({"soup": {"kind": "uniform", "bn_batches": 2}}, tmp_path, plugin=True, save_every=2)
    rows = list(trainer.train_dataset)
    trainer.train_dataset = Stream(rows, once)
    if once:
        trainer.args.max_steps = len(rows) * 3 // 8  # to the end of the stream
        with pytest.raises(TrainingError, match="must give batches to estimate statistics on"):
            trainer.train()
    else:
        trainer.train()
        assert int(trainer.model.norm.num_batches_tracked) == 2


def test_several_validation_sets_and_the_order_that_was_logged(make, tmp_path):
    soup = ModelSoup(kind="greedy", metric="eval_two_loss", order="logged")
    trainer = make.trainer(tmp_path, callbacks=[soup], eval_strategy="steps", eval_steps=2, **SAVING)
    trainer.eval_dataset = {"one": make.examples(8, seed=4), "two": make.examples(8, seed=5)}
    trainer.train()
    told = soup.session.receipt()["techniques"]["soup"]
    logged = {row["step"]: row["eval_two_loss"] for row in trainer.state.log_history if "eval_two_loss" in row}
    tried = [int(row["name"].rsplit("-", 1)[1]) for row in told["history"]]
    assert tried == sorted(logged, key=lambda step: logged[step])
    assert told["first_single"] == pytest.approx(min(logged.values()))
    assert trainer.evaluate()["eval_two_loss"] == pytest.approx(told["score"], rel=1e-6)


def test_what_a_soup_needs_is_said_at_the_start(make, tmp_path):
    with pytest.raises(ConfigError, match="eval_strategy must evaluate while training for order logged"):
        make.trainer(tmp_path, callbacks=[ModelSoup(kind="greedy", order="logged")], **SAVING)
    for nothing in (None, [], {"one": [], "two": make.examples(8)}):
        trainer = make.trainer(tmp_path, **SAVING)
        trainer.eval_dataset = nothing
        with pytest.raises(ConfigError, match="eval_dataset must hold examples"):
            attach(trainer, {"soup": {"kind": "greedy"}})
    trainer = make.trainer(tmp_path, callbacks=[ModelSoup(kind="greedy", metric="eval_acuracy")],
                           eval_strategy="steps", eval_steps=2, max_steps=20, **SAVING)  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'eval_accuracy'"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert torch.isfinite(next(trainer.model.parameters())).all()


@pytest.mark.parametrize("validates", [True, False])
def test_an_evaluate_that_returns_nothing_is_told(make, tmp_path, validates):
    class Silent(Trainer):
        def evaluate(self, *args, **kwargs):
            super().evaluate(*args, **kwargs)

    soup = ModelSoup(kind="greedy", metric="eval_accuracy")
    during = {"eval_strategy": "steps", "eval_steps": 2} if validates else {}
    trainer = make.trainer(tmp_path, trainer_class=Silent, callbacks=[soup], max_steps=4, **during, **SAVING)
    with pytest.raises(ConfigError, match="evaluate of Silent must return its metrics, got None"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.slow
def test_equal_weights_get_equal_metrics_though_ranges_are_estimated_with_dropout(make, tmp_path):
    trainer = make.trainer(tmp_path, **SAVING)  # its attention has dropout
    session = attach(trainer, {"soup": {"kind": "greedy"}, "qat": {"scheme": "int8"}})
    trainer.train()
    told = session.receipt()["techniques"]["soup"]
    assert told["repeat"][0] == told["repeat"][1]
