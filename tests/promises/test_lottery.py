"""A lottery search in both trainers: in this process, and over a script that is killed and resumed."""

import json
import sys
from pathlib import Path

import lottery_script
import pytest
from lottery_script import train_hf, train_lightning

from shared_core.errors import CheckpointError, TrainingError
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
    with pytest.raises(TrainingError, match="round-00 must end well"):
        LotterySearch(**OPTIONS).run_command(command, tmp_path / "fresh")
    assert (runs / "round-00" / saved).exists()  # beyond step 3: the resumed run must find what it kept
    fresh = LotterySearch(**OPTIONS).run_command(command, tmp_path / "fresh")
    assert fresh == here
    for file in sorted((tmp_path / "in_one").glob("*/ticket.safetensors")):
        assert file.read_bytes() == (tmp_path / "fresh" / file.parent.name / file.name).read_bytes()


@TRAINERS
def test_a_checkpoint_of_another_round_is_refused(train, tmp_path):
    with pytest.raises(CheckpointError, match="give every round an output folder of its own"):
        LotterySearch(**OPTIONS).run(lambda recipe: train(tmp_path / "same_for_all", recipe), tmp_path / "out")
