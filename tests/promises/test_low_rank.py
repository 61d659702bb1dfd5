"""Factors in both trainers: a resume builds those of the checkpoint, and needs a checkpoint of them."""

import pytest
import torch
from promise_drivers import difference, run_hf, run_lightning, saved_state
from promise_table import NUM_STEPS, DigitsNet

from shared_core.errors import CheckpointError
from shared_core.low_rank import LowRankLayer

ENERGY = {"rank": "energy:0.8"}
AVERAGE = {"average": {"kind": "ema"}}
TRAINERS = {"hf": (run_hf, {"seed": 3}), "lightning": (run_lightning, {})}


@pytest.fixture(params=TRAINERS)
def run(request, tmp_path):
    train, options = TRAINERS[request.param]

    def run(folder, recipe, **more):
        torch.manual_seed(3)
        return train(recipe, tmp_path / folder, dropout=0.3, shuffle=True, save_every=4, **options, **more)

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
    with pytest.raises(CheckpointError, match="of a run with low_rank"):
        run("again", {"low_rank": ENERGY}, resume=plain.checkpoints[4])
    with pytest.raises(CheckpointError, match="recipe must keep low_rank"):
        run("other", AVERAGE, resume=factors.checkpoints[4])
