"""A model that ran compiled before a technique was attached trains as its plain twin does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from efftrain import Session

STEPS = 5
EXAMPLES = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(16) % 4
PRUNING = {"sparsity": 0.5, "begin": 1, "end": 3, "every": 1}

RECIPES = {
    "units by taylor": {"prune": {**PRUNING, "granularity": "neuron", "criterion": "taylor"}},
    "units by neuron_taylor": {"prune": {**PRUNING, "granularity": "neuron", "criterion": "neuron_taylor"}},
    "units by shapley": {"prune": {**PRUNING, "granularity": "neuron", "criterion": "shapley"}},
    "weights by fisher": {"prune": {**PRUNING, "criterion": "fisher"}},
    "weights by wanda": {"prune": {**PRUNING, "criterion": "wanda"}},
    "weights by flops": {"prune": {**PRUNING, "cost": "flops"}},
    "qat": {"qat": {"scheme": "int8"}},
    "fp8": {"fp8": {"recipe": "tensorwise"}},
    "saved activations": {"activations": {"pack": "bf16", "min_size": 1}},
    "feature distillation": {"distill": {"alpha": 0.5, "hidden": ["body=body"]}},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


def whole(model):
    return torch.compile(model, backend="eager")


def part(model):
    model.body.compile(backend="eager")
    return model


def wrapped_part(model):
    model.body = torch.compile(model.body, backend="eager")
    return model


def train(model, recipe, compiled=lambda model: model):
    torch.manual_seed(2)
    teacher = {"distill": {**recipe["distill"], "teacher": Net()}} if "distill" in recipe else {}
    network = compiled(model)
    F.cross_entropy(network(EXAMPLES), CLASSES).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session({**recipe, **teacher}).training(model, optimizer, total_steps=STEPS) as session:
        for _ in range(STEPS):
            with session.forward():
                loss = session.loss(F.cross_entropy(network(EXAMPLES), CLASSES))
            loss.backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            optimizer.zero_grad()
    return session.receipt()


@pytest.fixture(autouse=True)
def _compile_nothing_for_others():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [
        *(pytest.param(recipe, whole, id=name) for name, recipe in RECIPES.items()),
        pytest.param(RECIPES["units by taylor"], part, id="units, part"),
        pytest.param(RECIPES["units by taylor"], wrapped_part, id="units, wrapped part"),
    ],
)
def test_a_technique_does_what_it_does_in_a_plain_model(recipe, compiled):
    torch.manual_seed(1)
    model = Net()
    twin = copy.deepcopy(model)
    receipt, expected = train(model, recipe, compiled), train(twin, recipe)
    assert receipt["unreached"] == expected["unreached"] == {}
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    if "prune" in recipe:
        assert sum(int((parameter == 0).sum()) for parameter in model.parameters()) > 100
