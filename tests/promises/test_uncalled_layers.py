"""A part of the model that no forward calls stays as it is, and the receipt names it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from efftrain import Session
from shared_core.pruning import prune
from shared_core.tools.shrink import shrink

STEPS, JOINS = 8, 5
EXAMPLES = torch.randn(16, 1, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(16) % 4

TRACED = [
    {"granularity": granularity, "criterion": criterion, "scope": scope, "cost": cost}
    for granularity in ("neuron", "channel")
    for criterion, scope, cost in (
        ("magnitude", "local", "none"), ("magnitude", "global", "flops"), ("random", "global", "flops"),
        ("taylor", "global", "none"), ("fisher", "global", "flops"), ("neuron_taylor", "global", "flops"),
        ("shapley", "local", "none"),
    )
]  # fmt: skip
SCORED = [
    {"granularity": "filter", "criterion": "taylor", "scope": "global"},
    {"granularity": "filter", "criterion": "fisher", "scope": "global", "cost": "flops"},
    {"granularity": "filter", "criterion": "neuron_taylor", "scope": "global", "cost": "flops"},
    {"criterion": "taylor"},
    {"criterion": "taylor", "granularity": "block", "block": "2x2"},
    {"criterion": "fisher"},
    {"criterion": "wanda"},
    {"criterion": "movement"},
]
names = pytest.mark.parametrize("options", [*TRACED, *SCORED], ids=lambda options: "-".join(options.values()))


class Net(nn.Module):
    """Convolutions, linear layers, and an auxiliary head whose inputs are those of the head; an empty parameter too."""

    def __init__(self):
        super().__init__()
        self.conv, self.narrow = nn.Conv1d(1, 6, 3, padding=1), nn.Conv1d(6, 1, 3, padding=1)
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 4)
        self.aux = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
        self.none = nn.Parameter(torch.empty(0))
        self.register_buffer("anchors", torch.empty(0, 4))

    def forward(self, x, *, with_aux=False):
        features = F.relu(self.second(F.relu(self.first(self.narrow(F.relu(self.conv(x)))[:, 0]))))
        return self.head(features) + (self.aux(features) if with_aux else 0.0)


def loss_of(model, batch, *, with_aux=False):
    return F.cross_entropy(model(batch[0], with_aux=with_aux), batch[1])


def train(model, options, *, joins=STEPS):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recipe = {"prune": {"sparsity": 0.5, "begin": 1, "end": 4, "every": 1, **options}}
    with Session(recipe).training(model, optimizer, total_steps=STEPS) as session:
        for step in range(STEPS):
            with session.forward():
                loss = session.loss(loss_of(model, (EXAMPLES, CLASSES), with_aux=step >= joins))
            loss.backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            optimizer.zero_grad()
    return session.receipt()


def zeros(module):
    return sum(int((parameter == 0).sum()) for parameter in module.parameters())


@names
def test_training_leaves_layers_dense_that_no_forward_called_and_names_them(options):
    torch.manual_seed(1)
    model = Net()
    before = copy.deepcopy(model.aux)
    receipt = train(model, options)
    assert all(torch.equal(*pair) for pair in zip(before.parameters(), model.aux.parameters(), strict=True))
    assert zeros(model) > 0
    assert not receipt["unreached"]
    note = next(note for note in receipt["notes"] if "no input has reached them" in note)
    assert "aux.0.weight" in note
    assert "aux.2.weight" in note
    assert "head.weight" not in note


@pytest.mark.parametrize("options", TRACED, ids=lambda options: "-".join(options.values()))
def test_a_head_that_joins_after_the_units_were_found_keeps_its_classes(options):
    torch.manual_seed(1)
    model = Net()
    train(model, options, joins=JOINS)
    assert zeros(model.aux) == 0
    assert zeros(model) > 0


@pytest.mark.parametrize(
    "options",
    [options for options in [*TRACED, *SCORED] if options["criterion"] != "movement"],
    ids=lambda options: "-".join(options.values()),
)
def test_pruning_a_trained_model_leaves_such_layers_dense_and_names_them(options):
    torch.manual_seed(1)
    model = Net()
    before = copy.deepcopy(model.aux)
    report = prune(model, {"sparsity": 0.5, **options}, [(EXAMPLES, CLASSES)], loss=loss_of)
    assert all(torch.equal(*pair) for pair in zip(before.parameters(), model.aux.parameters(), strict=True))
    assert zeros(model) > 0
    assert any("aux.0.weight, aux.2.weight stay dense" in note for note in report.notes)


def test_shrinking_keeps_what_such_a_layer_may_read():
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        for layer in (model.first, model.second, model.aux[0]):
            layer.weight[:3], layer.bias[:3] = 0, 0
    result = shrink(model, EXAMPLES, latency_repeats=0)
    assert result.removed == {"first": 3}
    assert "aux.0.weight" in result.kept["second"]
    assert torch.allclose(result.model(EXAMPLES, with_aux=True), model(EXAMPLES, with_aux=True), atol=1e-6)
    model.aux = None
    assert shrink(model, EXAMPLES, latency_repeats=0).removed == {"first": 3, "second": 3}
