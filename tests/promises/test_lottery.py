"""Lottery tickets in both trainers: what is measured, found tickets, and searches that are killed and resumed."""

import json
import sys
from pathlib import Path

import lottery_script
import pytest
import torch
from lottery_script import train_hf, train_lightning
from promise_drivers import hf_trainer, run_bare, run_lightning

from hf_eff import LotteryTicket, attach
from shared_core.errors import CheckpointError, TrainingError
from shared_core.lottery_ticket import read_ticket
from shared_core.runs import LotterySearch

OPTIONS = {"rounds": 1, "rate": 0.5, "rewind_to": 3}
TRAINERS = pytest.mark.parametrize("train", [train_hf, train_lightning], ids=["hf", "lightning"])


@pytest.mark.slow
@TRAINERS
def test_a_search_over_an_unedited_script_killed_and_resumed_equals_one_in_this_process(train, tmp_path):
    here = LotterySearch(**OPTIONS).run(
        lambda recipe: train(tmp_path / "here" / Path(recipe["lottery"].out).name, recipe), tmp_path / "in_one"
    )
    assert [row.replay for row in here.rows] == [None, "bit-equal"]
    assert here.metric == "eval_loss"
    history = json.loads((tmp_path / "in_one" / "round-01" / "round.json").read_text())["history"]
    assert [entry["step"] for entry in history] == [2, 4, 6, 8]
    names = set(history[0]["metrics"])
    assert "eval_loss" in names
    assert not any(name.endswith(("_runtime", "_per_second")) for name in names)

    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "round-00.die").touch()
    house, saved = ("hf", "checkpoint-4") if train is train_hf else ("lightning", "step=4.ckpt")
    command = [sys.executable, lottery_script.__file__, house, str(runs / "{round}")]
    with pytest.raises(TrainingError, match="round-00 failed"):
        LotterySearch(**OPTIONS).run_command(command, tmp_path / "fresh")
    assert (runs / "round-00" / saved).exists()  # beyond step 3: the resumed run must find what it kept
    fresh = LotterySearch(**OPTIONS).run_command(command, tmp_path / "fresh")
    assert fresh == here
    for file in sorted((tmp_path / "in_one").glob("*/ticket.safetensors")):
        assert file.read_bytes() == (tmp_path / "fresh" / file.parent.name / file.name).read_bytes()


@TRAINERS
def test_a_checkpoint_of_another_round_is_refused(train, tmp_path):
    with pytest.raises(CheckpointError, match="output folder"):
        LotterySearch(**OPTIONS).run(lambda recipe: train(tmp_path / "same_for_all", recipe), tmp_path / "out")


def result(folder):
    return json.loads((folder / "round.json").read_text())


def test_a_run_of_transformers_without_validation_is_measured_at_its_end(tmp_path):
    trainer = hf_trainer({}, tmp_path / "run")
    session = attach(trainer, {"lottery": {"out": str(tmp_path / "out")}})
    trainer.train()
    (entry,) = result(tmp_path / "out")["history"]
    assert entry["step"] == 8
    assert entry["metrics"]["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)
    assert session.receipt()["techniques"]["lottery"]["unmeasured"] is None


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_without_a_validation_set_the_reason_is_kept(front_end, tmp_path):
    recipe = {"lottery": {"out": str(tmp_path / "out")}}
    if front_end == "hf":
        trainer = hf_trainer({}, tmp_path / "run")
        trainer.eval_dataset = None
        attach(trainer, recipe)
        trainer.train()
    else:
        run_lightning(recipe, tmp_path / "run")
    told = result(tmp_path / "out")
    assert told["history"] == []
    assert ("eval" if front_end == "hf" else "Trainer must have a validation loop") in told["unmeasured"]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"val_check_interval": 2, "max_steps": 7, "log_every_n_steps": 1}, [2, 4, 6, 7]),
        ({"num_sanity_val_steps": 2}, [4, 8]),
    ],
    ids=["end", "sanity"],
)
def test_lightning_is_measured_at_validations_and_at_the_end_and_not_in_the_sanity_check(options, steps, tmp_path):
    run_lightning({"lottery": {"out": str(tmp_path / "out")}}, tmp_path / "run", limit_val_batches=5, **options)
    history = result(tmp_path / "out")["history"]
    assert [entry["step"] for entry in history] == steps
    names = {name for entry in history for name in entry["metrics"]}
    assert names  # Lightning hands back what was logged for the session too
    assert not any(name.startswith("ticket/") for name in names)


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
    told = result(tmp_path / "dense")
    assert told["step"] == best
    masks = read_ticket(tmp_path / "dense" / "ticket.safetensors").masks
    weight = trainer.model.hidden.weight.detach().abs()
    mask = masks["hidden.weight"]
    assert int(mask.sum()) == mask.numel() - round(0.5 * mask.numel())
    assert weight[mask].min() >= weight[~mask].max()
    late = train("late", 1.0, rewind_to=7)  # checkpoints from before were never masked
    assert late.state.best_global_step == 8


def test_the_callback_trains_a_found_ticket(tmp_path):
    dense = hf_trainer({}, tmp_path / "dense_run", plugin=False, callbacks=[LotteryTicket(out=str(tmp_path / "dense"))])
    dense.train()
    ticket = tmp_path / "dense" / "ticket.safetensors"
    callback = LotteryTicket(out=str(tmp_path / "sparse"), ticket=str(ticket))
    trainer = hf_trainer({}, tmp_path / "sparse_run", plugin=False, callbacks=[callback])
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for name, mask in read_ticket(ticket).masks.items():
        weight = trainer.model.state_dict()[name]
        assert torch.equal(weight != 0, mask)
    assert trainer.state.log_history[0]["lottery/left"] == pytest.approx(0.8, abs=0.01)


def test_a_ticket_of_a_bare_loop_serves_in_lightning(tmp_path):
    run_bare({"lottery": {"out": str(tmp_path / "dense"), "rate": 0.5, "rewind_to": 2}})
    ticket = tmp_path / "dense" / "ticket.safetensors"
    sparse = {"rewind_to": 2, "ticket": str(ticket)}
    trained = run_lightning({"lottery": {"out": str(tmp_path / "sparse"), **sparse}}, tmp_path / "run")
    assert result(tmp_path / "sparse")["replay"] == "bit-equal"
    for name, mask in read_ticket(ticket).masks.items():
        assert torch.equal(trained.weights[name] != 0, mask)
    assert "net.hidden.weight" in read_ticket(tmp_path / "sparse" / "ticket.safetensors").masks
