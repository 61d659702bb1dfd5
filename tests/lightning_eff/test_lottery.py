"""Lottery tickets of Lightning trainings: in one process, in fresh ones, killed, resumed; of another trainer."""

import json
import sys
from pathlib import Path

import lottery_script
import pytest
import torch
from lottery_script import train_lightning
from promise_drivers import run_bare, run_lightning

from shared_core.errors import CheckpointError, TrainingError
from shared_core.lottery_ticket import read_ticket
from shared_core.runs import LotterySearch

OPTIONS = {"rounds": 1, "rate": 0.5, "rewind_to": 3}


def result(folder):
    return json.loads((folder / "round.json").read_text())


@pytest.mark.slow
def test_a_search_over_an_unedited_script_killed_and_resumed_equals_one_in_this_process(tmp_path):
    here = LotterySearch(**OPTIONS).run(
        lambda recipe: train_lightning(tmp_path / "here" / Path(recipe["lottery"].out).name, recipe),
        tmp_path / "in_one",
    )
    assert [row.replay for row in here.rows] == [None, "bit-equal"]
    assert here.metric == "eval_loss"
    assert [entry["step"] for entry in result(tmp_path / "in_one" / "round-01")["history"]] == [2, 4, 6, 8]

    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "round-00.die").touch()
    command = [sys.executable, lottery_script.__file__, "lightning", str(runs / "{round}")]
    with pytest.raises(TrainingError, match="round-00 must end well"):
        LotterySearch(**OPTIONS).run_command(command, tmp_path / "fresh")
    assert (runs / "round-00" / "step=4.ckpt").is_file()
    fresh = LotterySearch(**OPTIONS).run_command(command, tmp_path / "fresh")
    assert fresh == here
    for file in sorted((tmp_path / "in_one").glob("*/ticket.safetensors")):
        assert file.read_bytes() == (tmp_path / "fresh" / file.parent.name / file.name).read_bytes()


def test_a_run_without_validation_keeps_the_reason(tmp_path):
    run_lightning({"lottery": {"out": str(tmp_path / "out")}}, tmp_path / "run")
    told = result(tmp_path / "out")
    assert told["history"] == []
    assert "Trainer must have a validation loop" in told["unmeasured"]


def test_a_run_whose_validation_came_earlier_is_measured_at_its_end(tmp_path):
    options = {"limit_val_batches": 5, "val_check_interval": 2, "max_steps": 7, "log_every_n_steps": 1}
    run_lightning({"lottery": {"out": str(tmp_path / "out")}}, tmp_path / "run", **options)
    assert [entry["step"] for entry in result(tmp_path / "out")["history"]] == [2, 4, 6, 7]
    names = {name for entry in result(tmp_path / "out")["history"] for name in entry["metrics"]}
    assert names  # Lightning hands back what was logged for the session too
    assert not any(name.startswith("ticket/") for name in names)


def test_the_sanity_check_is_no_validation(tmp_path):
    options = {"limit_val_batches": 5, "num_sanity_val_steps": 2}
    run_lightning({"lottery": {"out": str(tmp_path / "out")}}, tmp_path / "run", **options)
    assert [entry["step"] for entry in result(tmp_path / "out")["history"]] == [4, 8]


def test_a_ticket_of_a_bare_loop_serves_in_lightning(tmp_path):
    run_bare({"lottery": {"out": str(tmp_path / "dense"), "rate": 0.5, "rewind_to": 2}})
    ticket = tmp_path / "dense" / "ticket.safetensors"
    sparse = {"rewind_to": 2, "ticket": str(ticket)}
    trained = run_lightning({"lottery": {"out": str(tmp_path / "sparse"), **sparse}}, tmp_path / "run")
    assert result(tmp_path / "sparse")["replay"] == "bit-equal"
    for name, mask in read_ticket(ticket).masks.items():
        assert torch.equal(trained.weights[name] != 0, mask)
    assert "net.hidden.weight" in read_ticket(tmp_path / "sparse" / "ticket.safetensors").masks


def test_a_checkpoint_of_another_round_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="give every round an output folder of its own"):
        LotterySearch(**OPTIONS).run(lambda recipe: train_lightning(tmp_path / "same", recipe), tmp_path / "out")
