"""Runs of lottery tickets that stop and go on, and the checkpoints they refuse."""

import pytest
from lottery_runs import RATE, STEPS, equal, snapshot, ticket_recipe, train

from shared_core.errors import CheckpointError
from shared_core.runs import LotterySearch


def test_a_dense_run_resumed_beyond_step_k_finds_the_same_ticket(tmp_path):
    saved = {}

    def keep(session, model, optimizer):
        saved[session.step] = snapshot(session, model, optimizer)

    recipe = ticket_recipe(tmp_path / "out", rewind_to=4)
    whole = train(recipe, each_step=keep)[0]
    found = (tmp_path / "out" / "ticket.safetensors").read_bytes()
    result = (tmp_path / "out" / "round.json").read_text()
    for stop in (3, 4, 7, STEPS - 1):
        (tmp_path / "out" / "round.json").unlink()
        again = train(recipe, seed=9, state=saved[stop])[0]
        assert equal(whole.state_dict(), again.state_dict())
        assert (tmp_path / "out" / "ticket.safetensors").read_bytes() == found
        assert (tmp_path / "out" / "round.json").read_text() == result
    (tmp_path / "out" / "ticket.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must hold rewind\.safetensors.*wrote at step 4"):
        train(recipe, state=saved[7])
    train(ticket_recipe(tmp_path / "other", rewind_to=4), seed=9)
    with pytest.raises(CheckpointError, match=r"weights of .* got those of another"):
        train(ticket_recipe(tmp_path / "other", rewind_to=4), state=saved[7])


def test_a_run_with_a_ticket_resumes_and_refuses_another_rounds_checkpoint(tmp_path):
    LotterySearch(rounds=2, rate=RATE, rewind_to=4).run(train, tmp_path)
    saved = {}

    def keep(session, model, optimizer):
        saved[session.step] = snapshot(session, model, optimizer)

    def recipe(number, out):
        path = tmp_path / f"round-{number - 1:02d}" / "ticket.safetensors"
        return ticket_recipe(tmp_path / out, ticket=path, rewind_to=4)

    whole = train(recipe(2, "a"), each_step=keep)[0]
    for stop in (3, 4, 9):
        assert equal(whole.state_dict(), train(recipe(2, f"from{stop}"), seed=9, state=saved[stop])[0].state_dict())
    with pytest.raises(CheckpointError, match="got one of another round"):
        train(recipe(1, "b"), state=saved[9])
    with pytest.raises(CheckpointError, match="or of a run that rewound there, got one of step 9"):
        plain = {**saved[9]["session"], "techniques": {}}
        train(recipe(2, "c"), state={**saved[9], "session": plain})
