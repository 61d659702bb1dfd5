"""Models that cannot be copied, hooked or run again: one line that names the module, and the model as it was."""

import pytest
import torch
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError, TrainingError

OLD_NORM = nn.utils.weight_norm


def net(first=lambda: nn.Linear(8, 16)):
    return nn.Sequential(first(), nn.ReLU(), nn.Linear(16, 4))


def scripted(blocks=1):
    inner = [torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())) for _ in range(blocks)]
    return nn.Sequential(*inner, nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "recipe", "told"),
    [
        (lambda: net(lambda: OLD_NORM(nn.Linear(8, 16))), {"distill": {"teacher": "ema"}}, "got 0 with a tensor"),
        (scripted, {"distill": {"teacher": "ema"}}, r"distill: .*torch.jit modules .*\(0\)"),
        (lambda: torch.jit.script(net()), {"average": {"kind": "ema"}}, r"average: .* \(the model itself\)"),
        (scripted, {"dp": {"noise_multiplier": 1.0, "max_grad_norm": 1.0}}, r"dp: torch.jit modules .*\(0\)"),
        (
            lambda: scripted(3),
            {"checkpointing": {"policy": "block", "include": ["1"]}},
            r"checkpointing: 1: .*torch.jit",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_that_a_technique_cannot_copy_or_hook_are_refused_at_the_start(model, recipe, told):
    model = model()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(CompatibilityError, match=told):
        Session(recipe).attach(model)
    assert [type(module) for module in model.modules()] == kinds


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs):
        return inputs


@pytest.mark.parametrize("when", ["attached", "begun"])
@pytest.mark.parametrize(
    ("name", "layer", "told"),
    [
        ("more", lambda: nn.Linear(4, 4), "more.weight"),
        ("more", Counter, "more.seen"),
        ("2", lambda: nn.Linear(16, 2), "2.weight"),
    ],
)
def test_layers_added_or_replaced_under_an_average_that_teaches_are_refused(name, layer, told, when):
    model, session = net(), Session({"distill": {"teacher": "ema"}})
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "begun":
        session.begin([optimizer], total_steps=2)
    setattr(model, name, layer())
    with pytest.raises(TrainingError, match=f"must keep its layers, got a difference at {told}"):
        session.begin([optimizer], total_steps=2) if when == "attached" else session.after_step()
