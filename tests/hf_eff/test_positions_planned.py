"""Positions in a Hugging Face run: told loudly where steps are not applied as planned."""

import json

import pytest
from promise_drivers import hf_trainer
from transformers import TrainerCallback

from hf_eff import attach


class Discards(TrainerCallback):
    """Has every second optimizer step discarded, or only the first six."""

    session = None

    def __init__(self, first_alone):
        self.first_alone = first_alone

    def on_step_begin(self, args, state, control, **kwargs):
        is_early = state.global_step < 6
        self.session.context.discard_step = is_early if self.first_alone else state.global_step % 2 == 1


@pytest.mark.parametrize("first_alone", [False, True])
def test_steps_that_are_skipped_for_good_are_told(first_alone, tmp_path):
    discards = Discards(first_alone)
    trainer = hf_trainer({}, tmp_path, plugin=False, callbacks=[discards], max_steps=64)
    discards.session = attach(trainer, {"prune": {"sparsity": 0.5, "begin": 0.25, "end": 0.75, "every": 1}})
    trainer.train()
    told = json.loads((tmp_path / "eff_receipt.json").read_text())
    loud = [note for note in told["notes"] if "DO NOT COME AS PLANNED" in note]
    if first_alone:  # as a loss scale that is too large at first
        assert told["steps"] == {"applied": 58, "skipped": 6, "planned": 64}
        assert not loud
        assert told["unreached"] == {}
        return
    assert told["steps"] == {"applied": 32, "skipped": 32, "planned": 64}
    assert len(loud) == 1
    assert "8 were applied where 16 were planned; at this rate the run ends after 32 of 64, before prune" in loud[0]
    assert told["unreached"].keys() == {"prune"}
