"""Frozen parts that only help in training: a perceptual loss, a teacher inside the model, a frozen tower."""

import pytest
import torch
from torch import nn

from shared_core import training


class Perceptual(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.requires_grad_(False)

    def forward(self, x, y):
        return (self.features(x) - self.features(y)).square().mean()


class Restored(nn.Module):
    """Trains a net on a perceptual loss that it holds."""

    def __init__(self, name="perceptual"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        self.add_module(name, Perceptual() if name != "vgg" else Perceptual().features)
        self.name = name

    def forward(self, x):
        made, helper = self.net(x), getattr(self, self.name)
        return helper(made, x) if self.name != "vgg" else (helper(made) - helper(x)).square().mean()


def trained(model, recipe, steps=4):
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.01)
    with training(recipe, model, optimizer, total_steps=steps) as loop:
        for _ in range(steps):
            with loop.forward():
                loss = model(torch.randn(4, 16))
            loop.backward(loss)
            loop.step()
            optimizer.zero_grad()
    return loop.session


RECIPES = [
    {"prune": {"sparsity": 0.5, "begin": 1, "end": 2, "every": 1}},
    {"cluster": {"bits": 2, "begin": 1, "min_size": 0}},
    {"qat": {"scheme": "int8_weight", "begin": 1}},
    {"low_rank": {"rank": 2, "min_size": 0, "skip": [], "merge": True}},
    {"fp8": {"recipe": "tensorwise"}},
    {"lora": {"rank": 2, "save": "merged"}},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: next(iter(recipe)))
def test_a_loss_in_the_model_is_left_alone_and_does_not_count(recipe):
    model, (key,) = Restored(), recipe
    before = [value.clone() for value in model.perceptual.parameters()]
    session = trained(model, recipe)
    assert all(torch.equal(*pair) for pair in zip(before, model.perceptual.parameters(), strict=True))
    reach, helper = session.coverage[key], sum(one.numel() for one in before if one.ndim > 1)
    assert reach.beside["frozen weights"] == helper
    assert reach.total == sum(one.numel() for one in model.net.parameters() if one.ndim > 1)
    left = session.receipt().values["techniques"][key]["left_out"]
    assert sum("frozen" in reason for name, reason in left.items() if name.startswith("perceptual")) == 2
    if key not in ("prune", "cluster"):  # these leave out all that is frozen
        assert sum("perceptual.features.0, perceptual.features.2" in note for note in session.notes) == 1


def test_a_named_loss_and_a_frozen_part_of_another_name_are_quantized():
    for model, recipe in (
        (Restored(), {"scheme": "int8_weight", "begin": 1, "include": ["*"]}),
        (Restored("vgg"), {"scheme": "int8_weight", "begin": 1}),
    ):
        session = trained(model, {"qat": recipe})
        assert session.receipt().values["techniques"]["qat"]["left_out"] == {}
        assert "frozen weights" not in session.coverage["qat"].beside
        assert any("frozen layers are also quantized" in note for note in session.notes)


class Towers(nn.Module):
    def __init__(self, frozen, width):
        super().__init__()
        torch.manual_seed(0)
        self.vision = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64))
        self.text = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 4)
        getattr(self, frozen).requires_grad_(False)

    def forward(self, x):
        return self.head(self.text(self.vision(x))).square().mean()


def adapted(model, **options):
    session = trained(model, {"lora": {"rank": 2, "save": "merged", **options}})
    return {name.partition(".")[0] for name in session.context.touched["lora"].tensors}


@pytest.mark.parametrize(("options", "expected"), [({}, {"text"}), ({"include": ["vision*"]}, {"vision"})])
def test_lora_adapts_a_frozen_tower_only_if_it_is_named(options, expected):
    assert adapted(Towers("vision", 32), **options) - {"head"} == expected


def test_lora_adapts_a_frozen_base():
    assert "vision" in adapted(Towers("vision", 256))
