"""Factors in both trainers: made for the inputs seen; a resume builds those of the checkpoint, which must hold some."""

import promise_drivers
import pytest
import torch
from promise_drivers import TRAINERS, difference, lightning_module, run_lightning, saved_state
from promise_table import NUM_STEPS, DigitsNet, make_net, train_examples

from shared_core.errors import CheckpointError
from shared_core.low_rank import LowRankLayer, load

ENERGY = {"rank": "energy:0.8"}
AVERAGE = {"average": {"kind": "ema"}}


@pytest.fixture(params=TRAINERS)
def run(request, tmp_path):
    def run(folder, recipe, **more):
        options = {"dropout": 0.3, "shuffle": True, "save_every": 4, "seed": 3, **more}
        return TRAINERS[request.param](recipe, tmp_path / folder, **options)

    return run


@pytest.mark.parametrize("merge", [False, True])
def test_a_resume_builds_the_ranks_of_the_checkpoint_whatever_the_fresh_model_would_get(run, merge, monkeypatch):
    recipe = {"low_rank": ENERGY | {"merge": merge}}
    whole = run("whole", recipe)
    made = DigitsNet.__init__

    def flatter(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.hidden.weight.data[:, 40:] = 0  # whose own energy gives another rank

    monkeypatch.setattr(DigitsNet, "__init__", flatter)
    own, again = run("own", recipe), run("again", recipe, resume=whole.checkpoints[4])
    structures = (each.receipt["techniques"]["low_rank"]["structure"] for each in (own, whole, again))
    ranks = [[layer["rank"] for layer in structure.values()] for structure in structures]
    assert ranks[0] != ranks[1] == ranks[2]
    assert difference(*(saved_state(each.checkpoints[NUM_STEPS]) for each in (whole, again))) is None
    assert difference(whole.weights, again.weights) is None
    assert isinstance(again.model.hidden, torch.nn.Linear if merge else LowRankLayer)


def test_a_checkpoint_without_factors_is_refused_and_one_with_them_without_low_rank(run):
    plain, factors = run("plain", AVERAGE), run("factors", {"low_rank": ENERGY}, max_steps=4)
    with pytest.raises(CheckpointError, match="of a run without low_rank"):
        run("again", {"low_rank": ENERGY}, resume=plain.checkpoints[4])
    with pytest.raises(CheckpointError, match="no longer has low_rank"):
        run("other", AVERAGE, resume=factors.checkpoints[4])


def test_a_finished_checkpoint_of_lightning_resumed_and_loaded_is_the_trained_model(tmp_path):
    options = {"dropout": 0.3, "shuffle": True, "save_every": 4}
    whole = run_lightning({"low_rank": ENERGY}, tmp_path / "whole", **options)
    again = run_lightning({"low_rank": ENERGY}, tmp_path / "again", resume=whole.checkpoints[NUM_STEPS], **options)
    assert difference(whole.weights, again.weights) is None
    fresh = load(lightning_module(), whole.checkpoints[NUM_STEPS]).net
    assert difference(whole.weights, dict(fresh.state_dict())) is None


def test_inputs_are_looked_at_before_the_first_step(run, monkeypatch):
    monkeypatch.setattr(promise_drivers, "LEARNING_RATE", 0.0)
    errors, told = {}, {}
    images = torch.stack([row["x"] for row in train_examples()])
    for decomposition in ("svd", "scaled", "whitened"):
        recipe = {"low_rank": {"rank": 3, "calibration_batches": 4, "decomposition": decomposition}}
        result = run(decomposition, recipe, max_steps=1, dropout=0.0, shuffle=False)
        outputs = [net.eval()(images)["logits"] for net in (result.model, make_net())]
        errors[decomposition] = float((outputs[0] - outputs[1]).norm())
        told[decomposition] = result.receipt["techniques"]["low_rank"]
    assert errors["whitened"] < 0.9 * errors["svd"]
    assert errors["scaled"] < errors["svd"]
    assert told["whitened"]["calibration_batches"] == 4
    (layer,), (plain,) = (told[name]["per_layer"] for name in ("whitened", "svd"))
    assert layer["output_error"] < layer["weight_error"]
    assert plain["weight_error"] < layer["weight_error"]
