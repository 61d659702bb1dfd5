"""Lottery tickets of Hugging Face trainings: what is measured, the best model, a found ticket."""

import json
from pathlib import Path

import pytest
import torch
from promise_drivers import hf_trainer

from hf_eff import LotteryTicket as LotteryCallback
from hf_eff import attach
from shared_core.lottery_ticket import read_ticket


def history(folder):
    return json.loads((folder / "round.json").read_text())["history"]


def test_a_run_without_validation_is_measured_at_its_end(tmp_path):
    trainer = hf_trainer({}, tmp_path / "run")
    session = attach(trainer, {"lottery": {"out": str(tmp_path / "out")}})
    trainer.train()
    (entry,) = history(tmp_path / "out")
    assert entry["step"] == 8
    assert entry["metrics"]["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)
    assert session.receipt()["techniques"]["lottery"]["unmeasured"] is None


def test_without_a_validation_set_the_reason_is_kept(tmp_path):
    trainer = hf_trainer({}, tmp_path / "run")
    trainer.eval_dataset = None
    attach(trainer, {"lottery": {"out": str(tmp_path / "out")}})
    trainer.train()
    told = json.loads((tmp_path / "out" / "round.json").read_text())
    assert told["history"] == []
    assert "eval" in told["unmeasured"]


def test_the_best_model_decides_the_next_ticket(tmp_path):
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_every": 2, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }  # fmt: skip

    def train(out, rate, **ticket):
        # a rate so large that the first validation is the best one
        trainer = hf_trainer({}, tmp_path / f"{out}_run", **options, learning_rate=rate)
        attach(trainer, {"lottery": {"out": str(tmp_path / out), "rate": 0.5, **ticket}})
        trainer.train()
        return trainer

    trainer = train("dense", 1.0, rewind_to=1)
    best = int(Path(trainer.state.best_model_checkpoint).name.split("-")[1])
    told = json.loads((tmp_path / "dense" / "round.json").read_text())
    assert told["step"] == best
    masks = read_ticket(tmp_path / "dense" / "ticket.safetensors").masks
    weight = trainer.model.hidden.weight.detach().abs()
    mask = masks["hidden.weight"]
    assert int(mask.sum()) == mask.numel() - round(0.5 * mask.numel())
    assert weight[mask].min() >= weight[~mask].max()
    late = train("late", 1.0, rewind_to=7)  # checkpoints from before were never masked
    assert late.state.best_global_step == 8


def test_the_callback_trains_a_found_ticket(tmp_path):
    dense = hf_trainer(
        {}, tmp_path / "dense_run", plugin=False, callbacks=[LotteryCallback(out=str(tmp_path / "dense"))]
    )
    dense.train()
    ticket = tmp_path / "dense" / "ticket.safetensors"
    callback = LotteryCallback(out=str(tmp_path / "sparse"), ticket=str(ticket))
    trainer = hf_trainer({}, tmp_path / "sparse_run", plugin=False, callbacks=[callback])
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for name, mask in read_ticket(ticket).masks.items():
        weight = trainer.model.state_dict()[name]
        assert torch.equal(weight != 0, mask)
    assert trainer.state.log_history[0]["lottery/left"] == pytest.approx(0.8, abs=0.01)
