"""Gradients of dead weights move no live one, whatever the optimizer makes of a gradient as a whole."""

import copy

import pytest
import torch
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.engine.checks.model_guards import is_element_wise


class UnitStep(torch.optim.Optimizer):
    """A user's own: each parameter moves by its gradient over that one's norm."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad / weight.grad.norm(), alpha=-0.01)


class OwnAdam(torch.optim.Adam):
    """A subclass may do anything: here each gradient is centered first."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.sub_(weight.grad.mean())
        return super().step(closure)


OPTIMIZERS = {
    "muon": lambda weights: torch.optim.Muon(weights, lr=0.01),
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.01),
    "own": UnitStep,
    "own_adam": lambda weights: OwnAdam(weights, lr=0.01),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}
RECIPES = {
    "prune": {"prune": {"sparsity": 0.5, "begin": 0, "schedule": "one_shot"}},
    "prune and share": {
        "prune": {"sparsity": 0.5, "begin": 0, "schedule": "one_shot"},
        "cluster": {"bits": 4, "begin": 2, "min_size": 16},
    },
}


def trained(optimizer, recipe, *, zeroed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
    session = Session(recipe)
    session.attach(model)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    session.begin([stepper], total_steps=6, clips_gradients=False)
    if zeroed:
        for weight in model.parameters():
            weight.register_hook(lambda gradient, weight=weight: gradient.masked_fill(weight == 0, 0.0))
    for _ in range(6):
        x = torch.randn(16, 12)
        plain_step(session, stepper, model(x).square().mean() + model(x).mean())
    session.finish()
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_live_weights_are_those_of_a_run_whose_dead_gradients_are_zeroed(optimizer, recipe):
    found, expected = (trained(optimizer, RECIPES[recipe], zeroed=zeroed) for zeroed in (False, True))
    for weight, other in zip(found, expected, strict=True):
        assert torch.equal(weight, other)
    assert sum((weight == 0).sum() for weight in found) == (12 * 16 + 16 * 8) // 2


def test_only_torchs_own_classes_are_known():
    weight = nn.Parameter(torch.ones(2, 2))
    found = {name: is_element_wise(make([copy.deepcopy(weight)])) for name, make in OPTIMIZERS.items()}
    assert found == {"muon": False, "adafactor": False, "own": False, "own_adam": False, "adamw": True}
    assert is_element_wise(torch.optim.SGD([weight], lr=0.1, momentum=0.9))


@pytest.mark.parametrize(("optimizer", "told"), [("muon", True), ("adamw", False)])
def test_where_a_shared_value_moves_from_is_told(optimizer, told, capsys):
    trained(optimizer, RECIPES["prune and share"], zeroed=False)
    assert ("cluster: Muon" in capsys.readouterr().out) is told
