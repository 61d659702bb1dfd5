"""`Session.bake`: the finished weights in the middle of training, also of an average that other code keeps."""

import copy

import pytest
import torch
from torch import nn

from shared_core import Session
from shared_core.errors import CheckpointError

STEPS = 6
RECIPES = {
    "prune": {"prune": {"sparsity": 0.75, "end": 3}},
    "qat": {"qat": {"scheme": "int8", "begin": 2}},
    "prune-qat": {"prune": {"sparsity": 0.75, "end": 3}, "qat": {"scheme": "int8_weight"}},
    "lora": {"lora": {"rank": 2, "save": "merged"}},
    "average": {"average": {"kind": "ema"}},
    "low_rank": {"low_rank": {"rank": 2, "min_size": 1}},
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 4)
    )


class Run:
    """Training with an average that belongs to somebody else."""

    def __init__(self, recipe):
        self.model, self.average, self.session = net(), net(), Session(recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session.start(self.model, self.optimizer, total_steps=STEPS)

    def train(self, steps):
        for step in range(steps):
            x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(step))
            self.session.loss(self.model(x).square().mean()).backward()
            self.session.before_step()
            self.optimizer.step()
            self.session.after_step()
            self.optimizer.zero_grad()
            state = self.model.state_dict()
            for name, value in self.average.state_dict().items():
                if value.is_floating_point():
                    value.lerp_(state[name], 0.5)
        return self


def copied(state):
    return {name: value.clone() for name, value in state.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_baked_at_the_end_is_the_finished_model(name):
    run = Run(RECIPES[name])
    if name == "low_rank":
        run.average = nn.Module()  # it cannot follow
    run.train(STEPS)
    baked = copied(run.session.bake())
    run.session.finish()
    same(baked, run.model.state_dict())


@pytest.mark.parametrize("name", ["prune", "qat", "prune-qat", "lora"])
def test_baking_changes_nothing_in_training(name):
    plain, baking = Run(RECIPES[name]), Run(RECIPES[name])
    for _ in range(STEPS):
        plain.train(1)
        baking.train(1)
        baking.session.bake()
        baking.session.bake(baking.average.state_dict())
    same(baking.average.state_dict(), plain.average.state_dict())
    plain.session.finish()
    baking.session.finish()
    same(baking.model.state_dict(), plain.model.state_dict())


def test_an_average_gets_the_masks():
    run = Run(RECIPES["prune"]).train(STEPS)
    average, baked = run.average.state_dict(), run.session.bake(run.average.state_dict())
    pruned = run.model[4].weight == 0
    assert int(pruned.sum()) > 0.7 * pruned.numel()
    assert average["4.weight"][pruned].abs().max() > 0  # those pruned late are not 0 on average
    assert torch.equal(baked["4.weight"], average["4.weight"].masked_fill(pruned, 0))
    same({name: baked[name] for name in baked if "running" in name}, {n: average[n] for n in average if "running" in n})


def test_an_average_gets_its_own_grids_also_where_its_own_norm_is_folded():
    run = Run(RECIPES["qat"]).train(STEPS)
    average, baked = run.average.state_dict(), run.session.bake(run.average.state_dict())
    # A linear layer: codes up to 127 of the largest weight of each row, in float64.
    exact = average["4.weight"].double()
    step = exact.abs().amax(dim=1, keepdim=True) / 127
    assert (baked["4.weight"].double() - (exact / step).round() * step).abs().max() <= 1e-6
    # The convolution with its norm: the product of both lies on such a grid, with the average's own statistics.
    gain = average["1.weight"].double() / (average["1.running_var"].double() + 1e-5).sqrt()
    folded = (baked["0.weight"].double() * gain[:, None, None, None]).flatten(1)
    codes = folded / (folded.abs().amax(dim=1, keepdim=True) / 127)
    assert (codes - codes.round()).abs().max() < 1e-3
    assert (baked["0.weight"] - average["0.weight"]).abs().max() > 0


def test_an_average_of_replaced_weights_is_refused():
    run = Run(RECIPES["low_rank"])
    before = copied(run.model.state_dict())
    with pytest.raises(CheckpointError, match=r"4\.weight.*leave the technique out"):
        run.session.bake(run.average.state_dict())
    same(copied(run.model.state_dict()), before)


def test_a_finished_model_is_baked_already():
    run = Run(RECIPES["prune"]).train(STEPS)
    run.session.finish()
    same(run.session.bake(), run.model.state_dict())
    same(run.session.bake(run.average.state_dict()), copy.deepcopy(run.average).state_dict())
