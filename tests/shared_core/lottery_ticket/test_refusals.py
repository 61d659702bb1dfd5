"""What a run with lottery tickets refuses, before training and after one that failed."""

import pytest
import torch
from lottery_runs import STEPS, make_net, sgd, ticket_recipe, train
from torch import nn

from shared_core import Session
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.lottery_ticket import LotteryConfig


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"lottery: control .*ticket"):
        LotteryConfig(out="x", control="random_mask")
    with pytest.raises(ConfigError, match=r"lottery: conv_rate .*scope=local, got scope=global"):
        LotteryConfig(out="x", scope="global", conv_rate=0.1)
    for rate in (0, 1, -0.1, float("nan"), "much"):
        with pytest.raises(ConfigError, match=r"rate must be"):
            LotteryConfig(out="x", rate=rate)
    with pytest.raises(ConfigError, match=r"rewind_to must be a step"):
        LotteryConfig(out="x", rewind_to="soon")


@pytest.mark.parametrize("rewind_to", [STEPS, 500, 1.0])
def test_step_k_must_lie_before_the_end(rewind_to, tmp_path):
    with pytest.raises(ConfigError, match=rf"rewind_to.* {STEPS} steps"):
        train(ticket_recipe(tmp_path, rewind_to=rewind_to))


def test_what_cannot_be_right_is_refused_before_training(tmp_path):
    train(ticket_recipe(tmp_path / "dense", rewind_to=3))
    path = tmp_path / "dense" / "ticket.safetensors"
    with pytest.raises(CheckpointError, match="out must not hold a finished run"):
        train(ticket_recipe(tmp_path / "dense", rewind_to=3))
    with pytest.raises(CheckpointError, match="rewind_to must be the ticket's step 3, got step 0"):
        train(ticket_recipe(tmp_path / "a", ticket=path))
    with pytest.raises(CheckpointError, match="must be a ticket for rewind none, got one for weights"):
        train(ticket_recipe(tmp_path / "a", ticket=path, rewind="none", rewind_to=3))
    with pytest.raises(CheckpointError, match="ticket must be an existing ticket file"):
        train(ticket_recipe(tmp_path / "a", ticket=tmp_path / "nowhere"))
    for content in (b"", path.read_bytes()[:-20], b"x" * 100):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="ticket file"):
            train(ticket_recipe(tmp_path / "a", ticket=tmp_path / "bad.safetensors"))
    with pytest.raises(CheckpointError, match=r"only the ticket has 0\.weight"):
        train(ticket_recipe(tmp_path / "a", ticket=path, rewind_to=3, skip=["first"]))
    wide = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(20, 6\) and its mask \(16, 6\)"):
        train(ticket_recipe(tmp_path / "a", ticket=path, rewind_to=3), model=wide)
    with pytest.raises(CompatibilityError, match="LBFGS"):
        train(ticket_recipe(tmp_path / "a"), optimizer=lambda model: torch.optim.LBFGS(model.parameters()))
    with pytest.raises(CompatibilityError, match="prune cannot be combined with lottery"):
        Session({"lottery": {"out": "x"}, "prune": {"sparsity": 0.5}}).attach(make_net())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="out must be a folder"):
        train(ticket_recipe(tmp_path / "file" / "out"))


def test_a_run_that_diverged_or_ended_early_leaves_no_ticket(tmp_path):
    def poison(session, model, optimizer):
        if session.step == STEPS:
            with torch.no_grad():
                model[3].weight[0, 0] = float("nan")

    with pytest.raises(TrainingError, match=r"got NaN in 3\.weight at step 12"):
        train(ticket_recipe(tmp_path / "nan"), each_step=poison)
    session = Session(ticket_recipe(tmp_path / "early", rewind_to=3))
    model = make_net()
    session.attach(model)
    session.begin([sgd(model)], total_steps=STEPS)
    with pytest.raises(TrainingError, match="beyond rewind_to = step 3"):
        session.finish()
    assert not list(tmp_path.glob("*/ticket.safetensors"))
    assert not list(tmp_path.glob("*/round.json"))
