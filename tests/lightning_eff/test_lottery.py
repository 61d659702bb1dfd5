"""Lottery tickets of Lightning trainings: what is measured, and a ticket of another loop."""

import json

import torch
from promise_drivers import run_bare, run_lightning

from shared_core.lottery_ticket import read_ticket


def result(folder):
    return json.loads((folder / "round.json").read_text())


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
