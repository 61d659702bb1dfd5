"""Low rank in Lightning: checkpoints whole and factorised, resumed with the checkpoint's ranks, calibrated."""

import pytest
import torch
from promise_drivers import difference, lightning_module, run_lightning, saved_state
from promise_table import NUM_STEPS, DigitsNet, make_net

from lightning_eff import LowRank
from shared_core.errors import CheckpointError
from shared_core.low_rank import LowRankLayer, load

ENERGY = {"low_rank": {"rank": "energy:0.8"}}
OPTIONS = {"dropout": 0.3, "shuffle": True, "save_every": 4}


def run(folder, recipe=ENERGY, **more):
    torch.manual_seed(3)
    callbacks = [LowRank(**recipe["low_rank"])]
    return run_lightning({}, folder, plugin=False, callbacks=callbacks, **OPTIONS, **more)


@pytest.mark.parametrize("merge", [False, True])
def test_a_resume_builds_the_ranks_of_the_checkpoint(merge, tmp_path, monkeypatch):
    recipe = {"low_rank": ENERGY["low_rank"] | {"merge": merge}}
    whole = run(tmp_path / "whole", recipe)
    made = DigitsNet.__init__

    def flatter(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.hidden.weight.data[:, 40:] = 0  # whose own energy would give another rank

    monkeypatch.setattr(DigitsNet, "__init__", flatter)
    again = run(tmp_path / "again", recipe, resume=whole.checkpoints[4])
    last = [saved_state(result.checkpoints[NUM_STEPS]) for result in (whole, again)]
    assert difference(*last) is None
    assert difference(whole.weights, again.weights) is None
    assert isinstance(again.model.hidden, torch.nn.Linear if merge else LowRankLayer)


def test_a_finished_checkpoint_resumed_and_loaded_is_the_trained_model(tmp_path):
    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", resume=whole.checkpoints[NUM_STEPS])
    assert difference(whole.weights, again.weights) is None
    fresh = load(lightning_module(), whole.checkpoints[NUM_STEPS]).net
    assert difference(whole.weights, dict(fresh.state_dict())) is None


def test_a_checkpoint_without_factors_is_refused(tmp_path):
    plain = run_lightning({"average": {"kind": "ema"}}, tmp_path / "plain", save_every=4)
    with pytest.raises(CheckpointError, match="of a run with low_rank"):
        run(tmp_path / "again", resume=plain.checkpoints[4])


def test_inputs_are_looked_at_before_the_first_step(tmp_path):
    found = {}
    for decomposition in ("svd", "whitened"):
        recipe = {"low_rank": {"rank": 3, "calibration_batches": 4, "decomposition": decomposition}}
        result = run_lightning(recipe, tmp_path / decomposition, max_steps=1, save_every=1)
        found[decomposition] = result.receipt["techniques"]["low_rank"]
    assert found["whitened"]["calibration_batches"] == 4
    (layer,) = found["whitened"]["per_layer"]
    assert layer["output_error"] < layer["weight_error"]
    assert found["svd"]["per_layer"][0]["weight_error"] < layer["weight_error"]
    assert make_net().hidden.weight.numel() == layer["parameters_before"]
